"""A lane's threads: when they do a tier's housekeeping, and which jobs they do together."""

import threading
from collections.abc import Iterator, Sequence
from itertools import count

import pytest

from kvcascade.errors import TierUnavailable
from kvcascade.manager import lane as lane_module
from kvcascade.manager.jobs import Job, JobKind
from kvcascade.manager.lane import ThreadLane
from kvcascade.testing import buffer, fill, key_for
from kvcascade.testing.wrappers import TierWrapper
from kvcascade.tiers.memory import MemoryTier
from kvcascade.types import Buffer, Capabilities, Changes, Key, Outcome, OutcomeKind

_HANG = 30.0


class Housekeeper(TierWrapper):
    """Says when its housekeeping has been done so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(MemoryTier())
        self.done = threading.Event()
        self._left = times

    def maintain(self, budget: float) -> Changes:
        self._left -= 1
        if self._left == 0:
            self.done.set()
        return Changes()


class Nobody:
    def ended(self, *arguments: object) -> None:
        """Not told by a lane."""


@pytest.fixture
def lanes() -> Iterator[list[ThreadLane]]:
    made: list[ThreadLane] = []
    yield made
    for lane in made:
        assert lane.close(_HANG)


def start(tier: Housekeeper, concurrency: int) -> ThreadLane:
    slot = buffer(64)
    return ThreadLane("t", tier, lambda number: slot, concurrency)


def load(number: int) -> Job:
    return Job(JobKind.PROBE, [key_for(number)], (), (), "r", Nobody(), float("inf"))


@pytest.mark.parametrize("concurrency", [1, 2])
def test_housekeeping_is_done_also_where_there_is_always_something_to_do(
    lanes: list[ThreadLane], monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    monkeypatch.setattr(lane_module, "_MAINTAIN_EVERY", 0.01)
    tier = Housekeeper(times=3)
    lanes.append(start(tier, concurrency))
    for number in count():
        while lanes[0].queued < 8:
            lanes[0].submit(load(number))
        lanes[0].poll(0.0)
        if tier.done.is_set() or number > 1_000_000:
            break
    assert tier.done.is_set()


@pytest.mark.parametrize("more", [True, False])
def test_housekeeping_that_had_not_enough_time_goes_on_soon(
    lanes: list[ThreadLane], monkeypatch: pytest.MonkeyPatch, more: bool
) -> None:
    budget = 0.0 if more else float("inf")
    monkeypatch.setattr(lane_module, "_MAINTAIN_EVERY", 1e9)
    monkeypatch.setattr(lane_module, "_MAINTAIN_ALONE", lane_module._MAINTAIN_ALONE._replace(budget=budget))
    tier = Housekeeper(times=3 if more else 2)
    lanes.append(start(tier, 1))
    lanes[0]._maintain_at = 0.0
    assert tier.done.wait(_HANG if more else 1.0) == more


class Batches(MemoryTier):
    """A tier whose calls are counted by their keys, and which is held until `may_go`."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capabilities(batches=True)
        self.calls: list[int] = []
        self.entered, self.may_go = threading.Event(), threading.Event()
        self.raises = 0

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        self._enter(len(keys))
        return super().write(keys, buffers, victims)

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        self._enter(len(keys))
        return super().read(keys, buffers)

    def _enter(self, keys: int) -> None:
        self.calls.append(keys)
        self.entered.set()
        self.may_go.wait(_HANG)
        if keys > 1 and self.raises:
            raise RuntimeError("not together")


@pytest.fixture
def batches(lanes: list[ThreadLane]) -> Batches:
    """A lane of one thread, which is held in a call, and slots of 1 MiB."""
    tier, slots = Batches(), [buffer(1 << 20) for _ in range(9)]
    lanes.append(ThreadLane("t", tier, slots.__getitem__, 1))
    for number, slot in enumerate(slots):
        fill(slot, key_for(number))
    submit(lanes[0], JobKind.WRITE, 0)
    assert tier.entered.wait(_HANG)
    return tier


def submit(lane: ThreadLane, kind: JobKind, *numbers: int) -> Job:
    keys = [key_for(number) for number in numbers]
    job = Job(kind, keys, numbers, (), f"r{numbers[0]}", Nobody(), float("inf"))
    lane.submit(job)
    return job


def ended(lane: ThreadLane, count: int) -> dict[int, list[OutcomeKind]]:
    """The outcomes of each job."""
    assert lane.wait(_HANG)
    reports = lane.poll(0.0)
    assert len(reports) == count
    return {report.job.id: [outcome.kind for outcome in report.outcomes] for report in reports}


def test_small_jobs_that_wait_are_done_in_one_call_each_with_its_own_outcomes(
    lanes: list[ThreadLane], batches: Batches
) -> None:
    stores = [submit(lanes[0], JobKind.WRITE, number) for number in (1, 2, 3)]
    batches.may_go.set()
    assert len(ended(lanes[0], 4)) == 4 and batches.calls == [1, 3]
    batches.may_go.clear()
    batches.entered.clear()
    submit(lanes[0], JobKind.READ, 0)
    assert batches.entered.wait(_HANG)
    loads = [submit(lanes[0], JobKind.READ, number) for number in (3, 8, 1)]
    batches.may_go.set()
    outcomes = ended(lanes[0], 4)
    assert batches.calls == [1, 3, 1, 3]
    assert [outcomes[load.id] for load in loads] == [[OutcomeKind.OK], [OutcomeKind.MISSING], [OutcomeKind.OK]]
    assert not set(outcomes) & {store.id for store in stores}


def test_a_call_is_no_larger_than_four_mebibytes_and_keeps_the_order(
    lanes: list[ThreadLane], batches: Batches
) -> None:
    for numbers in ((1, 2), (3, 4), (5, 6, 7, 8), (2,)):
        submit(lanes[0], JobKind.WRITE, *numbers)
    batches.may_go.set()
    ended(lanes[0], 5)
    assert batches.calls == [1, 4, 4, 1]


def test_a_call_that_raises_is_made_again_for_each_job_by_itself(
    lanes: list[ThreadLane], batches: Batches
) -> None:
    batches.raises = True
    alone, both = submit(lanes[0], JobKind.WRITE, 1), submit(lanes[0], JobKind.WRITE, 2, 3)
    batches.may_go.set()
    outcomes = ended(lanes[0], 3)
    assert batches.calls == [1, 3, 1, 2]
    assert outcomes[alone.id] == [OutcomeKind.OK]
    assert outcomes[both.id] == [OutcomeKind.FAILED] * 2


class Tuples(TierWrapper):
    """Answers with tuples, and fails at first."""

    def __init__(self) -> None:
        super().__init__(MemoryTier())
        self.failures = 1

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        self.failures -= 1
        if self.failures >= 0:
            return (Outcome.failed(TierUnavailable("not yet")),) * len(keys)  # type: ignore[return-value]
        return tuple(super().write(keys, buffers, victims))  # type: ignore[return-value]


def test_a_tier_that_answers_with_tuples_is_tried_again_like_any_other(lanes: list[ThreadLane]) -> None:
    """The lane's thread ended, and with it every job that was to come."""
    slot = buffer(64)
    lanes.append(ThreadLane("t", Tuples(), lambda number: slot, 1, 1))
    fill(slot, key_for(1))
    job = submit(lanes[0], JobKind.WRITE, 1)
    assert ended(lanes[0], 1) == {job.id: [OutcomeKind.OK]}
