"""Managers without a medium: what is left is the bookkeeping, which an engine's scheduler thread pays for."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvcascade import SecondaryTierManager, build
from kvcascade.configs.schema import StackSettings
from kvcascade.manager.jobs import Job, Report
from kvcascade.testing import NAMESPACE
from kvcascade.tiers.host import HostPool, HostSettings
from kvcascade.tiers.memory import MemorySettings
from kvcascade.types import Buffer, Changes, Outcome

__all__ = ["CHUNK_BYTES", "InstantLane", "manager", "memory_tier"]

CHUNK_BYTES = 64
_STRIDE = 4096
_REAL_SLOTS = 64


class ThinPool(HostPool):
    """A pool that says it has `slots` slots, over the memory of a few."""

    def __init__(self, slots: int) -> None:
        super().__init__(_REAL_SLOTS, CHUNK_BYTES)
        self.slots = slots

    def slot(self, index: int) -> Buffer:
        return super().slot(index % _REAL_SLOTS)


class InstantLane:
    """Moves nothing: each job has succeeded when the lane is next asked."""

    up = True

    def __init__(self, *_: Any) -> None:
        self._jobs: list[Job] = []

    @property
    def queued(self) -> int:
        return len(self._jobs)

    def submit(self, job: Job) -> None:
        self._jobs.append(job)

    def start(self) -> None:
        pass

    def finish(self, owner: str) -> None:
        pass

    def poll(self, now: float) -> list[Report]:
        jobs, self._jobs = self._jobs, []
        return [Report(job, [Outcome.OK] * len(job.keys)) for job in jobs]

    def changes(self) -> list[Changes]:
        return []

    def withdraw(self) -> None:
        pass

    def wait(self, timeout: float) -> bool:
        return True

    def move_to(self, epoch: str) -> "Future[None]":
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self, timeout: float) -> bool:
        return True


def memory_tier(name: str, chunks: int, **options: Any) -> MemorySettings:
    """The settings of a tier that holds so many chunks."""
    return MemorySettings(name=name, capacity=chunks * CHUNK_BYTES, **options)


def manager(
    slots: int, policy: str = "lru", below: Sequence[MemorySettings] = (), events: bool = False
) -> SecondaryTierManager:
    """A stack's manager, as `build` makes it, with `slots` slots in primary and these tiers below."""
    host = HostSettings(name="host", capacity=(slots + 1) * _STRIDE, eviction=policy)
    settings = StackSettings(version=1, log_every=0, tiers=(host, *below))
    return build(settings, NAMESPACE, CHUNK_BYTES, pool=ThinPool(slots), lane=InstantLane, events=events)
