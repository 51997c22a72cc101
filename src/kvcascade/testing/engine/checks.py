"""What must hold, whatever happens: right bytes everywhere, and nothing left at rest."""

from collections.abc import Sequence

from kvcascade.connector import ConnectorMetadata, Direction, EndedLoad, SchedulerAdapter
from kvcascade.connector.protocols import StepOutput
from kvcascade.manager.jobs import Job, JobKind
from kvcascade.manager.slots import SlotState
from kvcascade.testing.invariants import check_deadlines, check_levels, check_shares, check_slots, require
from kvcascade.types import Key

from .connector import AdapterConnector
from .content import Content
from .engine import SimulatedEngine
from .outputs import ConnectorOutput
from .spy import Spy
from .stack import SimulatedStack

__all__ = ["CheckedConnector", "Watch"]


class CheckedConnector(AdapterConnector):
    """Holds the adapter to what it promises of the jobs in flight when a reset comes."""

    def __init__(self, adapter: SchedulerAdapter) -> None:
        super().__init__(adapter)
        self.build_connector_meta = self._plan
        self._void_loads: set[str] = set()
        """Requests whose load has not ended."""
        self._to_flush: set[int] = set()
        """Jobs that the next step has to wait for, if they have not ended before."""

    def reset_cache(self) -> bool:
        for job in self.adapter._jobs._live.values():
            self._to_flush.add(job.id)
            if job.direction is Direction.LOAD:
                self._void_loads.add(job.owner.id)
        return super().reset_cache()

    def update_connector_output(self, output: ConnectorOutput) -> Sequence[EndedLoad]:
        ended = super().update_connector_output(output)
        for load in ended:
            require(not (load.ok and load.req_id in self._void_loads), f"{load} is of before a reset, and good")
            self._void_loads.discard(load.req_id)
        return ended

    def _plan(self, step: StepOutput) -> ConnectorMetadata:
        metadata = self.adapter.build_connector_meta(step)
        missing = self._to_flush.intersection(self.adapter._jobs._void).difference(metadata.flush)
        require(not missing, f"jobs {missing} of before a reset still run, and are not flushed")
        self._to_flush.clear()
        return metadata


class Watch:
    """Checks the manager after each action, slots as chunks come up in them, and all tiers at rest."""

    def __init__(self, engine: SimulatedEngine, stack: SimulatedStack, content: Content, spy: Spy) -> None:
        self._engine, self._stack, self._content, self._spy = engine, stack, content, spy
        self._weights: dict[int, int] = {}
        self._holds: dict[str, set[Key]] = {name: set() for name in ("host", *(lane.name for lane in stack.lanes))}
        """Tier -> what it holds, by the events."""
        stack.on_submit = self._submitted
        stack.on_write = self._written

    def check(self) -> None:
        """What holds after every action; and what has come up in the host pool holds what it should."""
        manager, lanes = self._stack.manager, self._stack.lanes
        self._take_events()
        check_slots(manager, self._spy.slots_in_use, lanes)
        check_shares(manager, lanes)
        check_deadlines(manager, lanes)
        check_levels(manager, lanes, self._holds)
        require(set(manager._slots) == self._holds["host"], "the events do not tell what primary holds")
        self._check_requests()

    def _take_events(self) -> None:
        for event in self._engine.adapter.take_events():
            held = self._holds[event.tier]
            require(not held.intersection(event.keys) or event.removed, f"{event.tier}: came twice")
            require(held.issuperset(event.keys) or not event.removed, f"{event.tier}: went, and was not there")
            if event.removed:
                held.difference_update(event.keys)
                continue
            held.update(event.keys)
            for key in event.keys if event.tier == "host" else ():
                self._check_slot(key)

    def _check_requests(self) -> None:
        """The manager keeps what is still needed of requests; each tier is told of a finish once nothing can come
        after it; and an engine has to go on stepping exactly as long as something waits for its steps."""
        manager, lanes, spy = self._stack.manager, self._stack.lanes, self._spy
        known = manager.requests_known
        require(known == spy.known, f"{known} requests are known, something is to come of {spy.known}")
        for lane in lanes:
            require(lane.finishes == spy.finished, f"{lane.name}: {lane.finishes} finishes, not {spy.finished}")
        pending = spy.stores_after_finish or any(lane.awaited for lane in lanes)
        require(manager.has_pending_work() == pending, f"has_pending_work is not {pending}")

    def check_all(self) -> None:
        """Everything in the host pool and in the tiers holds what it should."""
        slots = self._stack.manager._slots
        for key in list(slots):
            self._check_slot(key)
        for fault, lane in zip(self._stack.faults, self._stack.lanes, strict=True):
            for entry in list(fault.inner.entries()):
                view = memoryview(bytearray(entry.nbytes))
                outcome = fault.inner.read([entry.key], [view])[0]
                require(outcome.ok, f"{lane.name}: {outcome} for a chunk that it lists")
                self._content.check(entry.key, view, f"tier {lane.name}")

    def check_rest(self) -> None:
        """Nothing is left of any request."""
        manager, adapter, begun = self._stack.manager, self._engine.adapter, self._spy.begun
        stats = manager.get_stats()
        left = {
            "requests of the adapter": adapter.requests_known,
            "jobs of the adapter": adapter.jobs_known,
            "fenced blocks": len(adapter._fences),
            "requests of the manager": manager.requests_known,
            "pinned slots": stats.pinned_slots,
            "missing slots": self._stack.shape.slots - stats.free_slots - stats.tiers[0].chunks,
            "lookups without an outcome": stats.lookups
            - stats.hits
            - stats.unused
            - stats.failed
            - stats.misses.total(),
            "requests not counted": begun - stats.requests,
            "blocks of the device": self._engine.shape.blocks - 1 - self._engine.scheduler.tables.pool.free,
        }
        left = {what: number for what, number in left.items() if number}
        require(not left, f"left at rest: {left}")
        require(not adapter.has_pending_work(), "pending work at rest")
        for lane in self._stack.lanes:
            require(lane.finishes == begun, f"{lane.name}: {lane.finishes} finishes of {begun} requests")
            left_over = [job for job in lane.unsettled.values() if job.kind is not JobKind.PROBE]
            require(not left_over, f"{lane.name}: jobs that were not reported: {left_over}")
            require(len(set(lane.reported)) == len(lane.reported), f"{lane.name}: jobs that were reported twice")

    def _check_slot(self, key: Key) -> None:
        slots = self._stack.manager._slots
        slot = slots.find(key)
        if slot >= 0 and slots.state(slot) == SlotState.READY:
            self._content.check(key, self._stack.pool.slot(slot), f"slot {slot}")

    def _submitted(self, job: Job) -> None:
        self._weights[job.id] = self._engine.model.weights

    def _written(self, job: Job) -> None:
        for key, slot in zip(job.keys, job.slots, strict=True):
            self._content.check(
                key, self._stack.pool.slot(slot), f"slot {slot}, being written", self._weights[job.id]
            )
