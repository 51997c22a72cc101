"""An engine at play with a stack, beside a plain model of what the manager may answer."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from kvcascade.configs.schema import StackSettings
from kvcascade.manager import ResetReport
from kvcascade.manager.jobs import Job, JobKind
from kvcascade.manager.lane import Lane, ThreadLane
from kvcascade.manager.level import Level
from kvcascade.manager.residency import Residency
from kvcascade.stack import build
from kvcascade.tiers import Tier
from kvcascade.tiers.host import HostSettings
from kvcascade.tiers.memory import MemorySettings
from kvcascade.types import Buffer, Changes, Entry, Key, LookupResult, Namespace, RequestContext

from .bytes import UNWRITTEN, bytes_for, holds, key_for
from .driver import ManualClock
from .guard import GuardTier
from .lanes import ManualLane, WatchedLane
from .wrappers import FaultTier, GateTier, TierWrapper

__all__ = ["PROMPTS", "Copy", "Shape", "StackWorld", "ThreadedStackWorld"]

CHUNK = 64
_STRIDE = 4096
_STAGING = 3
_TREE = ((0, 1, 2, 3), (0, 1, 2, 4, 5), (0, 1, 6), (0, 7, 8, 9, 10, 11), (12, 13, 14, 15), (12, 16))
PROMPTS = tuple(tuple(map(key_for, path)) for path in _TREE)
"""Prompts that share prefixes, as keys."""


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


@dataclass
class Shape:
    """What stack it is, and how bad its media are."""

    slots: int = 6
    capacities: Sequence[int] = (5,)
    """Of each secondary tier, in chunks."""
    writes: Sequence[str] = ("through", "through")
    """How each secondary tier receives."""
    promotes: Sequence[str] = ("always", "always")
    queue: float = 1.0
    concurrency: int = 2
    seed: int = 0
    faults: dict[str, float] = field(default_factory=dict)


class _Keeper(TierWrapper):
    """Finds and loses chunks when it is told to, as a tier's own housekeeping does."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._next = Changes()

    def lose(self, key: Key) -> None:
        self.inner.delete([key])
        self._next = Changes(vanished=(key,))

    def find(self, key: Key, epoch: str) -> None:
        if self.inner.write([key], [memoryview(bytes_for(key, CHUNK, epoch))])[0].ok:
            self._next = Changes(appeared=(Entry(key, CHUNK, 0.0, 0.0),))

    def maintain(self, budget: float) -> Changes:
        changes, self._next = self._next, Changes()
        return changes


class StackWorld:
    """Calls the verbs of a manager as an engine does, checks each answer, and everything that must hold after it.

    The model: what the events say that each tier holds, and which copies and jobs use which slot. A slot that
    nobody uses is overwritten at once, so that a use after its release shows.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.clock = ManualClock()
        self.lanes: list[WatchedLane] = []
        self.faults: list[FaultTier] = []
        self._keepers: list[_Keeper] = []
        self._manual: list[ManualLane] = []
        self.epoch = "e0"
        self.running: dict[str, RequestContext] = {}
        self.prompts: dict[str, Sequence[Key]] = {}
        self.hits: dict[str, dict[Key, None]] = {}
        """What each request was told HIT in this step."""
        self.loads: list[Copy] = []
        self.stores: list[Copy] = []
        self.begun = 0
        self._finished: set[RequestContext] = set()
        self._epochs: dict[int, str] = {}
        self._before: dict[str, int] = {}
        self._dropped = 0
        self.manager = build(
            _settings(shape), Namespace.of(model="m"), CHUNK, events=True, clock=self.clock, wrap=self._wrap,
            lane=self._lane,
        )  # fmt: skip
        self.holds: dict[str, set[Key]] = {name: set() for name in ("host", *(lane.name for lane in self.lanes))}
        """What each tier holds, by the events."""
        for fault in self.faults:
            fault.active = True

    def _wrap(self, name: str, tier: Tier) -> Tier:
        self._keepers.append(_Keeper(tier))
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
        return lane

    def _inner_lane(self, name: str, tier: Tier, slot: Callable[[int], Buffer], concurrency: int) -> Lane:
        lane = ManualLane(tier, slot, concurrency)
        lane.on_transfer = self._transfers
        self._manual.append(lane)
        return lane

    # What the engine does

    def begin(self, name: str, prompt: Sequence[Key]) -> None:
        if name in self.running:
            return
        self.running[name] = RequestContext(name)
        self.prompts[name] = prompt
        self.hits[name] = {}
        self.begun += 1
        for lane in self.lanes:
            lane.begin(name)
        self.manager.on_new_request(self.running[name])
        self.check()

    def finish(self, name: str) -> None:
        ctx = self.running.pop(name)
        del self.hits[name]
        self._finished.add(ctx)
        self.manager.on_request_finished(ctx)
        self.check()

    def lookup(self, name: str, place: int) -> None:
        key = self.prompts[name][place % len(self.prompts[name])]
        answer = self.manager.lookup(key, self.running[name])
        self._take_events()
        self._judge(name, key, answer)
        self.check()

    def match(self, name: str) -> None:
        keys = self.prompts[name]
        found = self.manager.match_prefix(keys, self.running[name])
        self._take_events()
        for key in keys[: found.hits]:
            self._judge(name, key, LookupResult.HIT)
        if found.hits < len(keys):
            self._judge(name, keys[found.hits], LookupResult.HIT_PENDING if found.pending else LookupResult.MISS)
        else:
            assert not found.pending, "everything is HIT, and something pending"
        self.check()

    def load(self, name: str, count: int) -> None:
        keys = list(self.hits[name])[:count]
        slots = self.manager.prepare_load(keys, self.running[name])
        self._take_events()
        copy = Copy(self.running[name], keys, slots, self.epoch)
        self._check_bytes(copy, "granted for a load")
        self.loads.append(copy)
        self.check()

    def complete_load(self, pick: int, success: bool) -> None:
        copy = self.loads.pop(pick % len(self.loads))
        self._check_bytes(copy, "being loaded")
        self.manager.complete_load(copy.keys, copy.ctx, success)
        self.check()

    def offer(self, name: str, start: int, count: int) -> None:
        keys = list(self.prompts[name])[start : start + count]
        room = self._room_for(name, keys)
        absent = [key for key in dict.fromkeys(keys) if self._absent(key)]
        offer = self.manager.prepare_store(keys, self.running[name])
        gone = self._take_events()
        if offer is None:
            assert absent and (not room or self._demotes()), "refused, although there is room"
            self.check()
            return
        assert gone["host"] == offer.evicted, "evicted is not what was removed"
        self._check_dropped(gone["host"])
        assert [*offer.keys, *offer.refused] == absent, "not the keys that are absent"
        assert offer.keys or not offer.refused, "refused as a whole, and not None"
        assert len(offer.keys) == min(room, len(absent)) or self._demotes(), "not the prefix that fits"
        for slot in offer.slots:
            assert slot not in self._used(), f"slot {slot} is granted, and in use"
        self.stores.append(Copy(self.running[name], offer.keys, offer.slots, self.epoch))
        for slot in offer.slots:
            self.manager.pool.slot(slot)[:] = bytes([UNWRITTEN]) * CHUNK
        self.check()

    def write(self, pick: int) -> None:
        copy = self.stores[pick % len(self.stores)]
        copy.written = True
        for key, slot in zip(copy.keys, copy.slots, strict=True):
            self.manager.pool.slot(slot)[:] = bytes_for(key, CHUNK, copy.epoch)
        self.check()

    def complete_store(self, pick: int, success: bool) -> None:
        copy = self.stores.pop(pick % len(self.stores))
        success = success and copy.written
        if copy.written:
            self._check_bytes(copy, "stored into")
        self.manager.complete_store(copy.keys, copy.ctx, success)
        self._take_events()
        for key in copy.keys:
            if not copy.void:
                assert (key in self.holds["host"]) == success, "complete_store and HIT are not the same event"
        self.check()

    def store(self, name: str, count: int) -> None:
        """Offers, writes and completes the first chunks at once, as an engine mostly does."""
        before = len(self.stores)
        self.offer(name, 0, count)
        if len(self.stores) > before:
            self.write(before)
            self.complete_store(before, True)

    def complete_nothing(self, key: Key, load: bool) -> None:
        """A completion that belongs to nothing."""
        complete = self.manager.complete_load if load else self.manager.complete_store
        complete([key], RequestContext("stranger"))
        self.check()

    def touch(self, name: str, count: int) -> None:
        self.manager.touch(self.prompts[name][:count], self.running[name])
        self.check()

    def step(self) -> None:
        self.manager.on_schedule_end()
        self._check_dropped(self._take_events()["host"])
        for hits in self.hits.values():
            hits.clear()
        self.check()
        self._check_counters()

    def reset(self, scope: Literal["all", "primary"], patient: bool) -> None:
        report = self._reset(scope, patient)
        self._take_events()
        for copy in (*self.loads, *self.stores):
            copy.void = True
        for hits in self.hits.values():
            hits.clear()
        assert not self.holds["host"], "primary holds something after a reset"
        if scope == "all":
            self.epoch = f"e{int(self.epoch[1:]) + 1}"
            for lane in self.lanes:
                assert (lane.name in report.cleared) != (lane.name in report.failed), "neither cleared nor failed"
                assert lane.name in report.failed or not self.holds[lane.name], "cleared, and holds something"
                if patient and not self.shape.faults:
                    assert lane.name in report.cleared, "not cleared, though nothing kept it from it"
        self.check()

    # What the media do

    def advance(self, lane: int, pick: int) -> None:
        """One of the things that can happen in a lane happens."""
        self._manual[lane % len(self.lanes)].advance(pick)
        self.check()

    def drain(self, lane: int) -> None:
        """All that waits or runs in a lane ends."""
        self._manual[lane % len(self.lanes)].run_all()
        self.check()

    def lose(self, lane: int, pick: int) -> None:
        """A tier's housekeeping drops a chunk."""
        level = self.manager._chain.levels[lane % len(self.lanes)]
        held = sorted(entry.key for entry in self._keepers[level.place].entries() if level.holds(entry.key))
        if held:
            self._keepers[level.place].lose(held[pick % len(held)])
            self._manual[level.place].maintain()
        self.check()

    def find(self, lane: int, key: Key) -> None:
        """A tier's housekeeping finds a chunk, and the manager reads of it at once."""
        self.step()
        level = self.manager._chain.levels[lane % len(self.lanes)]
        residency = _residency(level)
        room = residency.capacity and residency.bytes + CHUNK <= residency.capacity
        if level.up and room and key not in residency._entries:
            self._keepers[level.place].find(key, self.epoch)
            self._manual[level.place].maintain()
            self.step()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def switch_faults(self, active: bool) -> None:
        for fault in self.faults:
            fault.active = active

    # The model

    def _absent(self, key: Key) -> bool:
        """Whether it is neither in primary nor on its way into it."""
        coming = any(key in copy.keys for copy in self.stores if not copy.void)
        return key not in self.holds["host"] and not coming and not self._arriving(key)

    def _gives(self, level: Level, key: Key) -> bool:
        return level.up and key in self.holds[level.name] and level.settings.promote == "always"

    def _demotes(self) -> bool:
        """Whether primary's eviction may have to wait for a copy into the tier below."""
        return bool(self.lanes) and self.shape.writes[0] == "on_evict"

    def _arriving(self, key: Key) -> bool:
        """Whether it is being read into primary."""
        return any(
            key in job.keys and job.slots[0] < self.shape.slots and not job.expired and not job.withdrawn
            for job in self._jobs()
            if job.kind is JobKind.READ
        )

    def _judge(self, name: str, key: Key, answer: LookupResult) -> None:
        if key in self.holds["host"]:
            assert answer is LookupResult.HIT, f"{answer} for a chunk that is there"
            self.hits[name][key] = None
            return
        assert answer is not LookupResult.HIT, "HIT for a chunk that is not there"
        coming = any(key in copy.keys for copy in self.stores if not copy.void) or self._arriving(key)
        below = any(self._gives(level, key) for level in self.manager._chain.levels)
        if answer is LookupResult.HIT_PENDING:
            assert coming or below, "HIT_PENDING for a chunk that nobody has"
        else:
            request = self.manager._requests._running[name]
            leaving = any(key in job.victims for job in self._jobs())
            excused = key in request.turned_down or self.manager._slots.quarantined(key) or leaving
            assert excused or not (coming or below), "MISS for a chunk that is there or coming"

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
        gone: dict[str, list[Key]] = {name: [] for name in self.holds}
        for event in self.manager.take_events():
            held = self.holds[event.tier]
            for key in event.keys:
                assert (key in held) == event.removed, f"{event.tier}: {event} of {key.hex()[:8]} twice"
            if event.removed:
                held.difference_update(event.keys)
                gone[event.tier] += event.keys
            else:
                held.update(event.keys)
        return gone

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

    # What holds after each call

    def check(self) -> None:
        self._take_events()
        self._check_slots()
        self._check_levels()
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

    def _check_dropped(self, evicted: Sequence[Key]) -> None:
        """What primary has evicted is in the tier that receives it then, or counted as dropped."""
        if not self._demotes():
            return
        before, self._dropped = self._dropped, self.manager.get_stats().tiers[0].dropped
        lost = [key for key in evicted if key not in self.holds["t0"]]
        assert len(lost) <= self._dropped - before, "evicted, not in the tier below, and not counted"

    def _check_levels(self) -> None:
        for lane, level in zip(self.lanes, self.manager._chain.levels, strict=True):
            writes = [job for job in lane.unsettled.values() if job.kind is JobKind.WRITE]
            assert level.pinned == sum(len(job.keys) for job in writes)
            assert level.pinned <= max(1, int(level.settings.queue * self.shape.slots)), "more than its share"
            residency = _residency(level)
            assert 0 <= residency.bytes <= (level.stats.capacity or 0)
            ready = {key for key in residency._entries if key in residency}
            assert residency.chunks == len(ready)
            assert ready <= self.holds[lane.name], "readable, and no event has told of it"
            if level.up:
                being_deleted = {key for job in writes for key in job.victims}
                assert self.holds[lane.name] <= ready | being_deleted, "the events tell of more than is readable"

    def _check_counters(self) -> None:
        now = dict(_counters(self.manager.get_stats()))
        for name, before in self._before.items():
            assert now.get(name, 0) >= before, f"{name} went from {before} to {now.get(name, 0)}"
        self._before = now

    # The end

    def settle(self) -> None:
        """Everything that was begun ends, well; then nothing may be left."""
        while self.loads:
            self.complete_load(0, True)
        while self.stores:
            self.complete_store(0, False)
        for name in list(self.running):
            self.finish(name)
        self.switch_faults(False)
        for _ in range(3):
            self._calm(3.0)
        for _ in range(20):  # moves down take a few steps each
            self._calm(0.0)
        self._check_nothing_left()
        self._check_content()
        self._check_served()

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
            assert len(getattr(pair, "_shelf", ())) in (0, _STAGING), "a staging slot is missing"
        found = manager._slots.victims(self.shape.slots)
        assert found is not None and len(found) == stats.tiers[0].chunks, "chunks that eviction does not find"
        for lane, level in zip(self.lanes, manager._chain.levels, strict=True):
            assert level.up and not level.pinned and not level.awaited and not lane.unsettled
            assert sorted(lane.submitted) == sorted(lane.reported), "not each job was reported once"
            assert lane.finishes == self.begun, "finish was not told once for each request"
            residency = _residency(level)
            entries = map(residency._entries.get, residency._entries)
            assert not any(residency._readers[entry or 0] for entry in entries), "a reader is left"
            assert sorted(residency._entries) == sorted(self.holds[lane.name])
            found = residency._policy.victims(99, residency._busy)
            assert len(found) == residency.chunks, "chunks that eviction does not find"

    def _check_content(self) -> None:
        """What the media really hold: nothing of another epoch; without faults, what the manager knows."""
        for lane, fault in zip(self.lanes, self.faults, strict=True):
            held = [entry.key for entry in fault.inner.entries()]
            for key in held:
                view = memoryview(bytearray(CHUNK))
                assert fault.inner.read([key], [view])[0].ok
                assert holds(view, key, self.epoch), f"{lane.name} holds a chunk of another epoch"
            if not fault.injected:
                assert sorted(held) == sorted(self.holds[lane.name]), f"{lane.name} holds other chunks than known"

    def _check_served(self) -> None:
        """What is there can be loaded, one request after the other."""
        for number, key in enumerate(dict.fromkeys(key for prompt in PROMPTS for key in prompt)):
            there = key in self.holds["host"] or any(
                self._gives(level, key) for level in self.manager._chain.levels
            )
            sure = (
                there
                and "on_evict" not in self.shape.writes
                and (key in self.holds["host"] or not any(fault.injected for fault in self.faults))
            )
            name = f"last-{number}"
            self.begin(name, [key])
            for _ in range(8 * there):
                self.lookup(name, 0)
                if self.hits[name]:
                    break
                self.step()
                self._rest()
            assert self.hits[name] or not sure, "what is there is not served"
            if self.hits[name]:
                self.load(name, 1)
                self.complete_load(0, True)
            self.finish(name)
            self._calm(0.0)

    def _calm(self, seconds: float) -> None:
        """All that waits or runs in the lanes ends, and is read, and again after some time."""
        for _ in range(2):
            self._rest()
            self.clock.advance(seconds)
            self.step()

    def _rest(self) -> None:
        """All that waits or runs in the lanes ends."""
        for lane in self._manual:
            lane.run_all()

    def _reset(self, scope: Literal["all", "primary"], patient: bool) -> ResetReport:
        for lane in self._manual:
            lane.patient = patient
        report = self.manager.reset_cache(scope, timeout=0.0)
        for lane in self._manual:
            lane.patient = True
        return report

    def close(self) -> None:
        self.manager.shutdown(timeout=0.0)


class ThreadedStackWorld(StackWorld):
    """The same over lanes of threads, with a gate before each tier: what moves is what is let through. Threads are
    not deterministic, so that no history can be shrunk."""

    def __init__(self, shape: Shape) -> None:
        self.gates: list[GateTier] = []
        super().__init__(shape)

    def _wrap(self, name: str, tier: Tier) -> Tier:
        self.gates.append(GateTier(GuardTier(super()._wrap(name, tier)), hold=("read", "write")))
        return self.gates[-1]

    def _inner_lane(self, name: str, tier: Tier, slot: Callable[[int], Buffer], concurrency: int) -> Lane:
        return ThreadLane(name, tier, slot, concurrency, clock=self.clock)

    def advance(self, lane: int, pick: int) -> None:
        waiting = self.gates[lane % len(self.gates)].waiting
        if waiting:
            call = waiting[pick % len(waiting)]
            call.release()
            call.wait_done()
        self.check()

    def drain(self, lane: int) -> None:
        self._let_through([self.gates[lane % len(self.gates)]], [self.lanes[lane % len(self.gates)]])
        self.check()

    def _rest(self) -> None:
        self._let_through(self.gates, self.lanes)

    def _let_through(self, gates: Sequence[GateTier], lanes: Sequence[WatchedLane]) -> None:
        for gate in gates:
            gate.open()
        for lane in lanes:
            assert lane.wait(30.0), "a lane does not come to rest"
        for gate in gates:
            gate.shut()

    def _reset(self, scope: Literal["all", "primary"], patient: bool) -> ResetReport:
        if not patient:
            return self.manager.reset_cache(scope, timeout=0.0)
        for gate in self.gates:
            gate.open()
        report = self.manager.reset_cache(scope, timeout=30.0)
        for gate in self.gates:
            gate.shut()
        return report

    def close(self) -> None:
        for gate in self.gates:
            gate.open()
        self.manager.shutdown(timeout=30.0)


def _residency(level: Level) -> Residency:
    assert isinstance(level.residency, Residency), "no tier here is shared"
    return level.residency


def _settings(shape: Shape) -> StackSettings:
    common = {"queue": shape.queue, "concurrency": shape.concurrency, "deadline": "2s"}
    tiers = [
        MemorySettings.model_validate(
            common | {"name": f"t{place}", "capacity": chunks * CHUNK, "write": write, "promote": promote}
        )
        for place, (chunks, write, promote) in enumerate(
            zip(shape.capacities, shape.writes, shape.promotes, strict=False)
        )
    ]
    host = HostSettings(capacity=(shape.slots + 1) * _STRIDE, staging=(_STAGING + 1) * _STRIDE)
    return StackSettings.model_validate({"version": 1, "log_every": "0s", "tiers": (host, *tiers)})


def _counters(stats: Any) -> Iterable[tuple[str, int]]:
    shrinking = {"chunks", "bytes", "capacity", "queue", "up", "free_slots", "pinned_slots"}
    for owner in (stats, *stats.tiers):
        for name in owner.__slots__:
            value = getattr(owner, name)
            if name not in shrinking and isinstance(value, int):
                yield f"{getattr(owner, 'name', 'stack')}.{name}", value
            elif isinstance(value, Counter):
                yield from ((f"{getattr(owner, 'name', 'stack')}.{name}.{what}", n) for what, n in value.items())
