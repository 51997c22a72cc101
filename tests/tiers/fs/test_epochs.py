"""Epochs of a directory that several engines share: who is reset, who stays, what is never served again."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import TierUnavailable
from kvcascade.testing import NAMESPACE, buffer, bytes_for, key_for
from kvcascade.tiers.fs.epochs import KEPT, Epoch, Epochs
from kvcascade.tiers.fs.layout import Access
from kvcascade.types import Outcome

KEY = key_for(1)


def holds(shared: Any, tier: Any, epoch: str) -> bool:
    """Whether the chunk that was stored for `epoch` is served; that of another one never is."""
    there = tier.exists([KEY]) == [True]
    (outcome,) = shared.load(tier, [KEY], epoch=epoch)
    assert outcome == (Outcome.OK if there else Outcome.MISSING)
    return there


@pytest.mark.parametrize("start", ["", "v1"])
@pytest.mark.parametrize("target", ["", "v2"])
def test_a_reset_moves_one_engine_and_leaves_the_others(shared: Any, start: str, target: str) -> None:
    """vllm-project/vllm#57727: after it, nothing old is served to the one, and all of it to the others."""
    one, other = shared.engine(start), shared.engine(start)
    shared.store(other, [KEY], epoch="old")
    assert holds(shared, one, "old")
    one.move_to(target)
    assert not holds(shared, one, "")
    assert list(one.entries()) == []
    assert holds(shared, other, "old")
    shared.store(one, [KEY], epoch="new")
    assert holds(shared, one, "new")
    assert holds(shared, other, "old")


@pytest.mark.parametrize("start", ["", "v1"])
@pytest.mark.parametrize("target", ["", "v2"])
def test_a_restart_after_a_reset_finds_nothing_old(shared: Any, start: str, target: str) -> None:
    """Its stack file does not know of the reset. Others that still run in the old epoch go on to store there."""
    one, other = shared.engine(start), shared.engine(start)
    shared.store(one, [KEY], epoch="old")
    one.move_to(target)
    one.close()
    shared.store(other, [KEY], epoch="old")
    again = shared.engine(start)
    assert not holds(shared, again, "")
    assert holds(shared, other, "old")
    shared.store(again, [KEY], epoch="again")
    again.close()
    assert holds(shared, shared.engine(start), "again")  # the next restart is warm


def test_engines_that_name_the_same_weights_share(shared: Any) -> None:
    one, two, three = shared.engine(), shared.engine("v1"), shared.engine("v2")
    one.move_to("v2")
    shared.store(one, [KEY], epoch="v2")
    assert holds(shared, three, "v2")
    assert not holds(shared, two, "")
    two.move_to("v2")
    assert holds(shared, two, "v2")
    one.close()
    assert holds(shared, shared.engine("v2"), "v2")


def test_nobody_joins_an_engine_that_was_reset_without_a_name(shared: Any) -> None:
    one, two = shared.engine(), shared.engine()
    one.move_to("")
    shared.store(one, [KEY], epoch="one")
    two.move_to("")
    assert not holds(shared, two, "")
    for epoch in ("", "v1"):
        assert not holds(shared, shared.engine(epoch), "")
    one.close()
    assert not holds(shared, shared.engine(), "")


def test_a_reset_to_the_same_name_is_a_reset(shared: Any) -> None:
    """Engines that name it and are reset as well share what comes then."""
    one, two, late = shared.engine("v1"), shared.engine("v1"), shared.engine("v1")
    shared.store(one, [KEY], epoch="old")
    one.move_to("v1")
    assert not holds(shared, one, "")
    shared.store(one, [KEY], epoch="new")
    assert holds(shared, two, "old")
    two.move_to("v1")
    assert holds(shared, two, "new")
    assert holds(shared, late, "old")
    assert holds(shared, shared.engine("v1"), "new")


def test_weights_that_come_back_begin_empty(shared: Any) -> None:
    one = shared.engine("v1")
    shared.store(one, [KEY], epoch="first")
    one.move_to("v2")
    one.move_to("v1")
    assert not holds(shared, one, "")


def test_who_starts_unnamed_after_any_reset_is_told_nothing_of_others_that_did_before_it(shared: Any) -> None:
    """An engine with new weights restarts without a name: what one with older weights stored there meanwhile is
    not for it."""
    one = shared.engine()
    one.move_to("")
    older = shared.engine()
    shared.store(older, [KEY], epoch="older")
    one.move_to("")
    one.close()
    assert not holds(shared, shared.engine(), "")
    assert holds(shared, older, "older")


class HeldBatch(list):  # type: ignore[type-arg]
    """Buffers, of which the second is handed over when it is released."""

    def __init__(self, buffers: list[memoryview]) -> None:
        super().__init__(buffers)
        self.reached, self.released = threading.Event(), threading.Event()

    def __iter__(self) -> Any:
        yield self[0]
        self.reached.set()
        assert self.released.wait(60)
        yield from self[1:]


@pytest.mark.parametrize("target", ["", "v2"])
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_late_write_of_the_old_epoch(shared: Any, target: str, exclusive: bool) -> None:
    """It is refused, and seen neither by this engine nor by one that has named the new weights before."""
    tier = shared.engine(exclusive=exclusive, capacity=1 << 20)
    keys = shared.keys(1, 2, 3)
    batch = HeldBatch([memoryview(bytes_for(key, shared.chunk)) for key in keys])
    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(tier.write(keys, batch)))
    writer.start()
    assert batch.reached.wait(60)
    tier.move_to(target)
    batch.released.set()
    writer.join(60)
    assert outcomes == [Outcome.OK, Outcome.REFUSED, Outcome.REFUSED]
    assert tier.exists(keys) == [False] * 3
    assert shared.temporaries == []
    if not exclusive:
        assert shared.engine(target).exists(keys) == [False] * 3


def test_a_late_read_of_the_old_epoch(shared: Any) -> None:
    tier = shared.engine()
    keys = shared.keys(1, 2)
    shared.store(tier, keys)
    batch = HeldBatch([buffer(shared.chunk) for _ in keys])
    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.extend(tier.read(keys, batch)))
    reader.start()
    assert batch.reached.wait(60)
    tier.move_to("v2")
    batch.released.set()
    reader.join(60)
    assert outcomes == [Outcome.MISSING] * 2


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
        assert tier.exists([KEY]) == [False]
        assert shared.load(tier, [KEY]) == [Outcome.MISSING]
        assert shared.store(tier, [KEY]) == [Outcome.REFUSED]
        assert tier.delete([KEY]) == [Outcome.MISSING]
        assert list(tier.entries()) == []
        tier.touch([KEY])
        with pytest.raises(TierUnavailable):
            tier.move_to("v2")
    assert holds(shared, other, "old")
    tier.move_to("v2")
    assert not holds(shared, tier, "")
    shared.store(tier, [KEY], epoch="v2")
    assert holds(shared, shared.engine("v2"), "v2")


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


def test_two_engines_that_leave_the_same_epoch_at_once_meet_again(tmp_path: Path) -> None:
    """All engines of a deployment are reset to the same weights, again and again, at the same time."""
    start = threading.Barrier(2)
    entered: dict[int, list[Epoch]] = {1: [], 2: []}

    def engine(who: int) -> None:
        epochs = Epochs(tmp_path, NAMESPACE, Access())
        epoch = epochs.enter("v1")
        for _ in range(20):
            start.wait(60)
            epoch = epochs.move(epoch, "v1")
            entered[who].append(epoch)

    threads = [threading.Thread(target=engine, args=(who,)) for who in entered]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert entered[1] == entered[2]
    assert [epoch.generation for epoch in entered[1]] == list(range(1, 21))


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
