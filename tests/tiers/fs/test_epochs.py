"""Epochs of a directory that several engines share: who is reset, who stays, what is never served again."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import TierUnavailable
from kvcascade.testing import NAMESPACE, bytes_for
from kvcascade.testing.epochs import KEY, EpochConformance, HeldBatch
from kvcascade.tiers.fs.epochs import KEPT, Epoch, Epochs
from kvcascade.tiers.fs.layout import Access
from kvcascade.types import Outcome


class TestEpochs(EpochConformance):
    def mark(self, tier: Any) -> object:
        return tier._opened.epoch

    def check_entered(self, marks: Sequence[Any]) -> None:
        assert [epoch.generation for epoch in marks] == list(range(1, self.moves + 1))


@pytest.mark.parametrize("target", ["", "v2"])
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_late_write_leaves_no_temporary(shared: Any, target: str, exclusive: bool) -> None:
    tier = shared.engine(exclusive=exclusive, capacity=1 << 20)
    keys = shared.keys(1, 2, 3)
    batch = HeldBatch([memoryview(bytes_for(key, shared.chunk)) for key in keys])
    found = batch.held(lambda: tier.write(keys, batch), lambda: tier.move_to(target))
    assert found == [Outcome.OK, Outcome.REFUSED, Outcome.REFUSED]
    assert tier.exists(keys) == [False] * 3
    assert shared.temporaries == []


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_mark_that_can_not_be_written(shared: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The tier answers nothing and takes nothing until it can."""
    tier, other = shared.engine(), shared.engine()
    shared.store(tier, [KEY], epoch="old")
    with monkeypatch.context() as broken:

        def fails(*args: Any, **named: Any) -> int:
            raise OSError(5, "Input/output error")

        broken.setattr(os, call, fails)
        with pytest.raises(TierUnavailable, match="mark of the new epoch can't be written"):
            tier.move_to("v2")
        shared.check_silent(tier)
    assert shared.serves(other, "old")
    tier.move_to("v2")
    assert not shared.serves(tier, "")
    shared.store(tier, [KEY], epoch="v2")
    assert shared.serves(shared.engine("v2"), "v2")


def test_marks_are_synced_before_the_move_returns(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut of the server the old epoch is void, too."""
    tier = shared.engine()
    synced: list[str] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    tier.move_to("")
    marks = tier._opened.home.marks
    (mark,) = marks.glob("*/*")
    assert synced[0] == str(mark)
    assert {str(mark.parent), str(marks), str(marks.parent)} <= set(synced[1:])


def test_marks_do_not_pile_up(tmp_path: Path) -> None:
    epochs = Epochs(tmp_path, NAMESPACE, Access())
    epoch = epochs.enter("")
    for _ in range(40):
        epoch = epochs.move(epoch, "")
    assert epochs.enter("").generation == 40
    assert len(list(tmp_path.glob("*/*"))) <= KEPT + 1


def test_marks_tell_epochs_apart() -> None:
    epochs = [Epoch("", 0), Epoch("", 1), Epoch("v", 0), Epoch("0 v", 0), Epoch("", 0, "v"), Epoch("private v", 0)]
    assert len({epoch.mark for epoch in epochs}) == len(epochs)
