"""An engine at play with a stack, beside a plain model of what the manager may answer."""

from collections.abc import Callable, Sequence
from typing import Literal

from kvcascade.manager import ResetReport
from kvcascade.manager.lane import Lane, ThreadLane
from kvcascade.manager.level import Level
from kvcascade.manager.residency import Residency
from kvcascade.tiers import Tier
from kvcascade.types import Buffer, Key, LookupResult, RequestContext

from .bytes import UNWRITTEN, bytes_for
from .guard import GuardTier
from .lanes import WatchedLane
from .stack_model import Copy, StackModel
from .stack_shape import CHUNK, PROMPTS, Shape, TierShape
from .wrappers import GateTier

__all__ = ["PROMPTS", "Shape", "StackWorld", "ThreadedStackWorld", "TierShape"]


class StackWorld(StackModel):
    """Calls the verbs of a manager as an engine does, and checks each answer and all that must hold after it."""

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
        used = list(self.manager._requests._running[name].keys)
        self.manager.on_request_finished(ctx)
        self.uses.update(used)
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
            self._judge(
                name, keys[found.hits], self._pending(keys[found.hits]) if found.pending else LookupResult.MISS
            )
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
        self._evicts(-1, gone["host"])
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
        self._evicts(-1, self._take_events()["host"])
        for hits in self.hits.values():
            hits.clear()
        self.check()
        self._check_counters()

    def reset(self, scope: Literal["all", "primary"], patient: bool, weights: str = "") -> None:
        report = self._reset(scope, patient, weights)
        self._take_events()
        for copy in (*self.loads, *self.stores):
            copy.void = True
        for hits in self.hits.values():
            hits.clear()
        assert not self.holds["host"], "primary holds something after a reset"
        if scope == "all":
            self.resets += 1
            self.epoch = weights or f"private {self.resets}"
            for moved in (*self._kept.values(), *self._leaving.values()):
                moved.clear()
            for lane in self.lanes:
                assert (lane.name in report.cleared) != (lane.name in report.failed), "neither cleared nor failed"
                assert lane.name in report.failed or not self.holds[lane.name], "cleared, and holds something"
                if patient and not self.shape.faults:
                    assert lane.name in report.cleared, "not cleared, though nothing kept it from it"
        self.check()

    def _pending(self, key: Key) -> LookupResult:
        """What "not yet" may mean for a key."""
        known = any(self._gives(level, key) for level in self.levels) or not any(
            self._asks(level, key) for level in self.levels
        )
        return LookupResult.HIT_PENDING if known or self._coming(key) else LookupResult.RETRY

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
        """A tier's housekeeping drops a chunk; another engine does, where the tier is shared."""
        level = self.levels[lane % len(self.lanes)]
        held = sorted(entry.key for entry in self._keepers[level.place].entries() if level.holds(entry.key))
        if held:
            if level.shared:
                self._keepers[level.place].inner.delete([held[pick % len(held)]])
            else:
                self._keepers[level.place].lose(held[pick % len(held)])
                self._keep_house(level)
        self.check()

    def find(self, lane: int, key: Key) -> None:
        """A tier's housekeeping finds a chunk, and the manager reads of it at once."""
        self.step()
        level = self.levels[lane % len(self.lanes)]
        residency = level.residency
        if not isinstance(residency, Residency) or not level.up:
            return
        if key in residency._entries or key in level.being_deleted:
            return
        if residency.capacity and residency.bytes + CHUNK <= residency.capacity:
            self._keepers[level.place].find(key, memoryview(bytes_for(key, CHUNK, self.epoch)))
            self._keep_house(level)
            self._born[level.name, key] = self.clock()
            self.step()

    def _keep_house(self, level: Level) -> None:
        """A fault may keep the tier from telling what it has found or lost."""
        self._manual[level.place].maintain()
        self._keepers[level.place].forget()

    def store_elsewhere(self, lane: int, key: Key, weights: str) -> None:
        """Another engine, which names these weights, stores a chunk in a tier that is shared."""
        shelf = self._shelf(self.levels[lane % len(self.lanes)])
        if shelf is not None:
            label = weights or "start"
            assert shelf.epoch(weights).write([key], [memoryview(bytes_for(key, CHUNK, label))])[0].ok
        self.check()

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def switch_faults(self, active: bool) -> None:
        for fault in self.faults:
            fault.active = active

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
        self.check()
        self._check_nothing_left()
        self._check_content()
        self._check_served()

    def _check_served(self) -> None:
        """What is there can be loaded, one request after the other."""
        for number, key in enumerate(dict.fromkeys(key for prompt in PROMPTS for key in prompt)):
            there = self._readable(key)
            name = f"last-{number}"
            self.begin(name, [key])
            for _ in range(8 * there):
                self.lookup(name, 0)
                if self.hits[name]:
                    break
                self.step()
                self._rest()
            assert self.hits[name] or not (there and self._surely(key)), "what is there is not served"
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

    def _reset(self, scope: Literal["all", "primary"], patient: bool, weights: str) -> ResetReport:
        for lane in self._manual:
            lane.patient = patient
        report = self.manager.reset_cache(scope, weights, timeout=0.0)
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

    def _reset(self, scope: Literal["all", "primary"], patient: bool, weights: str) -> ResetReport:
        if not patient:
            return self.manager.reset_cache(scope, weights, timeout=0.0)
        for gate in self.gates:
            gate.open()
        report = self.manager.reset_cache(scope, weights, timeout=30.0)
        for gate in self.gates:
            gate.shut()
        return report

    def close(self) -> None:
        for gate in self.gates:
            gate.open()
        self.manager.shutdown(timeout=30.0)
