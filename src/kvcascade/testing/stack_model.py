"""A plain model of what a manager may answer, and of what must hold after each of its verbs."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvcascade.manager.jobs import Job, JobKind
from kvcascade.manager.lane import Lane
from kvcascade.manager.level import Level
from kvcascade.manager.probes import ProbeTable
from kvcascade.manager.residency import Residency
from kvcascade.stack import build
from kvcascade.tiers import Tier
from kvcascade.types import Buffer, Key, LookupResult, Namespace, RequestContext

from .bytes import UNWRITTEN, holds
from .driver import ManualClock
from .lanes import ManualLane, WatchedLane
from .stack_media import Keeper, Shelf
from .stack_shape import CHUNK, STAGING, Shape, TierShape, settings_of
from .wrappers import FaultTier

__all__ = ["Copy", "StackModel"]


@dataclass(eq=False)
class Copy:
    """A copy between the engine and the pool, granted and not completed."""

    ctx: RequestContext
    keys: list[Key]
    slots: list[int]
    epoch: str
    void: bool = False
    """A reset came since."""
    written: bool = False
    """A store: whether the bytes are there."""


class StackModel:
    """A manager over lanes that move by hand, and what is known of it from outside.

    That is: what the events say that each tier holds, which copies and jobs use which slot, how often each chunk
    was used, and when it was written to a tier. A slot that nobody uses is overwritten at once, so that a use
    after its release shows.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.clock = ManualClock()
        self.lanes: list[WatchedLane] = []
        self.faults: list[FaultTier] = []
        self.epoch = shape.weights or "start"
        """What the bytes of chunks are derived from beside their keys: the name of the weights, or one made up."""
        self.running: dict[str, RequestContext] = {}
        self.prompts: dict[str, Sequence[Key]] = {}
        self.hits: dict[str, dict[Key, None]] = {}
        """What each request was told HIT in this step."""
        self.loads: list[Copy] = []
        self.stores: list[Copy] = []
        self.begun = 0
        self.resets = 0
        self.uses: Counter[Key] = Counter()
        """By how many requests that have finished each chunk was used."""
        self._keepers: list[Keeper] = []
        self._manual: list[ManualLane] = []
        self._finished: set[RequestContext] = set()
        self._epochs: dict[int, str] = {}
        self._born: dict[tuple[str, Key], float] = {}
        """(tier, key) -> when it began to be written there."""
        self._kept: dict[str, set[Key]] = {}
        """What each tier has come to hold and has not lost, but perhaps evicted."""
        self._leaving: dict[str, set[Key]] = {}
        """What each tier evicts, or has just evicted."""
        self._evicted: list[tuple[int, Key]] = []
        """Places of tiers (-1: primary), with chunks that they have evicted in this call."""
        self._lost: Counter[str] = Counter()
        """Chunks that each tier has evicted without the one below having received them."""
        self._before: dict[str, int] = {}
        self.manager = build(
            settings_of(shape), Namespace.of(model="m"), CHUNK, events=True, clock=self.clock, wrap=self._wrap,
            lane=self._lane,
        )  # fmt: skip
        self.holds: dict[str, set[Key]] = {name: set() for name in ("host", *(lane.name for lane in self.lanes))}
        """What each tier holds, by the events."""
        for fault in self.faults:
            fault.active = True

    def _wrap(self, name: str, tier: Tier) -> Tier:
        self._keepers.append(Keeper(tier))
        fault = FaultTier(self._keepers[-1], self.shape.seed, self.shape.faults)
        fault.active = False
        self.faults.append(fault)
        return fault

    def _lane(
        self,
        name: str,
        tier: Tier,
        slot: Callable[[int], Buffer],
        concurrency: int,
        retries: int,
        clock: Callable[[], float],
    ) -> WatchedLane:
        lane = WatchedLane(name, self._inner_lane(name, tier, slot, concurrency))
        lane.on_submit = partial(self._submitted, lane)
        self.lanes.append(lane)
        self._kept[name], self._leaving[name] = set(), set()
        return lane

    def _inner_lane(self, name: str, tier: Tier, slot: Callable[[int], Buffer], concurrency: int) -> Lane:
        lane = ManualLane(tier, slot, concurrency)
        lane.on_transfer = self._transfers
        self._manual.append(lane)
        return lane

    @property
    def levels(self) -> list[Level]:
        return self.manager._chain.levels

    def _shelf(self, level: Level) -> Shelf | None:
        """The medium of a tier that others write to, too."""
        medium = self._keepers[level.place].inner
        return medium if isinstance(medium, Shelf) else None

    def _tier(self, level: Level) -> TierShape:
        return self.shape.tiers[level.place]

    # What may be answered

    def _absent(self, key: Key) -> bool:
        """Whether it is neither in primary nor on its way into it."""
        return key not in self.holds["host"] and not self._coming(key)

    def _promotes(self, level: Level, key: Key) -> bool:
        promote = self._tier(level).promote
        return promote == "always" or (isinstance(promote, int) and self.uses[key] + 1 >= promote)

    def _expired(self, level: Level, key: Key) -> bool:
        ttl = self._tier(level).ttl
        return ttl is not None and self.manager._now - self._born[level.name, key] > ttl

    def _gives(self, level: Level, key: Key) -> bool:
        """Whether the tier is known to hold the chunk, and gives it to primary."""
        if not level.up or key not in self.holds[level.name] or not self._promotes(level, key):
            return False
        return key in level.residency if level.shared else not self._expired(level, key)

    def _asks(self, level: Level, key: Key) -> bool:
        """Whether the tier would have to be asked for the chunk."""
        table = level.residency
        return (
            isinstance(table, ProbeTable)
            and level.up
            and self._promotes(level, key)
            and key not in table
            and not table.knows(key)
        )

    def _demotes(self) -> bool:
        """Whether primary's eviction may have to wait for a copy into the tier below."""
        return bool(self.lanes) and self.shape.tiers[0].write == "on_evict"

    def _coming(self, key: Key) -> bool:
        """Whether it is on its way into primary."""
        return any(key in copy.keys for copy in self.stores if not copy.void) or self._arriving(key)

    def _arriving(self, key: Key) -> bool:
        """Whether it is being read into primary."""
        return any(
            key in job.keys and job.slots[0] < self.shape.slots and not job.expired and not job.withdrawn
            for job in self._jobs()
            if job.kind is JobKind.READ
        )

    def _judge(self, name: str, key: Key, answer: LookupResult) -> None:
        """An answer that is "not yet" in a batch is HIT_PENDING or RETRY."""
        if key in self.holds["host"]:
            assert answer is LookupResult.HIT, f"{answer} for a chunk that is there"
            self.hits[name][key] = None
            return
        assert answer is not LookupResult.HIT, "HIT for a chunk that is not there"
        coming = self._coming(key)
        below = any(self._gives(level, key) for level in self.levels)
        open_question = any(self._asks(level, key) for level in self.levels)
        if answer is LookupResult.HIT_PENDING:
            assert coming or below, "HIT_PENDING for a chunk that nobody has"
        elif answer is LookupResult.RETRY:
            assert open_question and not (coming or below), "RETRY, although it is known"
        else:
            request = self.manager._requests._running[name]
            leaving = any(key in job.victims for job in self._jobs())
            excused = key in request.turned_down or self.manager._slots.quarantined(key) or leaving
            assert excused or not (coming or below), "MISS for a chunk that is there or coming"
            assert excused or not open_question, "MISS, although a tier has not been asked"

    def _room_for(self, name: str, keys: Sequence[Key]) -> int:
        """How many leading ones of these, of those that are absent, can be stored now without evicting what is in
        use, HIT in this step, or of the request."""
        self.manager.touch((), self.running[name])  # so that results of the lanes are in
        self._take_events()
        slots = self.manager._slots
        own = self.manager._requests._running[name].keys.keys() | set(keys)
        idle = sum(key not in own and not slots._busy(slots.find(key)) for key in self.holds["host"])
        absent = [key for key in dict.fromkeys(keys) if self._absent(key)]
        storable = next((place for place, key in enumerate(absent) if slots.quarantined(key)), len(absent))
        return min(storable, slots.free + idle)

    def _jobs(self) -> Iterable[Job]:
        return [job for lane in self.lanes for job in lane.unsettled.values()]

    def _used(self) -> Counter[int]:
        """Slot -> by how many copies and jobs it is used."""
        used = Counter(slot for copy in (*self.loads, *self.stores) for slot in copy.slots)
        used.update(slot for job in self._jobs() for slot in job.slots if slot < self.shape.slots)
        return used

    def _take_events(self) -> dict[str, list[Key]]:
        """Brings `holds` up to date; returns what each tier has lost."""
        gone: dict[str, list[Key]] = {name: [] for name in self.holds}
        for event in self.manager.take_events():
            held = self.holds[event.tier]
            for key in event.keys:
                assert (key in held) == event.removed, f"{event.tier}: {event} of {key.hex()[:8]} twice"
            if event.removed:
                held.difference_update(event.keys)
                gone[event.tier] += event.keys
                self._keep(event.tier, event.keys, removed=True)
            else:
                held.update(event.keys)
                self._keep(event.tier, event.keys, removed=False)
        return gone

    def _keep(self, tier: str, keys: Iterable[Key], removed: bool) -> None:
        """What a tier has evicted itself, or a shared one may have, counts as moved into it."""
        if tier == "host":
            return
        if not removed:
            self._kept[tier].update(keys)
        elif not self.levels[int(tier[1:])].shared:
            self._kept[tier].difference_update(set(keys) - self._leaving[tier])
        self._leaving[tier].difference_update(keys)

    # What the lanes are given

    def _submitted(self, lane: WatchedLane, job: Job) -> None:
        self._epochs[job.id] = self.epoch
        read = {key for other in lane.unsettled.values() if other.kind is JobKind.READ for key in other.keys}
        assert not read & self.holds[lane.name] & set(job.victims), "a chunk that is being read is a victim"
        others = Counter(slot for other in self._jobs() if other.id != job.id for slot in other.slots)
        if job.kind is JobKind.READ:
            for slot in job.slots:
                assert not others[slot], f"slot {slot} is read into, and in use by another job"
                assert not any(slot in copy.slots for copy in (*self.loads, *self.stores)), (
                    "read into an engine's slot"
                )
        elif job.kind is JobKind.WRITE:
            self._check_admitted(lane, job)

    def _check_admitted(self, lane: WatchedLane, job: Job) -> None:
        place = self.lanes.index(lane)
        tier = self.shape.tiers[place]
        assert tier.write != "off", "a write to a tier that takes nothing"
        for key in job.keys:
            assert self.uses[key] + 1 >= tier.admit_after, "a chunk used too seldom is stored"
            self._born[lane.name, key] = self.manager._now
        victims = [key for key in job.victims if key in self.holds[lane.name]]
        self._leaving[lane.name].update(victims)
        self._evicts(place, [key for key in victims if not self._expired(self.levels[place], key)])

    def _transfers(self, job: Job) -> None:
        """A medium is about to use the slots of a job."""
        if job.kind is JobKind.WRITE:
            for key, slot in zip(job.keys, job.slots, strict=True):
                view = self.manager.pool.slot(slot)
                assert holds(view, key, self._epochs[job.id]), f"slot {slot} does not hold what is written from it"

    def _check_bytes(self, copy: Copy, what: str) -> None:
        for key, slot in zip(copy.keys, copy.slots, strict=True):
            view = self.manager.pool.slot(slot)
            assert holds(view, key, copy.epoch), f"slot {slot}, {what}, holds other bytes: {bytes(view[:4])!r}"

    # What is evicted

    def _evicts(self, place: int, keys: Iterable[Key]) -> None:
        """The tier at this place (-1: primary) evicts these: noted is what the one below is to have."""
        lower = self.shape.tiers[place + 1] if place + 1 < len(self.lanes) else None
        if lower and lower.write == "on_evict":
            enough = lower.admit_after
            self._evicted += [(place, key) for key in keys if enough <= 1 or self.uses[key] >= enough]

    def _check_dropped(self) -> None:
        """What has been evicted was moved into the tier that receives it then, or is counted as dropped."""
        for place, key in self._evicted:
            lower, kept = f"t{place + 1}", self._kept[f"t{place + 1}"]
            self._lost["host" if place < 0 else f"t{place}"] += key not in kept
            if key not in self.holds[lower]:
                kept.discard(key)
        self._evicted.clear()
        for tier in self.manager.get_stats().tiers:
            lost = self._lost[tier.name]
            assert lost <= tier.dropped, f"{lost} evicted, not in the tier below, and {tier.dropped} counted"

    # What holds after each call

    def check(self) -> None:
        self._take_events()
        self._check_slots()
        self._check_levels()
        self._check_dropped()
        for name, hits in self.hits.items():
            for key in hits:
                assert key in self.holds["host"], f"{name} was told HIT in this step, and it is gone"
        finished_stores = any(copy.ctx in self._finished for copy in self.stores if not copy.void and copy.keys)
        pending = finished_stores or any(lane.awaited for lane in self.lanes)
        assert self.manager.has_pending_work() == pending, f"has_pending_work is not {pending}"

    def _check_slots(self) -> None:
        slots, pool = self.manager._slots, self.manager.pool
        expected = self._used()
        for request in self.manager._requests:
            expected.update(request.held)
        for slot in range(slots.capacity):
            assert slots.pins(slot) == expected[slot], (
                f"slot {slot} has {slots.pins(slot)} pins, not {expected[slot]}"
            )
        assert slots.pinned == sum(map(bool, expected.values()))
        assert set(slots) == self.holds["host"], "the events do not tell what primary holds"
        assert len(set(slots._free)) == len(slots._free)
        for slot in slots._free:
            assert not expected[slot], f"slot {slot} is free, and in use"
            pool.slot(slot)[:] = bytes([UNWRITTEN]) * CHUNK
        reads = {
            slot for job in self._jobs() if job.kind is JobKind.READ for slot in job.slots if slot in expected
        }
        held = {slot for request in self.manager._requests for slot in request.held}
        assert len(reads | held) <= max(1, slots.capacity // 2), "promotions take more than half of primary"
        writes = {
            slot for job in self._jobs() if job.kind is JobKind.WRITE for slot in job.slots if slot in expected
        }
        assert len(writes) <= max(1, slots.capacity // 2), "cascades take more than half of primary"

    def _check_levels(self) -> None:
        for lane, level in zip(self.lanes, self.levels, strict=True):
            writes = [job for job in lane.unsettled.values() if job.kind is JobKind.WRITE]
            assert level.pinned == sum(len(job.keys) for job in writes)
            assert level.pinned <= max(1, int(level.settings.queue * self.shape.slots)), "more than its share"
            if level.shared:
                self._check_told(level)
                continue
            residency = _residency(level)
            assert 0 <= residency.bytes <= (level.stats.capacity or 0)
            ready = {key for key in residency._entries if key in residency}
            assert ready <= self.holds[lane.name], "readable, and no event has told of it"
            old = {key for key in self.holds[lane.name] if self._expired(level, key)}
            assert not ready & old, "readable, although its time is over"
            if level.up:
                assert len(ready) <= residency.chunks <= len(ready | old)
                being_deleted = {key for job in writes for key in job.victims}
                assert self.holds[lane.name] <= ready | being_deleted | old, (
                    "the events tell of more than is readable"
                )

    def _check_told(self, level: Level) -> None:
        """Of a shared tier is told what the last answer was on each key."""
        table = level.residency
        assert isinstance(table, ProbeTable)
        there = {key for key in table._verdicts if (table._verdicts.get(key) or 0.0) > 0}
        assert there == self.holds[level.name], "the events do not tell what is known"
        assert table.chunks == len(there)

    def _check_counters(self) -> None:
        now = dict(_counters(self.manager.get_stats()))
        for name, before in self._before.items():
            assert now.get(name, 0) >= before, f"{name} went from {before} to {now.get(name, 0)}"
        self._before = now

    # What holds at the end

    def _check_nothing_left(self) -> None:
        manager, stats = self.manager, self.manager.get_stats()
        assert not manager.has_pending_work()
        assert not manager.requests_known, "a request is kept after its last event"
        assert stats.free_slots + stats.tiers[0].chunks == self.shape.slots, "slots are missing"
        assert not stats.pinned_slots, "pins are left"
        assert stats.requests == self.begun
        ends = stats.hits + stats.unused + stats.failed + stats.misses.total()
        assert stats.lookups == ends, "lookups without an outcome"
        kept = (
            manager._storing,
            manager._loading,
            vars(manager._promotion)["_wanted"],
            manager._promotion._waiters,
        )
        assert not any(kept) and not manager._promotion._holders and manager._promotion._waiting_holder is None
        for pair in manager._demotion._pairs.values():
            assert not pair._under_way and not getattr(pair, "_staged", ()), "a move is left"
            assert len(getattr(pair, "_shelf", ())) in (0, STAGING), "a staging slot is missing"
        found = manager._slots.victims(self.shape.slots)
        assert found is not None and len(found) == stats.tiers[0].chunks, "chunks that eviction does not find"
        for lane, level in zip(self.lanes, self.levels, strict=True):
            assert level.up and not level.pinned and not level.awaited and not lane.unsettled
            assert sorted(lane.submitted) == sorted(lane.reported), "not each job was reported once"
            assert lane.finishes == self.begun, "finish was not told once for each request"
            self._check_bookkeeping(level)

    def _check_bookkeeping(self, level: Level) -> None:
        table = level.residency
        if isinstance(table, ProbeTable):
            assert not (table._writing or table._asked or table._probing), "a question is left"
            return
        entries = map(table._entries.get, table._entries)
        assert not any(table._readers[entry or 0] for entry in entries), "a reader is left"
        assert sorted(table._entries) == sorted(self.holds[level.name])
        found = table._policy.victims(99, table._busy)
        assert len(found) == table.chunks, "chunks that eviction does not find"

    def _check_content(self) -> None:
        """What the media really hold: nothing of another epoch; without faults, what the manager knows."""
        for level, fault in zip(self.levels, self.faults, strict=True):
            held = self._check_medium(level.name, fault.inner, self.epoch)
            shelf = self._shelf(level)
            for name, chunks in shelf.named() if shelf else ():
                self._check_medium(f"{name} of {level.name}", chunks, name)
            if not fault.injected and not shelf:
                late = {
                    key for name, key in self._born if name == level.name and self._tier(level).ttl is not None
                }
                assert self.holds[level.name] <= held <= self.holds[level.name] | late, (
                    f"{level.name} holds other chunks than known"
                )

    def _check_medium(self, name: str, medium: Tier, epoch: str) -> set[Key]:
        held = [entry.key for entry in medium.entries()]
        for key in held:
            view = memoryview(bytearray(CHUNK))
            assert medium.read([key], [view])[0].ok
            assert holds(view, key, epoch), f"{name} holds a chunk of another epoch"
        return set(held)

    def _readable(self, key: Key) -> bool:
        """Whether the chunk is somewhere from where a request is to get it."""
        if key in self.holds["host"] or any(self._gives(level, key) for level in self.levels):
            return True
        shelves = ((level, self._shelf(level)) for level in self.levels if level.up)
        return any(shelf and self._promotes(level, key) and shelf.exists([key])[0] for level, shelf in shelves)

    def _surely(self, key: Key) -> bool:
        """Whether a chunk that is readable is sure to be served."""
        if any(tier.write == "on_evict" for tier in self.shape.tiers):
            return False
        return key in self.holds["host"] or not any(fault.injected for fault in self.faults)


def _residency(level: Level) -> Residency:
    assert isinstance(level.residency, Residency)
    return level.residency


def _counters(stats: Any) -> Iterable[tuple[str, int]]:
    shrinking = {"chunks", "bytes", "capacity", "queue", "up", "free_slots", "pinned_slots"}
    for owner in (stats, *stats.tiers):
        for name in owner.__slots__:
            value = getattr(owner, name)
            if name not in shrinking and isinstance(value, int):
                yield f"{getattr(owner, 'name', 'stack')}.{name}", value
            elif isinstance(value, Counter):
                yield from ((f"{getattr(owner, 'name', 'stack')}.{name}.{what}", n) for what, n in value.items())
