"""What is counted, per tier and for the whole stack. Counters only grow, also over a reset.

Copies may be taken by another thread than the one that counts: each part is copied in one operation.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from kvcascade.types import MissReason, OutcomeKind

from .jobs import JobKind, Report

__all__ = ["Histogram", "StackStats", "TierStats"]


@dataclass(slots=True)
class Histogram:
    """Durations in buckets of powers of two, from 1 µs on: constant memory, no allocation per value."""

    buckets: list[int] = field(default_factory=lambda: [0] * 40)
    count: int = 0
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.buckets[min(int(seconds * 1e6).bit_length(), len(self.buckets) - 1)] += 1
        self.count += 1
        self.total += seconds

    def copy(self) -> "Histogram":
        return replace(self, buckets=self.buckets.copy())

    def quantile(self, share: float) -> float:
        """Upper edge, in seconds, of the bucket that holds this share of the values; 0.0 where there are none."""
        wanted = share * self.count
        seen = 0
        for place, number in enumerate(self.buckets):
            seen += number
            if seen >= wanted and seen:
                return float(1 << place) / 1e6
        return 0.0


@dataclass(slots=True)
class TierStats:
    """One tier. Chunks unless another unit is said."""

    name: str
    type: str
    chunks: int = 0
    """Readable now; of a shared tier all that is there, of whichever engine, where it has a capacity, else those
    that this engine has stored or found, and not found gone since."""
    bytes: int = 0
    """Bytes that those occupy."""
    capacity: int | None = None
    """Bytes that chunks may occupy in all; None where there is no bound."""
    hits: int = 0
    """Delivered to the engine, and found in this tier."""
    misses: Counter[MissReason] = field(default_factory=Counter)
    """Asked for and not here, once a request and chunk."""
    evictions: int = 0
    dropped: int = 0
    """Evicted although the tier below should have received them."""
    written: int = 0
    written_bytes: int = 0
    read: int = 0
    read_bytes: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    corrupt: int = 0
    refused: int = 0
    """Offered and not taken: the medium said no. Of primary: there was no room at once, also where the offer only
    had to wait for chunks to be moved down; each offer counts."""
    shed: int = 0
    """Offered and dropped, since too much was waiting already."""
    timed_out: int = 0
    """Jobs that had not ended by their deadline."""
    queue: int = 0
    """Jobs that wait or run now."""
    up: bool = True
    read_latency: Histogram = field(default_factory=Histogram)
    """Seconds a read job ran, per job."""
    write_latency: Histogram = field(default_factory=Histogram)

    def count(self, report: Report, chunk_bytes: int) -> None:
        """What a job has done, of chunks of this size."""
        self.timed_out += report.late
        good = sum(outcome.ok for outcome in report.outcomes)
        bad = len(report.outcomes) - good
        self.corrupt += sum(outcome.kind is OutcomeKind.CORRUPT for outcome in report.outcomes)
        if report.job.kind is JobKind.READ:
            self.read += good
            self.read_bytes += good * chunk_bytes
            self.failed_reads += bad
        elif report.job.kind is JobKind.WRITE:
            refused = sum(outcome.kind is OutcomeKind.REFUSED for outcome in report.outcomes)
            self.written += good
            self.written_bytes += good * chunk_bytes
            self.refused += refused
            self.failed_writes += bad - refused

    def time(self, report: Report) -> None:
        """How long a transfer ran."""
        if report.ran and report.job.kind is not JobKind.PROBE:
            latency = self.read_latency if report.job.kind is JobKind.READ else self.write_latency
            latency.add(report.seconds)

    def copy(self) -> "TierStats":
        return replace(
            self,
            misses=Counter(self.misses),
            read_latency=self.read_latency.copy(),
            write_latency=self.write_latency.copy(),
        )


@dataclass(slots=True)
class StackStats:
    """The whole stack, and each tier from primary down."""

    tiers: list[TierStats]
    requests: int = 0
    """Requests finished."""
    lookups: int = 0
    """Chunks asked for, once a request: hits + misses + unused + failed of the requests finished."""
    hits: int = 0
    """Chunks delivered to the engine."""
    misses: Counter[MissReason] = field(default_factory=Counter)
    unused: int = 0
    """Chunks that were there and that the engine did not take."""
    failed: int = 0
    """Chunks that were there and could not be delivered."""
    free_slots: int = 0
    pinned_slots: int = 0

    def copy(self, tiers: list[TierStats]) -> "StackStats":
        """With these tiers."""
        return replace(self, tiers=tiers, misses=Counter(self.misses))
