"""A tier, and the one below it that receives what the upper one evicts."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType

from kvcascade.configs.schema import Watermarks
from kvcascade.types import Key, Outcome, OutcomeKind

from .cascade import Cascade
from .chain import Chain
from .jobs import Report
from .level import Level
from .primary import Primary

__all__ = ["FromPrimary", "Pair"]

_A_STEP = 256
"""Chunks that are copied ahead of need in one step."""


class Pair(ABC):
    """A tier and the one below it that receives what the upper one evicts."""

    def __init__(
        self, primary: Primary, chain: Chain, lower: Level, cascade: Cascade, watermarks: Watermarks
    ) -> None:
        self._slots = primary.slots
        self._chain = chain
        self.lower = lower
        self._cascade = cascade
        self._watermarks = watermarks
        self.below: Pair | None = None
        """The pair whose upper tier is the lower one of this."""
        self._to_copy: deque[Key] = deque()
        """Chunks that are to be copied ahead of need, the coldest first."""
        self._under_way: set[Key] = set()
        self._failed: set[Key] = set()
        """Chunks whose copy has failed. It is tried again ahead of need, but need does not wait for it."""

    @property
    def moving(self) -> bool:
        """Whether copies are under way, into the lower tier or out of it."""
        return bool(self._under_way) or (self.below is not None and self.below.moving)

    def advance(self, now: float) -> None:
        if not self.lower.up:
            return
        if not self._to_copy:
            self._choose()
        part = [self._to_copy.popleft() for _ in range(min(_A_STEP, len(self._to_copy)))]
        there = [key for key in part if key not in self._under_way and self._is_there(key)]
        if there:
            self._copy(self._dirty(there), now)

    def _choose(self) -> None:
        """Where too few chunks could go at once, the coldest of the others are to be copied. Looking for them
        takes the longer the more are clean, so it is done once for all that are wanted; the copies take several
        steps."""
        capacity, free, clean = self._fullness()
        spare = free + clean + len(self._under_way)
        fewest = ceil(capacity * (1 - self._watermarks.high))
        wanted = max(fewest, ceil(capacity * (1 - self._watermarks.low)))
        if spare < fewest:
            dirty = self._coldest_dirty(clean + len(self._under_way) + wanted - spare)
            self._to_copy.extend([key for key in dirty if key not in self._under_way][: wanted - spare])

    def hold(self, victims: Sequence[Key], now: float) -> bool:
        dirty = self._dirty(victims)
        if self.lower.up and not self._failed.issuperset(dirty):
            if not self._under_way:
                self._copy(dirty, now)
            if self.moving:
                return True
        self._failed.difference_update(dirty)
        self._count_dropped(len(dirty))
        return False

    def ended(self, level: Level, report: Report, now: float) -> None:
        """A copy into the lower tier has ended, or nobody waits for it any longer."""
        if not report.ended:
            self._under_way.difference_update(report.job.keys)
            return
        self._cascade.ended(level, report, now)
        for key, outcome in zip(report.job.keys, report.outcomes, strict=True):
            self._settle(key, outcome, report.ran)

    def _settle(self, key: Key, outcome: Outcome, tried: bool) -> None:
        """A copy has ended. A chunk that the lower tier does not take is not offered again."""
        self._under_way.discard(key)
        refused = outcome.kind is OutcomeKind.REFUSED
        if outcome.ok or refused:
            self._failed.discard(key)
            self._mark_clean(key)
            self._count_dropped(refused)
        elif tried and outcome.kind is OutcomeKind.FAILED:
            self._failed.add(key)

    def _dirty(self, keys: Sequence[Key]) -> list[Key]:
        """Those that would be lost; on the way, marks those that the lower tier turns out to hold."""
        dirty = []
        self._chain.expire(self.lower, keys)
        for key in keys:
            if self._is_clean(key) or not self.lower.wants(key):
                continue
            if self.lower.holds(key):
                self._mark_clean(key)
            else:
                dirty.append(key)
        return dirty

    def reset(self) -> None:
        self._to_copy.clear()
        self._under_way.clear()
        self._failed.clear()

    def _pass_down(
        self, keys: Sequence[Key], now: float, staged: Mapping[Key, int] = MappingProxyType({})
    ) -> list[Key]:
        """Writes as many leading ones of these into the lower tier as may be now, where they keep their order: the
        first stays the coldest. Returns them."""
        submitted = self._cascade.submit(self.lower, keys, now, flow=self, staged=staged)
        self.lower.residency.touch(submitted[::-1])
        return submitted

    @abstractmethod
    def _fullness(self) -> tuple[int, int, int]:
        """In chunks: the upper tier's capacity, how many are free, how many are clean."""

    @abstractmethod
    def _coldest_dirty(self, count: int) -> list[Key]:
        """Those that are not clean of the `count` keys that the upper tier would evict first."""

    @abstractmethod
    def _is_there(self, key: Key) -> bool:
        """Whether the upper tier still has the chunk."""

    @abstractmethod
    def _copy(self, keys: Sequence[Key], now: float) -> None:
        """Begins to copy those of the keys that can be now."""

    @abstractmethod
    def _is_clean(self, key: Key) -> bool: ...

    @abstractmethod
    def _mark_clean(self, key: Key) -> None: ...

    @abstractmethod
    def mark_dirty(self, key: Key) -> None:
        """The lower tier has lost the chunk, other than by evicting it: it is to be copied again."""

    @abstractmethod
    def _count_dropped(self, chunks: int) -> None: ...


class FromPrimary(Pair):
    """Primary, and the first tier below it."""

    def __init__(
        self, primary: Primary, chain: Chain, lower: Level, cascade: Cascade, watermarks: Watermarks
    ) -> None:
        super().__init__(primary, chain, lower, cascade, watermarks)
        self._stats = primary.stats

    def _fullness(self) -> tuple[int, int, int]:
        return self._slots.capacity, self._slots.free, self._slots.clean

    def _coldest_dirty(self, count: int) -> list[Key]:
        return self._slots.dirty(self._slots.coldest(count))

    def _is_there(self, key: Key) -> bool:
        return self._slots.hit(key)

    def _copy(self, keys: Sequence[Key], now: float) -> None:
        self._under_way.update(self._pass_down(keys, now))

    def _is_clean(self, key: Key) -> bool:
        return self._slots.is_clean(key)

    def _mark_clean(self, key: Key) -> None:
        self._slots.mark_clean(key)

    def mark_dirty(self, key: Key) -> None:
        self._slots.mark_dirty(key)

    def _count_dropped(self, chunks: int) -> None:
        self._stats.dropped += chunks
