"""Moves chunks down as they get cold: into a tier that receives `on_evict`, from the tier directly above it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import ceil
from types import MappingProxyType

from kvcascade.configs.schema import Watermarks
from kvcascade.types import Key, Outcome, OutcomeKind

from .cascade import Cascade
from .chain import Chain
from .jobs import Job, JobKind, Report
from .level import Level
from .primary import Primary
from .residency import Residency

__all__ = ["Demotion"]


class Demotion:
    """Runs ahead of need: of each tier above one that receives `on_evict` it keeps some of the coldest chunks
    *clean*, that is held below too, so that room can be made at once. When fewer than a share of 1 - `high` of the
    tier is free or clean, the coldest of the others are copied down, until a share of 1 - `low` is.

    Where room is needed and the chunks that would go are not clean, the need waits for the copies that are under
    way, there or further down, at most to their deadline; where there are none, because the tier below is down or
    full of work, the chunks are dropped, and counted. Chunks that the tier below would not admit just go.
    Between two secondary tiers chunks pass through primary's slot, if they are there, else through staging slots.
    The entry above stays until room is needed, thus at least until the lower one is committed. What the lower tier
    has evicted meanwhile, or does not take, is not copied again; what it has lost otherwise, or kept for its time,
    is. Nothing waits for a copy that has failed before.
    """

    def __init__(
        self, primary: Primary, chain: Chain, cascade: Cascade, watermarks: Watermarks, staging: Sequence[int]
    ) -> None:
        """`staging`: slots of the pool outside primary's capacity."""
        shelf = list(staging)
        self._pairs: dict[Level | None, _Pair] = {}
        for lower in chain.levels:
            if lower.settings.write != "on_evict":
                continue
            if lower.place == 0:
                self._pairs[None] = _FromPrimary(primary, chain, lower, cascade, watermarks)
            else:
                upper = chain.levels[lower.place - 1]
                self._pairs[upper] = _FromLevel(primary, chain, upper, lower, cascade, watermarks, shelf)
        for pair in self._pairs.values():
            pair.below = self._pairs.get(pair.lower)
            pair.lower.on_loss = pair.mark_dirty

    def advance(self, now: float) -> None:
        """End of the step: copies down what the watermarks ask for."""
        for pair in self._pairs.values():
            pair.advance(now)

    def hold(self, upper: Level | None, victims: Sequence[Key], now: float) -> bool:
        """Whether these victims of a tier (None: primary) should not go yet, for their copies are under way. Where
        they go although they are not clean, they are counted."""
        pair = self._pairs.get(upper)
        return pair is not None and pair.hold(victims, now)

    def makes_room(self, upper: Level | None) -> bool:
        """Whether chunks of a tier (None: primary) are on their way down, so that there will be room."""
        pair = self._pairs.get(upper)
        return pair is not None and pair.moving

    def reset(self) -> None:
        """Every chunk is void: none is moved."""
        for pair in self._pairs.values():
            pair.reset()


class _Pair(ABC):
    """A tier and the one below it that receives what the upper one evicts."""

    def __init__(
        self, primary: Primary, chain: Chain, lower: Level, cascade: Cascade, watermarks: Watermarks
    ) -> None:
        self._slots = primary.slots
        self._chain = chain
        self.lower = lower
        self._cascade = cascade
        self._watermarks = watermarks
        self.below: _Pair | None = None
        """The pair whose upper tier is the lower one of this."""
        self._under_way: set[Key] = set()
        self._failed: set[Key] = set()
        """Chunks whose copy has failed. It is tried again ahead of need, but need does not wait for it."""

    @property
    def moving(self) -> bool:
        """Whether copies are under way, into the lower tier or out of it."""
        return bool(self._under_way) or (self.below is not None and self.below.moving)

    def advance(self, now: float) -> None:
        capacity, free, clean = self._fullness()
        spare = free + clean + len(self._under_way)
        fewest = ceil(capacity * (1 - self._watermarks.high))
        wanted = max(fewest, ceil(capacity * (1 - self._watermarks.low)))
        if spare >= fewest or not self.lower.up:
            return
        cold = self._coldest(clean + len(self._under_way) + wanted - spare)
        dirty = [key for key in self._dirty(cold) if key not in self._under_way]
        self._copy(dirty[: wanted - spare], now)

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
    def _coldest(self, count: int) -> list[Key]:
        """The keys that the upper tier would evict first."""

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


class _FromPrimary(_Pair):
    def __init__(
        self, primary: Primary, chain: Chain, lower: Level, cascade: Cascade, watermarks: Watermarks
    ) -> None:
        super().__init__(primary, chain, lower, cascade, watermarks)
        self._stats = primary.stats

    def _fullness(self) -> tuple[int, int, int]:
        return self._slots.capacity, self._slots.free, self._slots.clean

    def _coldest(self, count: int) -> list[Key]:
        return [self._slots.key(slot) for slot in self._slots.coldest(count)]

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


class _FromLevel(_Pair):
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
            if not wanted:
                self._unstage(key)
            elif outcome.ok:
                self._arrived.append(key)
            else:
                self._settle(key, outcome, report.ran)

    def _pass_on(self, now: float) -> None:
        """What has arrived in staging slots goes to the lower tier."""
        arrived, self._arrived = self._arrived, []
        staged = {key: self._staged[key] for key in arrived}
        submitted = self._pass_down(arrived, now, staged) if arrived else []
        for key in set(arrived).difference(submitted):
            self._unstage(key)
            self._under_way.discard(key)

    def _settle(self, key: Key, outcome: Outcome, tried: bool) -> None:
        """What ends may be a copy of before a reset; the staging slot is that of the copy begun since, if any."""
        if key not in self._reading and key not in self._arrived:
            self._unstage(key)
        super()._settle(key, outcome, tried)

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

    def _coldest(self, count: int) -> list[Key]:
        return self._residency.coldest(count)

    def _is_clean(self, key: Key) -> bool:
        return self._residency.is_clean(key)

    def _mark_clean(self, key: Key) -> None:
        self._residency.mark_clean(key)

    def mark_dirty(self, key: Key) -> None:
        self._residency.mark_dirty(key)

    def _count_dropped(self, chunks: int) -> None:
        self._upper.stats.dropped += chunks
