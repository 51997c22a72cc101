"""One secondary tier as the manager sees it: its medium, its lane, what it holds, and what is counted."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from copy import deepcopy
from typing import NamedTuple

from kvcascade.configs.schema import SecondarySettings
from kvcascade.tiers import Tier
from kvcascade.types import Key, MissReason, OutcomeKind

from .jobs import Job, JobKind, Report
from .lane import Lane
from .residency import Residency
from .stats import TierStats

__all__ = ["Level", "Moved"]

_REMEMBERED = 1 << 16
_JOB_BYTES = 8 << 20
_JOB_CHUNKS = 64
_VOID_AGAIN = 1.0

_REASONS = {
    OutcomeKind.MISSING: MissReason.EVICTED,
    OutcomeKind.CORRUPT: MissReason.CORRUPT,
    OutcomeKind.REFUSED: MissReason.REFUSED,
    OutcomeKind.FAILED: MissReason.TIER_DOWN,
}


class Moved(NamedTuple):
    """Keys that a tier has come to hold, and that it has lost."""

    came: Sequence[Key] = ()
    went: Sequence[Key] = ()


class Level:
    """A secondary tier at its place in the chain. Used by the scheduler thread only; its lane does the I/O."""

    def __init__(
        self,
        place: int,
        settings: SecondarySettings,
        tier: Tier,
        residency: Residency,
        lane: Lane,
        chunk_bytes: int,
    ) -> None:
        self.place = place
        self.settings = settings
        self.tier = tier
        self.residency = residency
        self.lane = lane
        self.chunk_bytes = chunk_bytes
        self.job_chunks = max(1, min(_JOB_CHUNKS, _JOB_BYTES // chunk_bytes))
        self.stats = TierStats(settings.name, settings.type, capacity=residency.capacity)
        self.pinned = 0
        """Pins on primary's slots that its stores hold."""
        self.awaited = 0
        """Jobs of requests that have not been reported."""
        self._running = 0
        """Jobs that have not ended."""
        self._generation = 0
        self._missed: dict[Key, None] = {}
        self._voiding: Future[None] | None = None
        self._stragglers = False
        self._void_again = 0.0
        self._epoch = ""

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def up(self) -> bool:
        """Whether it is asked at all. A tier whose threads are all stuck, or whose old epoch could not be voided,
        is not."""
        return self._voiding is None and self.lane.lost < self.settings.concurrency

    def holds(self, key: Key) -> bool:
        return self.up and key in self.residency

    def why(self, key: Key) -> MissReason:
        """Why `holds` is False."""
        return self.residency.why(key) if self.up else MissReason.TIER_DOWN

    # Jobs

    def submit(self, job: Job) -> None:
        job.generation = self._generation
        self._running += 1
        if job.kind is JobKind.WRITE:
            self.pinned += len(job.keys)
        if job.owner:
            self.awaited += 1
        self.lane.submit(job)

    def record(self, report: Report) -> Moved:
        """Counts what a job did, and brings the residency up to date with it. Returns what changed there."""
        job = report.job
        first = not (report.ended and job.expired)
        if first and job.owner:
            self.awaited -= 1
        if first:
            self._count(report)
        if report.ended:
            self._running -= 1
            self._time(report)
            if job.kind is JobKind.WRITE:
                self.pinned -= len(job.keys)
            if job.generation == self._generation:
                return self._has_read(report) if job.kind is JobKind.READ else self._has_written(report)
        return Moved()

    def _has_read(self, report: Report) -> Moved:
        gone = []
        for key, outcome in zip(report.job.keys, report.outcomes, strict=True):
            self.residency.end_read(key)
            lost = outcome.kind in (OutcomeKind.MISSING, OutcomeKind.CORRUPT)
            if lost and self.residency.lost(key, _REASONS[outcome.kind]):
                gone.append(key)
        return Moved(went=gone)

    def _has_written(self, report: Report) -> Moved:
        new = []
        for key, outcome in zip(report.job.keys, report.outcomes, strict=True):
            if outcome.ok:
                if self.residency.written(key):
                    new.append(key)
                continue
            self.residency.not_written(key, _REASONS[outcome.kind])
            if outcome.kind is OutcomeKind.FAILED:
                self.miss(key)
        if report.ran:
            return Moved(new, self.residency.deleted(report.job.victims))
        self.residency.spared(report.job.victims)
        return Moved(new)

    def _time(self, report: Report) -> None:
        if report.ran:
            reads = report.job.kind is JobKind.READ
            (self.stats.read_latency if reads else self.stats.write_latency).add(report.seconds)

    def _count(self, report: Report) -> None:
        job, stats = report.job, self.stats
        stats.timed_out += report.late
        good = sum(outcome.ok for outcome in report.outcomes)
        bad = len(report.outcomes) - good
        stats.corrupt += sum(outcome.kind is OutcomeKind.CORRUPT for outcome in report.outcomes)
        if job.kind is JobKind.READ:
            stats.read += good
            stats.read_bytes += good * self.chunk_bytes
            stats.failed_reads += bad
        else:
            refused = sum(outcome.kind is OutcomeKind.REFUSED for outcome in report.outcomes)
            stats.written += good
            stats.written_bytes += good * self.chunk_bytes
            stats.refused += refused
            stats.failed_writes += bad - refused

    # Cascades that did not happen

    def miss(self, key: Key) -> None:
        """A cascade of this key was shed or failed: remembered, the oldest forgotten beyond 65,536."""
        if len(self._missed) >= _REMEMBERED:
            del self._missed[next(iter(self._missed))]
        self._missed[key] = None

    def take_missed(self, keys: Sequence[Key]) -> list[Key]:
        """Those of the keys whose cascade did not happen; they count as tried again from here on."""
        if not self._missed:
            return []
        missed = [key for key in keys if key in self._missed]
        for key in missed:
            del self._missed[key]
        return missed

    # Reset

    def void(self, epoch: str) -> "Future[None]":
        """Begins to make everything stored so far void, in the lane. The tier is down until `settle_void`."""
        self._epoch = epoch
        self._stragglers = False
        self._voiding = self.lane.run(lambda: self.tier.move_to(epoch))
        self._generation += 1
        self._missed.clear()
        return self._voiding

    def settle_void(self, now: float) -> list[Key]:
        """Where the voiding has ended: the tier is up again, empty; where it failed, it is tried again in a while.
        A write that was begun before may reach the tier after it was voided: the tier stays down until all such
        have ended, and is voided once more. Returns the keys that are gone."""
        voiding = self._voiding
        if voiding is None or not voiding.done():
            return []
        self._stragglers = self._stragglers or self._running > 0
        if self._running:
            return []
        if voiding.exception() is not None:
            if now >= self._void_again:
                self._void_again = now + _VOID_AGAIN
                self._voiding = self.lane.run(lambda: self.tier.move_to(self._epoch))
            return []
        if self._stragglers:
            self._stragglers = False
            self._voiding = self.lane.run(lambda: self.tier.move_to(self._epoch))
            return []
        self._voiding = None
        return self.residency.clear()

    def read_changes(self) -> Iterator[Moved]:
        """Takes in what the tier's own housekeeping has found and dropped."""
        for changes in self.lane.changes():
            went = [key for key in changes.vanished if self.residency.lost(key, MissReason.EXPIRED)]
            yield Moved(self.residency.load(changes.appeared), went)

    def snapshot(self) -> TierStats:
        """The counters, brought up to date."""
        stats = self.stats
        stats.chunks, stats.bytes = self.residency.chunks, self.residency.bytes
        stats.evictions = self.residency.evictions
        stats.queue, stats.up = self.lane.queued, self.up
        return deepcopy(stats)
