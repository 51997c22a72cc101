"""A lane's threads: when they do a tier's housekeeping."""

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from kvcascade.manager import lane as lane_module
from kvcascade.manager.jobs import Job, JobKind
from kvcascade.manager.lane import ThreadLane
from kvcascade.testing import buffer, key_for
from kvcascade.testing.wrappers import TierWrapper
from kvcascade.tiers.memory import MemoryTier
from kvcascade.types import Changes

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
