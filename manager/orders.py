"""What the manager of a foreign pool has asked for: loads into its slots and stores from there."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from kvcascade.errors import ClosedError
from kvcascade.types import Key, MissReason, Outcome, OutcomeKind

from .chain import Chain
from .jobs import Job, JobKind, Report
from .level import Level
from .requests import Delivery, Request
from .stats import StackStats

__all__ = ["Carried", "Orders", "Wanted"]

Wanted: TypeAlias = Mapping[Key, Sequence[Level]]
"""Chunks that are in the pool, and the tiers that should receive them."""


class Carried(NamedTuple):
    """What became of one order. Its slots are the pool's again."""

    order: int
    good: tuple[Key, ...]
    """Of a load: the chunks whose slots hold them now; the others' hold nothing of use. Of a store: those that no
    tier has failed to take."""
    whole: bool
    """Whether that is all of them."""
    chunks: int
    """Read, or written, by all tiers together."""
    seconds: float


class Orders:
    """Does each order by jobs of the chain's lanes. The slots of an order are ours until all its jobs have ended,
    late or not: one that has passed its deadline may still use them."""

    def __init__(self, chain: Chain, slots: int, stats: StackStats, clock: Callable[[], float]) -> None:
        """`slots`: how many the pool has."""
        self._chain = chain
        self._slots = slots
        self._stats = stats
        self._clock = clock
        self._shares = {level: max(1, int(level.settings.queue * slots)) for level in chain.levels}
        self._orders: dict[int, _Order] = {}
        self._ended: list[Carried] = []
        self._lent = 0
        """Slots that stores wait to read, or do."""
        self._wanted: dict[Key, list[Level]] = {}
        self._closed = False

    def load(self, order: int, slots: Mapping[Key, int], request: Request | None) -> None:
        """Reads these chunks into these slots."""
        load = _Load(self, order, slots, request)
        self._begin(load)
        self.read(load, list(slots))
        self.end_if_over(load)

    def store(
        self, order: int, slots: Mapping[Key, int], request: Request | None, wanted: Wanted, at_once: bool = False
    ) -> None:
        """Brings these chunks, head first, to the tiers that `wanted` names for each and that do not have it.
        `at_once`: however seldom they were used."""
        store = _Store(self, order, slots, request)
        self._begin(store)
        room = max(0, self._slots // 2 - self._lent)
        self._lent += len(slots)
        for level in self._chain.levels:
            keys = [key for key in slots if level in wanted.get(key, ())]
            self._offer(level, keys, store, room, at_once)
        self.end_if_over(store)

    def give_up(self, order: int) -> None:
        """An order that could not be begun, or not wholly, is reported as failed, when its jobs have ended."""
        begun = self._orders.get(order)
        if begun is not None and begun.running:
            begun.failed.update(begun.slots)
            return
        self._orders.pop(order, None)
        self._ended.append(Carried(order, (), False, 0, 0.0))

    def want(self, level: Level, keys: Sequence[Key]) -> None:
        """These are in the pool, as far as is known, and this tier should receive them."""
        for key in keys:
            if len(self._wanted) < self._slots or key in self._wanted:
                self._wanted.setdefault(key, []).append(level)

    def take_wanted(self) -> Wanted:
        wanted, self._wanted = self._wanted, {}
        return wanted

    def take_ended(self) -> list[Carried]:
        ended, self._ended = self._ended, []
        return ended

    @property
    def under_way(self) -> int:
        return len(self._orders)

    @property
    def has_wanted(self) -> bool:
        return bool(self._wanted)

    def reset(self) -> None:
        """Every chunk is void: none is wanted."""
        self._wanted.clear()

    def close(self) -> None:
        """No order is taken any more."""
        self._closed = True

    # For the orders

    def read(self, load: "_Load", keys: Sequence[Key]) -> None:
        """Reads these chunks of a load, each from the topmost tier that has it."""
        load_from = load.request.load_from if load.request else None
        found = {key: self._chain.find(key, load_from) for key in keys}
        for key in keys:
            if found[key] is None:
                load.fail(key, MissReason.EVICTED)
        for level in self._chain.levels:
            here = [key for key in keys if found[key] is level]
            for start in range(0, len(here), level.job_chunks):
                part = here[start : start + level.job_chunks]
                for key in part:
                    level.residency.begin_read(key)
                self._submit(level, JobKind.READ, part, (), load)

    def arrived(self, keys: Sequence[Key], source: Level) -> None:
        """These were loaded from `source`: the tiers above it that are filled should receive them."""
        self._stats.hits += len(keys)
        source.stats.hits += len(keys)
        for level in self._chain.levels[: source.place]:
            if level.settings.fill and level.settings.write != "off":
                self.want(level, [keys[place] for place in level.residency.absent(keys)])

    def end_if_over(self, order: "_Order") -> None:
        if order.running or self._orders.pop(order.id, None) is None:
            return
        if isinstance(order, _Store):
            self._lent -= len(order.slots)
        good = tuple(key for key in order.slots if key not in order.failed)
        seconds = self._clock() - order.begun
        self._ended.append(Carried(order.id, good, len(good) == len(order.slots), order.moved, seconds))
        if order.request is not None:
            order.request.loading -= 1

    # Within

    def _begin(self, order: "_Order") -> None:
        if self._closed:
            raise ClosedError("the tiers were closed")
        order.begun = self._clock()
        self._orders[order.id] = order
        if order.request is not None:
            order.request.loading += 1

    def _offer(self, level: Level, keys: Sequence[Key], store: "_Store", room: int, at_once: bool) -> None:
        """Submits what may be; the rest is remembered until its chunk is used again."""
        admitted = [key for key in keys if at_once or level.admits(key)]
        for key in set(keys).difference(admitted):
            level.residency.ghosts.add(key, MissReason.REFUSED)
            level.miss(key)
        self._chain.expire(level, admitted)
        absent = [admitted[place] for place in level.residency.absent(admitted)]
        new = [key for key in absent if key not in level.being_deleted]
        room = min(room, self._shares[level] - level.pinned) if level.up else 0
        sent = self._write(level, new[: max(0, room)], store)
        for key in set(absent).difference(sent):
            self._shed(level, key)
            store.failed.add(key)
        for key in level.residency.leaving(admitted):
            level.miss(key)

    def _write(self, level: Level, keys: Sequence[Key], store: "_Store") -> list[Key]:
        """Submits the leading chunks that the tier has room for; returns them."""
        sent: list[Key] = []
        for start in range(0, len(keys), level.job_chunks):
            part = keys[start : start + level.job_chunks]
            admission = level.residency.admit(part, level.chunk_bytes)
            part = part[: admission.admitted]
            if part:
                self._submit(level, JobKind.WRITE, part, admission.victims, store)
                sent += part
        return sent

    def _submit(
        self, level: Level, kind: JobKind, keys: Sequence[Key], victims: Sequence[Key], order: "_Order"
    ) -> None:
        order.running += 1
        slots = [order.slots[key] for key in keys]
        level.submit(Job(kind, keys, slots, victims, order.owner, order, self._clock() + level.settings.deadline))

    def _shed(self, level: Level, key: Key) -> None:
        level.stats.shed += 1
        level.residency.ghosts.add(key, MissReason.SHED if level.up else MissReason.TIER_DOWN)
        level.miss(key)


class _Order(ABC):
    """What the pool's manager has asked for: some jobs, of one tier or several. Is told their reports."""

    def __init__(self, orders: Orders, order: int, slots: Mapping[Key, int], request: Request | None) -> None:
        self.id = order
        self.slots = slots
        self.request = request
        self.begun = 0.0
        self.running = 0
        """Jobs that have not ended. One that has passed its deadline has not: it may still use its slots."""
        self.moved = 0
        self.failed: set[Key] = set()
        self._orders = orders

    @property
    def owner(self) -> str:
        """The request in the lanes' terms; none where that has finished there."""
        return self.request.owner if self.request and not self.request.finished else ""

    def ended(self, level: Level, report: Report, now: float) -> None:
        if not report.ended:
            return
        self.running -= 1
        self.moved += sum(outcome.ok for outcome in report.outcomes)
        self._settle(level, list(zip(report.job.keys, report.outcomes, strict=True)))
        self._orders.end_if_over(self)

    @abstractmethod
    def _settle(self, level: Level, outcomes: Sequence[tuple[Key, Outcome]]) -> None: ...


class _Store(_Order):
    def _settle(self, level: Level, outcomes: Sequence[tuple[Key, Outcome]]) -> None:
        self.failed.update(key for key, outcome in outcomes if not outcome.ok)


class _Load(_Order):
    def fail(self, key: Key, reason: MissReason) -> None:
        """A MISS from here on to the request that asked for it, so that it does not ask for ever."""
        self.failed.add(key)
        if self.request is not None:
            self.request.turned_down[key] = reason
            self.request.answers[key] = Delivery.FAILED

    def _settle(self, level: Level, outcomes: Sequence[tuple[Key, Outcome]]) -> None:
        good = [key for key, outcome in outcomes if outcome.ok]
        gone = [key for key, outcome in outcomes if outcome.kind in (OutcomeKind.MISSING, OutcomeKind.CORRUPT)]
        for key, outcome in outcomes:
            if not outcome.ok and key not in gone:
                self.fail(key, MissReason.TIER_DOWN)
        if self.request is not None:
            self.request.waiting_since = None
            self.request.answers.update(dict.fromkeys(good, Delivery.DELIVERED))
        self._orders.arrived(good, level)
        if gone:
            self._orders.read(self, gone)
