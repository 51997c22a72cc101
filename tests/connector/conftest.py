"""A bench for the connector: the real adapter, manager and workers, and an engine that does what a test scripts.

Device memory holds real bytes: what a token's KV is follows from all tokens up to it, so that a wrong, stale,
crossed or unwritten slot shows as soon as it is stored under a key or loaded.
"""

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcascade.configs import parse_stack
from kvcascade.connector import (
    NO_BLOCK,
    ChunkCopy,
    ConnectorMetadata,
    EndedLoad,
    GroupLayout,
    GroupSpec,
    SchedulerAdapter,
    Transfer,
    TransferWorker,
    WorkerReport,
)
from kvcascade.connector.copies import HostCopier, Piece, rows
from kvcascade.connector.transfers import Direction
from kvcascade.manager import SecondaryTierManager
from kvcascade.stack import build
from kvcascade.testing import GateTier, ManualClock
from kvcascade.tiers.host import HostPool
from kvcascade.types import Key, LookupResult, Namespace, RequestContext, StoreOffer

CELL = 8  # bytes of one token in one tensor
BLOCKS = 64
HANG = 30.0
DRAFT = b"\xdd" * CELL
UNWRITTEN = 0xAA
NEEDS_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def cell(tokens: Sequence[int], tensor: int, rank: int) -> bytes:
    """The KV of the last of these tokens."""
    return sha256(repr((list(tokens), tensor, rank)).encode()).digest()[:CELL]


class Request:
    """A request as the engine keeps it."""

    def __init__(self, name: str, prompt: Sequence[int], tokens_per_hash: int, **params: Any) -> None:
        self.request_id = name
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.num_computed_tokens = 0
        self.kv_transfer_params = params or None
        self.status = SimpleNamespace(name="WAITING")
        self.late = 0
        """How many of its newest hashes have not arrived."""
        self.tables: list[list[int]] = []
        self.seen = False
        self.resumed = False
        self._size = tokens_per_hash

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(self._size, len(self.tokens) + 1, self._size)
        hashes = [sha256(repr(self.tokens[:end]).encode()).digest() for end in ends]
        return hashes[: len(hashes) - self.late]

    def is_finished(self) -> bool:
        return self.status.name.startswith("FINISHED")

    def say(self, *tokens: int) -> None:
        """The model has generated these."""
        self.tokens += tokens


class Recorder:
    """The real manager; records the verbs, and refuses what the test says."""

    def __init__(self, inner: SecondaryTierManager) -> None:
        self.inner = inner
        self.log: list[tuple[str, Any]] = []
        self.refuse_all = 0
        """So many offers are refused altogether."""
        self.refuse: set[Key] = set()
        """Refused the next time that they are offered."""

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.inner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            subject = arguments[0] if arguments else None
            self.log.append((name, getattr(subject, "req_id", subject)))
            return verb(*arguments, **named)

        return call

    def prepare_store(self, keys: Sequence[Key], ctx: RequestContext) -> Any:
        self.log.append(("prepare_store", list(keys)))
        if self.refuse_all:
            self.refuse_all -= 1
            return None
        refused = [key for key in keys if key in self.refuse]
        self.refuse -= set(refused)
        offer = self.inner.prepare_store([key for key in keys if key not in refused], ctx)
        if not refused or offer is None:
            return offer
        return SimpleNamespace(keys=offer.keys, slots=offer.slots, evicted=offer.evicted, refused=refused)

    def verbs(self, *names: str) -> list[tuple[str, Any]]:
        """The calls of these verbs so far, in order."""
        return [entry for entry in self.log if entry[0] in names]


class KeyByKey:
    """A manager without `match_prefix`."""

    def __init__(self, inner: Recorder) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "match_prefix":
            raise AttributeError(name)
        return getattr(self._inner, name)


class GatedCopier(HostCopier):
    """Copies that the test holds back or makes fail."""

    def __init__(self, tensors: Sequence[torch.Tensor], pool: Any) -> None:
        super().__init__(tensors, pool)
        self.gate = threading.Event()
        self.gate.set()
        self.copied: list[Piece] = []
        self.fail: Callable[[Piece, Direction], bool] = lambda piece, direction: False

    def copy(self, piece: Piece, direction: Direction) -> None:
        assert self.gate.wait(HANG), "a copy was held for ever"
        if self.fail(piece, direction):
            raise OSError("the device said no")
        self.copied.append(piece)
        super().copy(piece, direction)


@dataclass
class Run:
    """What one request does in one step."""

    request: Request
    tokens: int
    blocks: list[list[int]] = field(default_factory=list)
    start: int = 0


class Bench:
    """Adapter, manager, workers, and the steps of an engine.

    Attributes:
        meta: what the last step gave to the workers.
        ended: the loads that have ended, in order.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        slots: int = 40,
        workers: int = 1,
        tiers: int = 0,
        batch: bool = True,
        **options: Any,
    ) -> None:
        self.groups = list(groups)
        self.tokens_per_hash = options.get("tokens_per_hash") or min(group.tokens_per_block for group in groups)
        layouts = [
            GroupLayout(group.blocks_per_chunk, (2 * place, 2 * place + 1)) for place, group in enumerate(groups)
        ]
        self.memory = [self._device(groups) for _ in range(workers)]
        part = TransferWorker.part_bytes(self.memory[0], layouts)
        self.clock = ManualClock()
        self.gates: list[GateTier] = []
        self.real = self._manager(slots, part * workers, tiers)
        self.manager = Recorder(self.real)
        driven = self.manager if batch else KeyByKey(self.manager)
        self.adapter = SchedulerAdapter(driven, groups, workers=workers, **options)  # type: ignore[arg-type]
        self.copiers = [GatedCopier([rows(t) for t in memory], self.real.pool) for memory in self.memory]
        self.workers = [
            TransferWorker(memory, layouts, self.real.pool, offset=rank * part, copier=self.copiers[rank])
            for rank, memory in enumerate(self.memory)
        ]
        self.part = part
        self.meta = ConnectorMetadata()
        self.ended: list[EndedLoad] = []
        self.requests: dict[str, Request] = {}
        self._finished: set[str] = set()

    # The engine's side

    def request(self, name: str, prompt: int | Sequence[int], **params: Any) -> Request:
        """A new request; `prompt` tokens of the common prompt, or these tokens."""
        tokens = range(prompt) if isinstance(prompt, int) else prompt
        request = self.requests[name] = Request(name, tokens, self.tokens_per_hash, **params)
        self.adapter.on_new_request(request)
        return request

    def query(self, request: Request, local: int = 0) -> int | None:
        """How many tokens can be loaded."""
        found, asynchronous = self.adapter.get_num_new_matched_tokens(request, local)
        assert asynchronous == bool(found)
        return found

    def load(self, request: Request, blocks: Any, tokens: int, cached: int = 0, held: Sequence[int] = ()) -> None:
        """Allocates these blocks for a load of `tokens`. The engine has the content of the first `cached` of each
        group, and of those at the places `held`."""
        tables = self._tables(blocks)
        request.tables = [list(table) for table in tables]
        given = [
            [
                SimpleNamespace(
                    block_id=block,
                    is_null=block == NO_BLOCK,
                    block_hash=b"h" if at < cached or at in held else None,
                )
                for at, block in enumerate(table)
            ]
            for table in tables
        ]
        local = request.num_computed_tokens
        allocated: Any = SimpleNamespace(blocks=given)
        self.adapter.update_state_after_alloc(request, allocated, tokens)
        request.num_computed_tokens = local + tokens

    def serve(self, request: Request, blocks: Any, local: int = 0) -> int:
        """Loads what there is, and returns how much that was; every loaded byte is compared."""
        found = self.query(request, local)
        assert found is not None
        if found:
            request.num_computed_tokens = local
            self.load(request, blocks, found)
            self.step()
            self.deliver()
            assert self.ended[-1] == EndedLoad(
                request.request_id, local + found, tuple(frozenset[int]() for _ in self.groups)
            )
            self.check_device(request, local, local + found)
        return found

    def step(self, *runs: Run, preempt: Sequence[Request] = ()) -> ConnectorMetadata:
        """One step: planned, and run by the workers."""
        self.plan(*runs, preempt=preempt)
        self.work(*runs)
        return self.meta

    def plan(self, *runs: Run, preempt: Sequence[Request] = ()) -> ConnectorMetadata:
        """The scheduler's half of a step."""
        for request in preempt:
            request.num_computed_tokens, request.tables, request.resumed = 0, [], True
        output = self._output(runs, preempt)
        self._finished = set()
        self.meta = pickle.loads(pickle.dumps(self.adapter.build_connector_meta(output)))
        for run in runs:
            run.start = run.request.num_computed_tokens
            run.request.num_computed_tokens += run.tokens
        return self.meta

    def work(self, *runs: Run) -> None:
        """The workers' half: copies before the step, its computation, copies after it."""
        for worker in self.workers:
            worker.handle_preemptions(self.meta)
            worker.start_load_kv(self.meta)
        for run in runs:
            self._compute(run)
        for worker in self.workers:
            worker.wait_for_save(self.meta)

    def finish(self, request: Request, how: str = "FINISHED_STOPPED") -> bool:
        """The request ends; the next step lists it. Returns whether its blocks must be kept."""
        request.status = SimpleNamespace(name=how)
        self._finished.add(request.request_id)
        del self.requests[request.request_id]
        return self.adapter.request_finished(request)

    def reports(self, *ranks: int) -> WorkerReport:
        """What these workers (all) have ended by the time that all they have started has."""
        report = WorkerReport()
        for rank in ranks or range(len(self.workers)):
            for ticket in self.workers[rank]._running.values():
                ticket.wait()
            report.merge(self.workers[rank].get_finished())
        return report

    def deliver(self, *ranks: int) -> list[EndedLoad]:
        """The adapter hears of what these workers (all) have done."""
        ended = self.adapter.update_connector_output(pickle.loads(pickle.dumps(self.reports(*ranks))))
        self.ended += ended
        return ended

    def drain(self) -> None:
        """Idle steps until nothing is pending."""
        for _ in range(2000):
            if not self.adapter.has_pending_work():
                return
            self.step()
            self.deliver()
            threading.Event().wait(0.001)
        raise AssertionError("pending work does not end")

    def run(self, request: Request, tokens: int, blocks: Any = None) -> Run:
        """`tokens` of a request are computed, in these blocks beside those that it has."""
        added = self._tables(blocks) if blocks else [[] for _ in self.groups]
        return Run(request, tokens, added)

    def prefill(self, name: str, prompt: int | Sequence[int], blocks: Any, **params: Any) -> Request:
        """A new request whose whole prompt is computed in one step."""
        request = self.request(name, prompt, **params)
        assert self.query(request) == 0
        self.step(self.run(request, request.num_tokens, blocks))
        return request

    # What came of it

    def keys(self, request: Request, group: int = 0) -> list[Key]:
        spec = self.groups[group]
        per_chunk = spec.tokens_per_chunk // self.tokens_per_hash
        hashes = request.block_hashes[per_chunk - 1 :: per_chunk]
        return [digest + spec.index.to_bytes(4, "big") for digest in hashes]

    def stored(self, request: Request, group: int = 0) -> list[int]:
        """Which chunks of the request are in primary; their bytes are compared."""
        ctx = RequestContext("probe")
        self.real.on_new_request(ctx)
        found = []
        for chunk, key in enumerate(self.keys(request, group)):
            if self.real.lookup(key, ctx) is LookupResult.HIT:
                found.append(chunk)
                self._check_slot(request, group, chunk, self.real.prepare_load([key], ctx)[0])
                self.real.complete_load([key], ctx)
        self.real.on_request_finished(ctx)
        return found

    def offered(self) -> list[Key]:
        return [key for _, keys in self.manager.verbs("prepare_store") for key in keys]

    def check_device(self, request: Request, start: int, end: int) -> None:
        """The request's blocks hold the KV of these tokens, wherever they are not `NO_BLOCK`."""
        for rank, memory in enumerate(self.memory):
            for number, spec in enumerate(self.groups):
                for token in range(start, end):
                    block = request.tables[number][token // spec.tokens_per_block]
                    for tensor in (2 * number, 2 * number + 1) if block else ():
                        held = memory[tensor][block, token % spec.tokens_per_block].numpy().tobytes()
                        assert held == cell(request.tokens[: token + 1], tensor, rank), (rank, number, token)

    def close(self) -> None:
        """All ends; nothing may be left over."""
        for copier in self.copiers:
            copier.gate.set()
        for request in list(self.requests.values()):
            self.finish(request, "FINISHED_ABORTED")
        self.drain()
        stats = self.real.get_stats()
        assert (self.adapter.requests_known, self.adapter.jobs_known) == (0, 0)
        assert len(self.adapter._fences) == 0 and not self.adapter._jobs._loading
        assert (self.real.requests_known, stats.pinned_slots) == (0, 0)
        assert stats.free_slots + stats.tiers[0].chunks == self.real.pool.slots

    def shutdown(self) -> None:
        for copier in self.copiers:
            copier.gate.set()
        for gate in self.gates:
            gate.open()
        for worker in self.workers:
            worker.shutdown()
        self.adapter.shutdown()

    # Within

    def _manager(self, slots: int, chunk_bytes: int, tiers: int) -> SecondaryTierManager:
        stride = -(-chunk_bytes // 4096) * 4096
        host = {"type": "host", "capacity": slots * stride + 4096}
        below = [
            {"type": "memory", "name": f"t{place}", "capacity": 1 << 22, "queue": 1.0} for place in range(tiers)
        ]
        settings = parse_stack({"version": 1, "log_every": "0s", "tiers": [host, *below]})
        manager = build(settings, Namespace.of(model="bench"), chunk_bytes, clock=self.clock, wrap=self._wrap)
        for slot in range(manager.pool.slots):
            manager.pool.slot(slot)[:] = bytes([UNWRITTEN]) * chunk_bytes
        return manager

    def _wrap(self, name: str, tier: Any) -> Any:
        gate = GateTier(tier)
        gate.open()
        self.gates.append(gate)
        return gate

    @staticmethod
    def _device(groups: Sequence[GroupSpec]) -> list[torch.Tensor]:
        return [
            torch.full((BLOCKS, group.tokens_per_block, CELL), UNWRITTEN, dtype=torch.uint8)
            for group in groups
            for _ in range(2)
        ]

    def _tables(self, blocks: Any) -> list[list[int]]:
        return [list(blocks)] if not blocks or isinstance(blocks[0], int) else [list(table) for table in blocks]

    def _output(self, runs: Sequence[Run], preempt: Sequence[Request]) -> Any:
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], resumed_req_ids=set(), new_block_ids=[], num_computed_tokens=[]
            ),
            num_scheduled_tokens={run.request.request_id: run.tokens for run in runs},
            finished_req_ids=self._finished,
            preempted_req_ids={request.request_id for request in preempt},
        )
        for run in runs:
            self._list(run, output)
        return output

    def _list(self, run: Run, output: Any) -> None:
        request, cached = run.request, output.scheduled_cached_reqs
        request.tables = request.tables or [[] for _ in self.groups]
        for table, blocks in zip(request.tables, run.blocks, strict=True):
            table += blocks
        by_index: list[list[int]] = [[] for _ in range(max(group.index for group in self.groups) + 1)]
        whole = not request.seen or request.resumed
        for group, blocks in zip(self.groups, request.tables if whole else run.blocks, strict=True):
            by_index[group.index] = list(blocks)
        if not request.seen:
            output.scheduled_new_reqs.append(
                SimpleNamespace(
                    req_id=request.request_id,
                    block_ids=tuple(by_index),
                    num_computed_tokens=request.num_computed_tokens,
                )
            )
            request.seen, request.resumed = True, False
            return
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(tuple(by_index) if whole or any(by_index) else None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        if request.resumed:
            cached.resumed_req_ids.add(request.request_id)
            request.resumed = False

    def _compute(self, run: Run) -> None:
        request = run.request
        for token in range(run.start, run.start + run.tokens):
            for rank, memory in enumerate(self.memory):
                for number, spec in enumerate(self.groups):
                    place = token // spec.tokens_per_block
                    block = request.tables[number][place] if place < len(request.tables[number]) else NO_BLOCK
                    for tensor in (2 * number, 2 * number + 1) if block else ():
                        known = token < request.num_tokens
                        value = cell(request.tokens[: token + 1], tensor, rank) if known else DRAFT
                        memory[tensor][block, token % spec.tokens_per_block] = torch.frombuffer(
                            bytearray(value), dtype=torch.uint8
                        )

    def _check_slot(self, request: Request, group: int, chunk: int, slot: int) -> None:
        """The bytes of a stored chunk, where a hit may read them, are right: of every rank, tensor and token."""
        spec, view = self.groups[group], bytes(self.real.pool.slot(slot))
        first = self.first_read(group, chunk)
        for rank in range(len(self.workers)):
            for layer in range(2):
                base = rank * self.part + layer * spec.tokens_per_chunk * CELL
                for at in range(first, spec.tokens_per_chunk):
                    token = chunk * spec.tokens_per_chunk + at
                    held = view[base + at * CELL : base + (at + 1) * CELL]
                    expected = cell(request.tokens[: token + 1], 2 * group + layer, rank)
                    assert held == expected, f"rank {rank} layer {layer} token {token} of chunk {chunk}"

    def first_read(self, group: int, chunk: int) -> int:
        """Token in the chunk from which on a hit may read it; tests of sliding windows replace it."""
        return 0


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Makes a bench; at the end of the test nothing may be left over."""
    made: list[Bench] = []

    def make(*groups: GroupSpec, **options: Any) -> Bench:
        made.append(Bench(groups or [GroupSpec(4)], **options))
        return made[-1]

    yield make
    try:
        for one in made:
            one.close()
    finally:
        for one in made:
            one.shutdown()


def offer_of(keys: Sequence[Key]) -> StoreOffer:
    return StoreOffer(list(keys), list(range(len(keys))), [])


# Workers alone


@pytest.fixture
def pool() -> Iterator[HostPool]:
    with HostPool(8, 4096) as made:
        for slot in range(8):
            made.slot(slot)[:] = b"\xaa" * 4096
        yield made


@pytest.fixture
def worker(pool: HostPool) -> Iterator[Callable[..., TransferWorker]]:
    made: list[TransferWorker] = []

    def make(tensors: list[torch.Tensor], groups: list[GroupLayout], **options: Any) -> TransferWorker:
        made.append(TransferWorker(tensors, groups, pool, **options))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def random(*shape: int, dtype: torch.dtype = torch.uint8, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 100, shape, generator=generator).to(dtype).to(device)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())


def transfer(job: int, direction: Direction, *chunks: ChunkCopy) -> Transfer:
    return Transfer(job, f"r{job}", direction, chunks)


def run(worker: TransferWorker, *transfers: Transfer) -> dict[int, set[int]]:
    """Runs these, stores first, and returns what failed of each."""
    stores = [one for one in transfers if one.direction is Direction.STORE]
    loads = [one for one in transfers if one.direction is Direction.LOAD]
    worker.wait_for_save(ConnectorMetadata(stores=stores))
    flush = {one.job for one in transfers}
    worker.handle_preemptions(ConnectorMetadata(flush=flush))
    worker.start_load_kv(ConnectorMetadata(loads=loads))
    worker.handle_preemptions(ConnectorMetadata(flush=flush))
    report = worker.get_finished()
    assert report.ended == {one.job: 1 for one in transfers}
    return report.failed
