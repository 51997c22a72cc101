"""One secondary tier as the manager sees it: its medium, its lane, what it holds, and what is counted."""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from kvcascade.configs.schema import PromoteAfter, SecondarySettings
from kvcascade.errors import ClosedError
from kvcascade.types import Key, MissReason, OutcomeKind

from .breaker import Breaker
from .control import TierControl
from .jobs import Job, JobKind, Report
from .lane import Lane
from .probes import ProbeTable
from .residency import Residency
from .stats import TierStats
from .uses import UseCounts
from .voiding import Voiding

__all__ = ["Level", "Moved"]

logger = logging.getLogger("kvcascade")

_REMEMBERED = 1 << 16
_JOB_BYTES = 8 << 20
_JOB_CHUNKS = 64
_DOUBTFUL_A_JOB = 64
_SQUEEZED_FOR = 30.0

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
        tier: TierControl,
        residency: Residency | ProbeTable,
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
        self.on_loss: Callable[[Key], None] = lambda key: None
        """Is told of each chunk that the tier turns out to have lost, other than by evicting it; set where chunks
        are demoted into it."""
        self.being_deleted: set[Key] = set()
        """Keys that nobody knows to be here, and that a job deletes just in case: not to be written meanwhile."""
        self._missed: OrderedDict[Key, None] = OrderedDict()
        self._doubtful: dict[Key, None] = {}
        self._breaker = Breaker(settings.breaker.failures, settings.breaker.probe_every)
        self._voiding = Voiding(lane, tier.capabilities.shared)
        self._uses = UseCounts()
        self._was_up = True
        self._squeezed_until = 0.0

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def shared(self) -> bool:
        return isinstance(self.residency, ProbeTable)

    @property
    def up(self) -> bool:
        """Whether it is asked at all. A tier that fails again and again, whose lane gets nowhere, or whose old
        epoch could not be voided, is not."""
        return self._breaker.closed and not self._voiding.under_way and self.lane.up

    def holds(self, key: Key) -> bool:
        """Whether the key is known to be readable here."""
        return self.up and key in self.residency

    def unsure(self, key: Key) -> bool:
        """Whether it is not known if the key is here."""
        return isinstance(self.residency, ProbeTable) and self.up and not self.residency.knows(key)

    def why(self, key: Key) -> MissReason:
        """Why `holds` is False."""
        return self.residency.why(key) if self.up else MissReason.TIER_DOWN

    # Policies

    def expire(self, keys: Sequence[Key]) -> list[Key]:
        """Of these keys, those whose time is over are forgotten now, and deleted with the next write."""
        if self.settings.ttl is None or not isinstance(self.residency, Residency):
            return []
        old = self.residency.expire(keys)
        self._doubtful.update(dict.fromkeys(old))
        for key in old:
            self.on_loss(key)
        return old

    def _lose(self, key: Key, reason: MissReason) -> bool:
        """The tier does not have the key after all, or not any more. False where that was known."""
        self.on_loss(key)
        return self.residency.lost(key, reason)

    @property
    def counts_uses(self) -> bool:
        """Whether a policy of this tier depends on how often a chunk was used."""
        return isinstance(self.settings.promote, PromoteAfter) or self.settings.admit_after > 1

    def used(self, key: Key) -> None:
        """One more request that used the key has finished."""
        self._uses.add(key)

    def promotes(self, key: Key) -> bool:
        """Whether a chunk that is here moves up to primary when a request asks for it now."""
        promote = self.settings.promote
        if isinstance(promote, PromoteAfter):
            return self._uses[key] + 1 >= promote.after
        return promote == "always"

    def admits(self, key: Key) -> bool:
        """Whether the chunk is used often enough, this use included, to be stored here."""
        return self.settings.admit_after <= 1 or self._uses[key] + 1 >= self.settings.admit_after

    def wants(self, key: Key) -> bool:
        """Whether the chunk, which nobody uses now, was used often enough to be stored here."""
        return self.settings.admit_after <= 1 or self._uses[key] >= self.settings.admit_after

    # Probes

    def ask(self, key: Key) -> None:
        """Somebody wants to know whether the key is here."""
        if isinstance(self.residency, ProbeTable):
            self.residency.ask(key)

    def take_asked(self) -> list[Key]:
        """The keys to probe now."""
        return self.residency.take_asked() if isinstance(self.residency, ProbeTable) else []

    # Jobs

    def submit(self, job: Job) -> None:
        job.generation = self._generation
        self._running += 1
        if job.kind is JobKind.WRITE:
            self.pinned += len(job.keys)
            doubtful = self._take_doubtful(job)
            self.being_deleted.update(doubtful)
            job.victims = [*job.victims, *doubtful]
        if job.owner:
            self.awaited += 1
        self.lane.submit(job)

    def record(self, report: Report, now: float) -> Moved:
        """Counts what a job did, and brings the residency up to date with it. Returns what changed there."""
        job = report.job
        first = not (report.ended and job.expired)
        if first and job.owner:
            self.awaited -= 1
        if first:
            self.stats.count(report, self.chunk_bytes)
            self._judge(report, now)
        probed = self._has_probed(report) if job.kind is JobKind.PROBE else Moved()
        if not report.ended:
            return probed
        self._running -= 1
        self.stats.time(report)
        if job.kind is JobKind.WRITE:
            self.pinned -= len(job.keys)
            self.being_deleted.difference_update(job.victims)
        if job.generation != self._generation or job.kind is JobKind.PROBE:
            return probed
        return self._has_read(report) if job.kind is JobKind.READ else self._has_written(report, now)

    def _has_read(self, report: Report) -> Moved:
        gone = []
        for key, outcome in zip(report.job.keys, report.outcomes, strict=True):
            self.residency.end_read(key)
            lost = outcome.kind in (OutcomeKind.MISSING, OutcomeKind.CORRUPT)
            if lost and self._lose(key, _REASONS[outcome.kind]):
                gone.append(key)
        return Moved(went=gone)

    def _has_written(self, report: Report, now: float) -> Moved:
        new = []
        for key, outcome in zip(report.job.keys, report.outcomes, strict=True):
            if outcome.ok:
                if self.residency.written(key):
                    new.append(key)
                continue
            self.residency.not_written(key, _REASONS[outcome.kind])
            if outcome.kind is OutcomeKind.FAILED:
                self.miss(key)
                self._doubt(report, [key])
        self._squeeze(report, now)
        if not report.ran:
            self.residency.spared(report.job.victims)
            self._doubtful.update((key, None) for key in report.job.victims if self.residency.absent([key]))
            return Moved(new)
        if not any(outcome.ok for outcome in report.outcomes):
            self._doubt(report, report.job.victims)
        return Moved(new, self.residency.deleted(report.job.victims))

    def _has_probed(self, report: Report) -> Moved:
        """Whoever waits for a probe is told at its deadline; who asks again is told by the next one. A probe of
        before a reset is known to be overtaken."""
        if isinstance(self.residency, ProbeTable):
            answers = zip(report.job.keys, report.outcomes, strict=True)
            news = [(key, outcome.ok) for key, outcome in answers if self.residency.answered(key, outcome)]
            return Moved([key for key, there in news if there], [key for key, there in news if not there])
        if report.ended:  # a tier that was down may have been opened only now, or have retired what it lost
            self.stats.capacity = self.residency.capacity = self.tier.usage().capacity
        return Moved()

    def _squeeze(self, report: Report, now: float) -> None:
        """A private tier that refuses twice in half a minute has less room than it said: believed for as long."""
        if not isinstance(self.residency, Residency) or not any(
            outcome.kind is OutcomeKind.REFUSED for outcome in report.outcomes
        ):
            return
        if now < self._squeezed_until:
            self.residency.squeeze()
        self._squeezed_until = now + _SQUEEZED_FOR

    def _judge(self, report: Report, now: float) -> None:
        """Tells the breaker how it went."""
        if not report.ran and not report.late:
            if report.job.kind is JobKind.PROBE:
                self._breaker.untried()
            return
        if any(outcome.kind is OutcomeKind.FAILED for outcome in report.outcomes):
            self._breaker.failed(now)
            if not self._breaker.closed:
                self.lane.withdraw()
        else:
            self._breaker.succeeded()

    # What the tier may hold although nobody knows of it: deleted with the next write

    def _doubt(self, report: Report, keys: Sequence[Key]) -> None:
        if not self.shared and report.ran and len(self._doubtful) < _REMEMBERED:
            self._doubtful.update(dict.fromkeys(keys))

    def _take_doubtful(self, job: Job) -> list[Key]:
        if not self._doubtful:
            return []
        for key in job.keys:
            self._doubtful.pop(key, None)
        taken = list(islice(self._doubtful, _DOUBTFUL_A_JOB))
        for key in taken:
            del self._doubtful[key]
        return [key for key in taken if self.residency.absent([key])]

    # Cascades that did not happen

    def miss(self, key: Key) -> None:
        """A cascade of this key was shed or failed: remembered, the oldest forgotten beyond 65,536."""
        if len(self._missed) >= _REMEMBERED:
            self._missed.popitem(last=False)
        self._missed[key] = None

    def take_missed(self, keys: Sequence[Key]) -> list[Key]:
        """Those of the keys whose cascade did not happen; they count as tried again from here on."""
        if not self._missed:
            return []
        missed = [key for key in dict.fromkeys(keys) if key in self._missed]
        for key in missed:
            del self._missed[key]
        return missed

    # Reset

    def void(self, epoch: str) -> "Future[None]":
        """Begins to make everything stored so far void, in the lane. The tier is down until `settle_void`."""
        self._generation += 1
        self._missed.clear()
        self._doubtful.clear()
        return self._voiding.begin(epoch, self._running)

    def settle_void(self, now: float) -> list[Key]:
        """Where the voiding has ended: the tier is up again, empty. Returns the keys that are gone."""
        if not self._voiding.settled(now, self._running):
            return []
        self.lane.changes()  # what housekeeping has found before is void
        return self.residency.clear()

    # Each step

    def advance(self, now: float) -> None:
        """The time of the step; says in the log, once, when the tier goes down or comes back."""
        self.residency.now = now
        if self._squeezed_until and now >= self._squeezed_until and isinstance(self.residency, Residency):
            self._squeezed_until = 0.0
            self.residency.capacity = self.stats.capacity
        if self.up != self._was_up:
            self._was_up = self.up
            logger.warning("tier %r is %s", self.name, "up again" if self.up else "down: its lookups are misses")

    def begin_down(self, now: float) -> None:
        """The tier was not there at the start."""
        self._breaker.open(now)

    def trial_due(self, now: float) -> bool:
        """Whether the tier is down and should be tried with one probe."""
        return self._breaker.trial_due(now)

    def read_changes(self) -> Iterator[Moved]:
        """Takes in what the tier's own housekeeping has found and dropped, and what it turns out to hold where it
        has been opened anew."""
        for changes in self.lane.changes():
            went = [key for key in changes.vanished if self._lose(key, MissReason.EXPIRED)]
            went += [key for key in changes.evicted if self.residency.lost(key, MissReason.EVICTED)]
            if changes.held is not None:
                gone = [key for key in self.residency if key not in changes.held]
                went += [key for key in gone if self._lose(key, MissReason.TIER_DOWN)]
            yield Moved(self.residency.load(changes.appeared), went)

    def snapshot(self) -> TierStats:
        """The counters, brought up to date."""
        stats = self.stats
        stats.chunks, stats.bytes = self.residency.chunks, self.residency.bytes
        stats.evictions = self.residency.evictions
        if self.shared:
            self._see_usage(stats)
        stats.queue, stats.up = self.lane.queued, self.up
        return stats.copy()

    def _see_usage(self, stats: TierStats) -> None:
        """A shared tier that has a capacity knows better how full it is."""
        with suppress(ClosedError):
            usage = self.tier.usage()
            if usage.capacity is not None:
                stats.chunks, stats.bytes, stats.capacity, stats.evictions = usage
