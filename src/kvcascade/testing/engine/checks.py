"""What must hold, whatever happens: right bytes everywhere, complete and gap-free stores, nothing left at rest."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcascade.connector.coverage import first_needed_block, hit_unit
from kvcascade.manager.jobs import Job, JobKind
from kvcascade.manager.slots import SlotState
from kvcascade.types import Key, RequestContext, StoreOffer

from .engine import SimulatedEngine
from .model import NO_WORD, prefix_hashes
from .requests import SimRequest, Status
from .stack import SimulatedStack

__all__ = ["BrokenInvariantError", "Content", "Spy", "Watch", "require"]


class BrokenInvariantError(AssertionError):
    """Something that must always hold does not."""


def require(holds: bool, what: str) -> None:
    """Raises `BrokenInvariantError` where `what` does not hold."""
    if not holds:
        raise BrokenInvariantError(what)


class Content:
    """What the chunk of each key must hold, and what a slot or a tier holds instead."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._shape = engine.shape
        self._groups = engine.shape.groups
        self._unit = hit_unit(self._groups)
        self._part = engine.part_bytes(engine.shape) // 8
        self._tokens: dict[bytes, tuple[int, list[int]]] = {}
        """Hash of a chunk's last block -> the chunk's place, and the prefixes of its tokens."""
        self._seen: dict[SimRequest, int] = {}
        self._expected: dict[tuple[Key, int], Any] = {}

    def learn(self, request: SimRequest) -> None:
        """Takes note of the chunks whose hashes the request has."""
        size, blocks = self._shape.tokens_per_chunk, self._shape.blocks_per_chunk
        known = self._seen.get(request, 0)
        count = len(request.block_hashes) // blocks
        if count <= known:
            return
        prefixes = prefix_hashes(request.all_token_ids[: count * size])
        for chunk in range(known, count):
            key = request.block_hashes[(chunk + 1) * blocks - 1]
            self._tokens[key] = chunk, prefixes[chunk * size : (chunk + 1) * size]
        self._seen[request] = count

    def forget(self, request: SimRequest) -> None:
        self._seen.pop(request, None)

    def check(self, key: Key, view: Any, where: str, weights: int | None = None) -> None:
        """Compares every byte that a load may read of a chunk.

        Raises:
            BrokenInvariantError: one is wrong.
        """
        weights = self._engine.model.weights if weights is None else weights
        words, matters = self._words(key, weights)
        found = np.frombuffer(view, np.uint64)
        wrong = np.flatnonzero((found != words) & matters)
        if not len(wrong):
            return
        held = found[wrong[0]]
        what = "what nobody has computed" if held == np.uint64(NO_WORD) else f"{int(held):#018x}"
        raise BrokenInvariantError(
            f"{where}: chunk {self._tokens[key[:-4]][0]} of group {int.from_bytes(key[-4:], 'big')}, key "
            f"{key.hex()[:8]}: word {wrong[0]} of {len(words)} is {what}, and {len(wrong)} in all are wrong"
        )

    def _words(self, key: Key, weights: int) -> Any:
        found = self._expected.get((key, weights))
        if found is None:
            found = self._expected[key, weights] = self._build(key, weights)
        return found

    def _build(self, key: Key, weights: int) -> Any:
        chunk, prefixes = self._tokens[key[:-4]]
        group = int.from_bytes(key[-4:], "big")
        first = first_needed_block(self._groups[group], chunk, self._unit) * self._shape.tokens_per_block
        words = np.zeros(self._part * self._shape.ranks, np.uint64)
        matters = np.zeros(len(words), bool)
        for rank in self._engine.workers.ranks:
            at = rank.device.rank * self._part
            for layer in rank.device.layers[group]:
                words[at : at + len(prefixes)] = self._engine.model.words(
                    prefixes, rank.device.rank, group, layer, weights
                )
                matters[at + first : at + len(prefixes)] = True
                at += len(prefixes)
        return words, matters


@dataclass(slots=True)
class _Told:
    """What the manager was told of a request."""

    covered: set[Key] = field(default_factory=set)
    """Chunks that were offered and not refused, or loaded."""
    offered: set[Key] = field(default_factory=set)
    refused: bool = False
    """The last offer was."""
    incomplete: bool = False
    """Nothing is to be said of its last offers."""


class Spy:
    """Stands between adapter and manager, and holds each request to the order of its calls.

    Attributes:
        engine: set once there is one.
        content: told of each chunk before it is offered.
        requests: those that the engine has been given, by name; whoever gives one enters it.
        begun: how many the manager has been told of.
    """

    engine: SimulatedEngine
    content: Content

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.begun = 0
        self.requests: dict[str, SimRequest] = {}
        self._running: dict[str, _Told] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def on_new_request(self, ctx: RequestContext) -> None:
        require(ctx.req_id not in self._running, f"{ctx.req_id} is new twice")
        self._running[ctx.req_id] = _Told()
        self.begun += 1
        self._manager.on_new_request(ctx)

    def prepare_store(self, keys: Sequence[Key], ctx: RequestContext) -> StoreOffer | None:
        require(ctx.req_id in self._running, f"an offer of {ctx.req_id} after its finish")
        told = self._running[ctx.req_id]
        self.content.learn(self.requests[ctx.req_id])
        offer: StoreOffer | None = self._manager.prepare_store(keys, ctx)
        told.refused = offer is None
        if offer is not None:
            told.covered.update(keys)
            told.offered.update(keys)
        return offer

    def prepare_load(self, keys: Sequence[Key], ctx: RequestContext) -> Sequence[int]:
        self._running[ctx.req_id].covered.update(keys)
        slots: Sequence[int] = self._manager.prepare_load(keys, ctx)
        return slots

    def on_request_finished(self, ctx: RequestContext) -> None:
        require(ctx.req_id in self._running, f"{ctx.req_id} is finished twice")
        told = self._running.pop(ctx.req_id)
        self._manager.on_request_finished(ctx)
        request = self.requests.pop(ctx.req_id, None)
        if request is not None and not told.incomplete:
            self._check_complete(request, told)

    def reset_cache(self, *args: Any, **kwargs: Any) -> Any:
        report = self._manager.reset_cache(*args, **kwargs)
        for told in self._running.values():
            told.covered.clear()
            told.offered.clear()
        return report

    def before_reset(self) -> None:
        """What finishes within a reset has its last chunks dropped."""
        for req_id in self.requests:
            if req_id in self._running:
                self._running[req_id].incomplete = True

    def after_reset(self) -> None:
        """What loads when a reset comes has its chunks taken for loaded."""
        for req_id, told in self._running.items():
            request = self.engine.scheduler.requests.get(req_id)
            told.incomplete |= request is not None and request.status is Status.LOADING

    def _check_complete(self, request: SimRequest, told: _Told) -> None:
        """All that is written at a normal end has been offered, and no chunk beyond: neither a gap nor a tail."""
        if not request.was_scheduled:
            require(not told.offered, f"{request.request_id} never ran, and chunks of it were offered")
        if request.status is not Status.FINISHED_STOPPED:
            return
        shape = self.engine.shape
        written = max(request.num_prompt_tokens, request.num_tokens - 1)
        limit = self.engine.store_limit(request)
        full = min(written if limit is None else min(limit, written), written) // shape.tokens_per_chunk
        for group, window in enumerate(shape.windows):
            suffix = group.to_bytes(4, "big")
            keys = [
                request.block_hashes[(chunk + 1) * shape.blocks_per_chunk - 1] + suffix
                for chunk in range(request.num_tokens // shape.tokens_per_chunk)
            ]
            beyond = [place for place, key in enumerate(keys) if key in told.offered and place >= full]
            require(
                not beyond, f"{request.request_id}: chunks {beyond} of group {group} offered, {full} are written"
            )
            missing = [place for place, key in enumerate(keys[:full]) if key not in told.covered]
            voided = self.engine.adapter._jobs._void
            if not (window or told.refused or voided):
                require(
                    not missing,
                    f"{request.request_id}: of {full} chunks of group {group}, {missing} were not offered",
                )


class Watch:
    """Checks slots as chunks come up in them, and all tiers at rest."""

    def __init__(self, engine: SimulatedEngine, stack: SimulatedStack, content: Content) -> None:
        self._engine, self._stack, self._content = engine, stack, content
        self._weights: dict[int, int] = {}
        stack.on_submit = self._submitted
        stack.on_write = self._written

    def check_new(self) -> None:
        """What has come up in the host pool holds what it should."""
        for event in self._engine.adapter.take_events():
            if event.tier != "host" or event.removed:
                continue
            for key in event.keys:
                self._check_slot(key)

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

    def check_rest(self, begun: int) -> None:
        """Nothing is left of any request."""
        manager, adapter = self._stack.manager, self._engine.adapter
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
