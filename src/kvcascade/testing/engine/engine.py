"""`SimulatedEngine`: scheduler and workers, step by step."""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Literal

from kvcascade.connector import Direction, SchedulerAdapter, TransferWorker
from kvcascade.connector.copies import Slots
from kvcascade.connector.protocols import Manager

from .connector import AdapterConnector
from .copies import ManualCopier
from .device import Device
from .model import Model
from .outputs import ConnectorOutput, ModelOutput, StepPlan
from .requests import SimRequest
from .scheduler import EngineScheduler
from .shape import EngineShape
from .workers import Rank, Workers

__all__ = ["SimulatedEngine"]


class _Flight:
    """A step that has been planned, and whose results are not in."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.sampled: dict[str, list[int]] | None = None


class SimulatedEngine:
    """A paged-attention engine in one thread, over a manager, by way of the connector's two halves.

    Nothing happens by itself: each `step` draws from the generator it is given what is a matter of chance, as when
    workers run, how far copies come, and which drafts are accepted.

    Args:
        manager: the stack; its chunks must have `chunk_bytes(shape)`.
        pool: its slots.
        connector: what the scheduler calls the adapter by.

    Attributes:
        hashes_late: how many of a request's newest block hashes are held back, at most.
    """

    def __init__(
        self,
        shape: EngineShape,
        manager: Manager,
        pool: Slots,
        *,
        prompt_only: bool = False,
        share_loads: bool = True,
        model: Model | None = None,
        connector: Callable[[SchedulerAdapter], AdapterConnector] = AdapterConnector,
    ) -> None:
        self.shape = shape
        self.model = model or Model()
        self.prompt_only = prompt_only
        self.share_loads = share_loads
        self.hashes_late = 0
        self.adapter = SchedulerAdapter(
            manager, shape.groups, workers=shape.ranks, prompt_only=prompt_only, share_loads=share_loads
        )
        self._connector = connector(self.adapter)
        self.scheduler = EngineScheduler(shape, self._connector, lambda: self._hold_back())
        self.copiers: list[ManualCopier] = []
        self.transfers: list[TransferWorker] = []
        ranks = [self._rank(number, pool) for number in range(shape.ranks)]
        self.workers = Workers(shape, self.model, ranks, on_start=self._copy_some)
        self.flights: deque[_Flight] = deque()
        self._draw = Random(0)

    @staticmethod
    def chunk_bytes(shape: EngineShape) -> int:
        """Bytes of a chunk, all ranks together."""
        return shape.ranks * SimulatedEngine.part_bytes(shape)

    @staticmethod
    def part_bytes(shape: EngineShape) -> int:
        """Bytes of a chunk that are one rank's."""
        device = Device(shape, 0, Model())
        return TransferWorker.part_bytes(device.tensors, device.layouts)

    def _rank(self, number: int, pool: Slots) -> Rank:
        device = Device(self.shape, number, self.model)
        copier = ManualCopier(device.tensors, pool)
        offset = number * TransferWorker.part_bytes(device.tensors, device.layouts)
        worker = TransferWorker(device.tensors, device.layouts, pool, offset=offset, copier=copier)
        self.copiers.append(copier)
        self.transfers.append(worker)
        return Rank(device, worker)

    # What clients and operators do

    def add(self, request: SimRequest) -> None:
        self.scheduler.add(request)

    def abort(self, req_id: str) -> None:
        self.scheduler.abort(req_id)

    def reset(self, preempt: bool, scope: Literal["all", "primary"] = "all", connector: bool = True) -> bool:
        """Empties the caches, the connector's too unless it is left out. Where running requests are to be
        preempted, the steps in flight end first. Returns whether nothing is left of before in the engine and in
        the tiers that were asked for, so that the weights may change."""
        while preempt and self.flights:
            self._end_flight()
        self._connector.scope = scope
        refused = self.scheduler.reset(preempt, connector) is None
        return connector and not refused and self.scheduler.tables.pool.empty and scope == "all"

    def store_limit(self, request: SimRequest) -> int | None:
        """Leading tokens of a request that may be stored; None for all."""
        cap = (request.kv_transfer_params or {}).get("max_offload_tokens")
        limits = [cap] if type(cap) is int and cap >= 0 else []
        if self.prompt_only:
            limits.append(request.num_prompt_tokens)
        return min(limits, default=None)

    # Steps

    @property
    def busy(self) -> bool:
        """Whether the engine goes on stepping."""
        return bool(self.flights) or self.scheduler.has_requests

    def step(self, draw: Random) -> bool:
        """One pass of the engine's loop. False where there is nothing to do."""
        self._draw = draw
        if self.scheduler.has_requests:
            plan = self.scheduler.schedule()
            self.flights.append(_Flight(plan))
            self._copy_some()
            if not self.shape.asynchronous or draw.random() < 0.5:
                self._execute_all()
            executed = plan.total_num_scheduled_tokens > 0
            if len(self.flights) < self.shape.depth and (executed or self.scheduler.has_requests):
                return True
        if not self.flights:
            return False
        self._end_flight()
        return True

    def shutdown(self) -> None:
        """The workers end; the manager is the caller's."""
        for transfers in self.transfers:
            transfers.shutdown()

    def _end_flight(self) -> None:
        flight = self.flights[0]
        if flight.sampled is None:
            flight.sampled = self.workers.execute(flight.plan, self._draw)
        self._copy_some()
        self.flights.popleft()
        report = self.workers.report(self._draw)
        self.scheduler.update(
            flight.plan, ModelOutput(flight.sampled, ConnectorOutput(kv_connector_worker_meta=report))
        )

    def _execute_all(self) -> None:
        for flight in self.flights:
            if flight.sampled is None:
                flight.sampled = self.workers.execute(flight.plan, self._draw)

    def _copy_some(self) -> None:
        """Each rank's copies come on a bit, some way or not at all."""
        for copier in self.copiers:
            for direction in Direction:
                for _ in range(self._draw.choice((0, 0, 1, 3, 100))):
                    if not copier.advance(direction):
                        break

    def _hold_back(self) -> int:
        return self._draw.randint(0, self.hashes_late)
