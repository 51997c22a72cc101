"""What travels between scheduler and workers. Everything pickles."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvcascade.types import Key

__all__ = ["ChunkCopy", "ConnectorMetadata", "Direction", "EndedLoad", "Transfer", "WorkerReport"]


class Direction(Enum):
    STORE = "store"
    """Device to host."""
    LOAD = "load"
    """Host to device."""


class ChunkCopy(NamedTuple):
    """One chunk, or a part of it, between a slot and device blocks."""

    group: int
    """Which of the adapter's groups, by its place."""
    slot: int
    first: int
    """Place in the chunk of the first of `blocks`; 0 but for a load whose start the engine has already."""
    blocks: tuple[int, ...]
    """Device blocks, one after the other in the chunk; those that are `NO_BLOCK` are not copied."""


class Transfer(NamedTuple):
    """One job of a worker: it is reported once by each worker."""

    job: int
    req_id: str
    direction: Direction
    chunks: tuple[ChunkCopy, ...]


@dataclass(slots=True)
class ConnectorMetadata:
    """What the workers are to do in one step: made by `SchedulerAdapter.build_connector_meta`."""

    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)
    """Jobs, of this step or an earlier one, that must have ended before this step's computation and loads begin:
    their blocks are given to somebody else."""


@dataclass(slots=True)
class WorkerReport:
    """What workers have ended since they reported last. Reports of several workers are merged into one, in any
    order and split over any steps."""

    ended: dict[int, int] = field(default_factory=dict)
    """Job -> how many workers have ended it, well or not."""
    failed: dict[int, set[int]] = field(default_factory=dict)
    """Job -> places in `Transfer.chunks` of the chunks that were not copied, on any of the workers."""

    def add(self, job: int, failed: Iterable[int] = ()) -> None:
        """One worker has ended this job."""
        self.ended[job] = self.ended.get(job, 0) + 1
        places = set(failed)
        if places:
            self.failed.setdefault(job, set()).update(places)

    def merge(self, other: "WorkerReport") -> "WorkerReport":
        """Adds what other workers have reported; returns itself."""
        for job, count in other.ended.items():
            self.ended[job] = self.ended.get(job, 0) + count
        for job, places in other.failed.items():
            self.failed.setdefault(job, set()).update(places)
        return self

    def __bool__(self) -> bool:
        return bool(self.ended)


class EndedLoad(NamedTuple):
    """A load that has ended on all workers; the request may be scheduled, or its blocks be freed if it has
    finished meanwhile."""

    req_id: str
    valid_tokens: int
    """Leading tokens of the request whose KV is in its blocks; what is beyond must be computed. 0 where a load
    behind a sliding window has failed, since the engine has let go of the blocks before that window."""
    invalid: tuple[frozenset[int], ...]
    """For each of the adapter's groups, the device blocks that were to be loaded and were not."""
    keys: tuple[Key, ...] = ()
    """The chunks that were not loaded."""

    @property
    def ok(self) -> bool:
        return not any(self.invalid)
