"""Epochs of a bucket that several engines share: who is reset, who stays, what is never served again."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvcascade.errors import TierError, TierUnavailable
from kvcascade.testing.epochs import KEY, EpochConformance
from kvcascade.tiers.s3 import upkeep
from kvcascade.tiers.s3.epochs import KEPT, Epoch
from kvcascade.types import Outcome


class TestEpochs(EpochConformance):
    moves = 10
    late = [Outcome.REFUSED] * 3

    def mark(self, tier: Any) -> object:
        return tier._opened.epoch

    def check_entered(self, marks: Sequence[Any]) -> None:
        assert [epoch.generation for epoch in marks] == list(range(1, self.moves + 1))


def test_a_write_that_the_store_finishes_after_the_reset(faulty: Any) -> None:
    shared, faults = faulty
    tier = shared.engine()
    faults.hang(method="PUT", within=KEY.hex())
    outcomes: list[Outcome] = []
    writer = threading.Thread(target=lambda: outcomes.extend(shared.store(tier, [KEY])))
    writer.start()
    while not any(one.method == "PUT" and KEY.hex() in one.target for one in faults.seen):
        time.sleep(0.001)
    tier.move_to("v2")
    faults.release()
    writer.join(60)
    assert outcomes == [Outcome.REFUSED]
    assert not shared.serves(tier, "")
    assert not shared.serves(shared.engine("v2"), "")


@pytest.mark.parametrize("status", [403, 503])
def test_a_mark_that_can_not_be_written(faulty: Any, status: int) -> None:
    """The tier answers nothing and takes nothing until it can."""
    shared, faults = faulty
    tier, other = shared.engine(), shared.engine()
    shared.store(tier, [KEY], epoch="old")
    faults.answer(status, method="PUT", within="/epochs/", times=2)
    with pytest.raises(TierError):
        tier.move_to("v2")
    shared.check_silent(tier, TierError)
    assert shared.serves(other, "old")
    tier.move_to("v2")
    assert not shared.serves(tier, "")
    shared.store(tier, [KEY], epoch="v2")
    assert shared.serves(shared.engine("v2"), "v2")


def test_a_list_that_is_no_list_lets_nobody_into_an_old_epoch(faulty: Any) -> None:
    """A proxy that answers 200 with a page of its own must not make void chunks come back."""
    shared, faults = faulty
    one = shared.engine()
    one.move_to("")
    for reply in (
        b"<html>Welcome</html>",
        b"",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    ):
        faults.alter(
            lambda real, body=reply: real._replace(fields={}, body=body), method="GET", within="list-type"
        )
        with pytest.raises(TierUnavailable, match="no list"):
            shared.engine()


def test_marks_do_not_pile_up(one_shared: Any) -> None:
    tier = one_shared.engine()
    for _ in range(12):
        tier.move_to("")
    marks = [name for name in one_shared.names() if "/epochs/" in name and not name.endswith(".json")]
    assert len(marks) == KEPT + 1
    assert one_shared.engine()._opened.epoch.generation == 12


# What the bucket loses


def remove_marks(shared: Any, ending: str = "") -> None:
    marks = [name for name in shared.names() if "/epochs/" in name and name.endswith(ending)]
    assert marks
    for name in marks:
        shared.client().delete_object(Bucket=shared.bucket, Key=name)


@pytest.mark.parametrize("name", ["", "v1"])
@pytest.mark.parametrize("resets", [0, 1, 3])
def test_marks_that_are_lost_never_come_back(shared: Any, name: str, resets: int) -> None:
    """An engine that was left in a void epoch still fills it; nobody who starts then is served of that."""
    old = shared.engine(name)
    for _ in range(resets):
        shared.engine(name).move_to("")
    before = shared.engine(name)
    remove_marks(shared)
    shared.store(old, [KEY], epoch="old")
    shared.store(before, [KEY], epoch="old")
    fresh = shared.engine(name)
    assert not shared.serves(fresh, "")
    assert shared.serves(old, "old")
    assert shared.serves(before, "old")
    shared.store(fresh, [KEY], epoch="new")
    assert shared.serves(shared.engine(name), "new")
    for engine in (old, before):  # nor does what they do put a mark back
        engine._upkeep._due = 0.0
        engine.maintain(1.0)
        engine.move_to("")
    assert shared.serves(shared.engine(name), "new") is (name != "")


def test_a_follower_that_is_lost_lets_nobody_back_into_what_was_left(one_shared: Any) -> None:
    old = one_shared.engine("v1")
    one_shared.store(old, [KEY], epoch="old")
    one_shared.engine("v1").move_to("v1")
    remove_marks(one_shared, "/1")
    fresh = one_shared.engine("v1")
    assert not one_shared.serves(fresh, "")
    assert fresh._opened.epoch.generation == 1
    assert fresh._opened.epoch != old._opened.epoch.following
    assert one_shared.engine("v1")._opened.epoch == fresh._opened.epoch


def test_a_mark_that_says_nothing_is_a_lost_one(one_shared: Any) -> None:
    old = one_shared.engine()
    (mark,) = (name for name in one_shared.names() if name.endswith("/0"))
    one_shared.store(old, [KEY], epoch="old")
    one_shared.client().put_object(Bucket=one_shared.bucket, Key=mark, Body=b"[1]")
    assert not one_shared.serves(one_shared.engine(), "")
    assert one_shared.serves(old, "old")


def test_a_claim_that_a_killed_engine_left_brings_no_void_epoch_back(one_shared: Any) -> None:
    old = one_shared.engine("v1")
    (mark,) = (name for name in one_shared.names() if name.endswith("/0"))
    claim = f"{mark}-{old._opened.epoch.value}"
    one_shared.client().put_object(Bucket=one_shared.bucket, Key=claim, Body=b"{}")
    one_shared.store(old, [KEY], epoch="old")
    one_shared.engine("v1").move_to("v2")
    for generation in range(2):
        remove_marks(one_shared, f"/{generation}")
    assert not one_shared.serves(one_shared.engine("v1"), "")


def test_engines_that_start_at_once_meet(shared: Any) -> None:
    """The ranks of a deployment, on a bucket that is new to them."""
    start = threading.Barrier(4)
    entered: list[list[Epoch]] = [[] for _ in range(4)]

    def engine(who: int) -> None:
        for turn in range(5):
            start.wait(60)
            tier = shared.engine(f"v{turn}")
            entered[who].append(tier._opened.epoch)

    shared.engine("first")
    threads = [threading.Thread(target=engine, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(entered[0]) == 5
    assert entered == [entered[0]] * 4
    assert [name for name in shared.names() if "/epochs/" in name and "-" in name.rpartition("/")[2]] == []


def test_who_only_reads_enters_an_epoch_that_is_begun_later(shared: Any) -> None:
    reader = shared.engine("v1", write="off")
    assert not shared.serves(reader, "")
    assert list(reader.entries()) == []
    reader.maintain(1.0)
    assert shared.names() == []
    shared.store(shared.engine("v1"), [KEY], epoch="new")
    reader.maintain(1.0)
    assert shared.serves(reader, "new")


@pytest.mark.parametrize("write", ["through", "off"])
def test_marks_outlive_a_lifecycle_rule(one_shared: Any, monkeypatch: pytest.MonkeyPatch, write: str) -> None:
    """A rule removes what is old; marks are written anew long before, by engines of any epoch, also by those that
    only read."""
    other = one_shared.engine()
    old = one_shared.engine(write=write)
    other.move_to("")
    before = {name: written(one_shared, name) for name in one_shared.names()}
    marks = [name for name in before if "/epochs/" in name and not name.endswith(".json")]
    assert len(marks) == 2
    old.maintain(1.0)
    assert {name: written(one_shared, name) for name in one_shared.names()} == before
    monkeypatch.setattr(upkeep, "RENEW_AFTER", -60.0)
    time.sleep(1.1)  # the store's clock is as fine as a second
    old._upkeep._due = 0.0
    old.maintain(1.0)
    after = {name: written(one_shared, name) for name in one_shared.names()}
    assert set(after) == set(before)
    renewed = {name for name in after if after[name] > before[name]}
    assert set(marks) <= renewed
    assert any(name.endswith("/namespace.json") for name in renewed)
    assert not one_shared.serves(one_shared.engine(), "")


def written(shared: Any, name: str) -> Any:
    return shared.client().head_object(Bucket=shared.bucket, Key=name)["LastModified"]


def test_marks_tell_epochs_apart() -> None:
    one, two = "1" * 32, "2" * 32
    epochs = [Epoch("", 0, one), Epoch("", 0, two), Epoch("v", 0, one), Epoch(two, 0, one)]
    epochs += [epoch.following for epoch in epochs]
    assert len({epoch.mark for epoch in epochs}) == len(epochs)
