"""Moves between two secondary tiers, through slots of primary's pool."""

from collections.abc import Sequence

from kvcascade.configs.schema import Watermarks
from kvcascade.types import Key

from .cascade import Cascade
from .chain import Chain
from .jobs import Job, JobKind, Report
from .level import Level
from .pairs import Pair
from .primary import Primary
from .residency import Residency

__all__ = ["FromLevel"]


class FromLevel(Pair):
    """Two secondary tiers. A chunk passes through its slot in primary, if it is there, else it is read into a
    staging slot, with as many others as there are slots for, and written from there."""

    def __init__(
        self,
        primary: Primary,
        chain: Chain,
        upper: Level,
        lower: Level,
        cascade: Cascade,
        watermarks: Watermarks,
        shelf: list[int],
    ) -> None:
        """`shelf`: free staging slots, shared by all pairs."""
        super().__init__(primary, chain, lower, cascade, watermarks)
        if not isinstance(upper.residency, Residency):
            raise TypeError("the schema allows on_evict only below a tier whose eviction is ours")
        self._upper = upper
        self._residency = upper.residency
        self._shelf = shelf
        self._staged: dict[Key, int] = {}
        """Key -> the staging slot that is its own until its copy has ended."""
        self._arrived: list[Key] = []
        self._reading: set[Key] = set()
        """Chunks on their way into staging slots, for as long as somebody waits for them."""

    def advance(self, now: float) -> None:
        self._pass_on(now)
        if self._upper.up:
            super().advance(now)

    def ended(self, level: Level, report: Report, now: float) -> None:
        if report.job.kind is not JobKind.READ:
            super().ended(level, report, now)
            if report.ended:
                self._unstage_of(report.job)
        elif report.ended:
            self._has_read(report)
        else:
            self._reading.difference_update(report.job.keys)
            self._under_way.difference_update(report.job.keys)

    def reset(self) -> None:
        for key in self._arrived:
            self._unstage(key)
        self._arrived.clear()
        self._reading.clear()
        super().reset()

    def _has_read(self, report: Report) -> None:
        """Chunks are in their staging slots. One that nobody waits for any longer may be on its way down again,
        from primary: only its slot is given back."""
        for key, outcome in zip(report.job.keys, report.outcomes, strict=True):
            wanted = key in self._reading
            self._reading.discard(key)
            if wanted and outcome.ok:
                self._arrived.append(key)
                continue
            self._unstage(key)
            if wanted:
                self._settle(key, outcome, report.ran)

    def _pass_on(self, now: float) -> None:
        """What has arrived in staging slots goes to the lower tier."""
        arrived, self._arrived = self._arrived, []
        staged = {key: self._staged[key] for key in arrived}
        submitted = self._pass_down(arrived, now, staged) if arrived else []
        for key in set(arrived).difference(submitted):
            self._unstage(key)
            self._under_way.discard(key)

    def _unstage_of(self, job: Job) -> None:
        """The staging slots that a write was from. A chunk that went down from primary may still have one: a read
        that nobody waits for any longer has not ended, and writes into it."""
        for key, slot in zip(job.keys, job.slots, strict=True):
            if self._staged.get(key) == slot:
                self._unstage(key)

    def _unstage(self, key: Key) -> None:
        slot = self._staged.pop(key, None)
        if slot is not None:
            self._shelf.append(slot)

    def _copy(self, keys: Sequence[Key], now: float) -> None:
        if not self._upper.up:
            return  # it may be down because what it holds is void
        at_hand = [key for key in keys if self._slots.hit(key)]
        self._under_way.update(self._pass_down(at_hand, now))
        others = [key for key in keys if key not in self._staged and not self._slots.hit(key)][: len(self._shelf)]
        for start in range(0, len(others), self._upper.job_chunks):
            part = others[start : start + self._upper.job_chunks]
            for key in part:
                self._residency.begin_read(key)
                self._staged[key] = self._shelf.pop()
            self._reading.update(part)
            self._under_way.update(part)
            slots = [self._staged[key] for key in part]
            deadline = now + self._upper.settings.deadline
            self._upper.submit(Job(JobKind.READ, part, slots, (), "", self, deadline))

    def _fullness(self) -> tuple[int, int, int]:
        residency, size = self._residency, self._residency.size_of(self._upper.chunk_bytes)
        capacity = residency.capacity or 0
        return capacity // size, max(0, capacity - residency.bytes) // size, residency.clean

    def _coldest_dirty(self, count: int) -> list[Key]:
        return self._residency.coldest_dirty(count)

    def _is_there(self, key: Key) -> bool:
        return key in self._residency

    def _is_clean(self, key: Key) -> bool:
        return self._residency.is_clean(key)

    def _mark_clean(self, key: Key) -> None:
        self._residency.mark_clean(key)

    def mark_dirty(self, key: Key) -> None:
        self._residency.mark_dirty(key)

    def _count_dropped(self, chunks: int) -> None:
        self._upper.stats.dropped += chunks
