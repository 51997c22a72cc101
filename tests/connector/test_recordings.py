"""The real adapter over a real manager hears what vLLM's schedulers call on a connector.

What a recording lacks of a request (its hashes, blocks' contents, computed tokens in each step) comes from the
simulated scheduler, which plays the scenario: it must make the recorded calls, and the adapter hears all of them.
"""

import json
import runpy
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcascade.configs import parse_stack
from kvcascade.connector import EndedLoad, GroupSpec, SchedulerAdapter, Transfer, WorkerReport
from kvcascade.manager import SecondaryTierManager
from kvcascade.stack import build
from kvcascade.testing.engine.allocator import Blocks
from kvcascade.testing.engine.outputs import ConnectorOutput, StepPlan
from kvcascade.testing.engine.requests import SimRequest, Status
from kvcascade.types import Key, LookupResult, Namespace, PrefixMatch, RequestContext

TESTS = Path(__file__).parents[1]
RECORDINGS = sorted((TESTS / "fixtures" / "vllm").glob("*.json"))
Run = runpy.run_path(str(TESTS / "testing" / "engine" / "test_recordings.py"))["Run"]
CHUNK_BYTES = 4096
SLOTS = 600  # more than any recording writes: nothing is evicted


class ScriptedManager:
    """A real manager that finds no more than the recording's connector did."""

    def __init__(self, inner: SecondaryTierManager) -> None:
        self.inner = inner
        self.readable: set[Key] = set()
        self.undecided = False
        self.begun: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.offered: dict[str, set[Key]] = defaultdict(set)
        self.slots: dict[int, Key] = {}
        """What the slots hold that were given out."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def on_new_request(self, ctx: RequestContext) -> Any:
        self.begun[ctx.req_id] += 1
        return self.inner.on_new_request(ctx)

    def on_request_finished(self, ctx: RequestContext) -> None:
        self.ended[ctx.req_id] += 1
        self.inner.on_request_finished(ctx)

    def prepare_store(self, keys: Sequence[Key], ctx: RequestContext) -> Any:
        self.offered[ctx.req_id].update(keys)
        offer = self.inner.prepare_store(keys, ctx)
        if offer is not None:
            self.slots.update(zip(offer.slots, offer.keys, strict=True))
        return offer

    def prepare_load(self, keys: Sequence[Key], ctx: RequestContext) -> Sequence[int]:
        slots = self.inner.prepare_load(keys, ctx)
        self.slots.update(zip(slots, keys, strict=True))
        return slots

    def match_prefix(self, keys: Sequence[Key], ctx: RequestContext) -> PrefixMatch:
        if self.undecided:
            return PrefixMatch(0, True)
        readable = next((at for at, key in enumerate(keys) if key not in self.readable), len(keys))
        return self.inner.match_prefix(keys[:readable], ctx)

    def lookup(self, key: Key, ctx: RequestContext) -> LookupResult:
        if self.undecided:
            return LookupResult.RETRY
        return self.inner.lookup(key, ctx) if key in self.readable else LookupResult.MISS

    def seed(self, keys: Sequence[Key]) -> None:
        """Somebody has stored these."""
        self.readable = set(keys)
        ctx = RequestContext("somebody else")
        self.inner.on_new_request(ctx)
        offer = self.inner.prepare_store(keys, ctx)
        assert offer is not None
        self.inner.complete_store(offer.keys, ctx)
        self.inner.on_request_finished(ctx)

    def hits(self, keys: Sequence[Key]) -> int:
        """How many leading keys it has, when all that is on its way has come."""
        ctx = RequestContext("probe")
        self.inner.on_new_request(ctx)
        for _ in range(2000):
            match = self.inner.match_prefix(keys, ctx)
            if not match.pending:
                break
            self.inner.on_schedule_end()
            threading.Event().wait(0.001)
        self.inner.on_request_finished(ctx)
        return match.hits


class Driver:
    """The recording's connector, and a real adapter that hears every call of it."""

    def __init__(self, recorder: Any, groups: Sequence[GroupSpec], manager: ScriptedManager) -> None:
        self.recorder = recorder
        self.groups = groups
        self.manager = manager
        # The recorded connector did not know of other requests' loads.
        self.adapter = SchedulerAdapter(manager, groups, share_loads=False)
        self.requests: dict[str, SimRequest] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.planned: list[Transfer] = []
        self.running: list[Transfer] = []
        self.loads: dict[str, Transfer] = {}
        self.void: set[str] = set()
        """Requests whose load a reset has voided: the recorded connector knew of no such thing."""
        self.local: dict[str, int] = {}
        """Request -> tokens that the engine had itself when it asked last."""
        self.declined: set[str] = set()
        """Requests whose load the adapter does not want, since it would be less than a chunk, or the one before
        has left nothing."""
        self.brought: set[str] = set()
        """Those that the recorded connector loads for, without the adapter."""
        self.spoilt: set[str] = set()
        """Requests of which a load behind a window has failed: they load nothing any more."""
        self.valid: dict[str, int] = {}
        """Request whose load has ended -> how many tokens the adapter says it has."""
        self.written: dict[str, list[list[Key]]] = {}
        """Finished request -> for each group, the keys of the chunks that it has in its blocks."""
        self.most: dict[str, int] = defaultdict(int)
        """Request -> the most tokens that it had in its blocks."""
        self.allowed: dict[str, set[Key]] = {}
        """Finished request -> keys of the chunks that it had in its blocks once."""
        self.over = False
        """The recording is over: the scheduler steps on until nothing is pending."""

    def on_new_request(self, request: SimRequest) -> None:
        self.recorder.on_new_request(request)
        self.requests[request.request_id] = request
        self.adapter.on_new_request(request)

    def get_num_new_matched_tokens(self, request: SimRequest, local: int) -> tuple[int | None, bool]:
        assert self.valid.pop(request.request_id, 0) == 0
        answer, asynchronous = self.recorder.get_num_new_matched_tokens(request, local)
        self.local[request.request_id] = local
        self.end_stores()
        self.manager.undecided = answer is None
        self.manager.seed([key for keys in self.keys(request, local, local + (answer or 0)) for key in keys])
        found = self.adapter.get_num_new_matched_tokens(request, local)
        if answer is None:
            assert found in ((None, False), (0, False))  # at once, where less than a chunk is left
        else:
            self.declined.discard(request.request_id)
            wanted = answer - self.left_to_compute(request, local + answer)
            if answer and (wanted < self.groups[0].tokens_per_chunk or request.request_id in self.spoilt):
                self.declined.add(request.request_id)
                wanted, asynchronous = 0, False
            assert found == (wanted, asynchronous)
        return answer, bool(answer)

    def update_state_after_alloc(self, request: SimRequest, blocks: Blocks, external: int) -> None:
        valid = self.valid.pop(request.request_id, None)
        if valid is not None:  # of a prompt that was loaded whole the last token is computed again
            assert request.num_computed_tokens == min(valid, request.num_tokens - 1)
        self.recorder.update_state_after_alloc(request, blocks, external)
        self.tables[request.request_id] = [list(ids) for ids in blocks.get_block_ids()]
        loaded = external - self.left_to_compute(request, self.local[request.request_id] + external)
        if external and request.request_id in self.declined:
            self.brought.add(request.request_id)
            loaded = 0
        self.adapter.update_state_after_alloc(request, blocks, loaded)

    def build_connector_meta(self, plan: StepPlan) -> None:
        self.recorder.build_connector_meta(plan)
        for name, count in plan.num_scheduled_tokens.items():
            request = self.requests[name]
            written = min(request.num_computed_tokens + count, request.num_tokens)
            self.most[name] = max(self.most[name], written)
        self.follow_blocks(plan)
        meta = self.adapter.build_connector_meta(plan)
        self.check_blocks(meta.loads + meta.stores)
        self.loads.update({load.req_id: load for load in meta.loads})
        self.planned += meta.stores

    def update_connector_output(self, output: ConnectorOutput) -> list[EndedLoad]:
        """Stores of the steps before the last one have ended by now."""
        self.recorder.update_connector_output(output)
        report = WorkerReport()
        for store in self.running:
            report.add(store.job)
        self.running, self.planned = self.planned, []
        by_others = output.finished_recving & self.brought
        self.brought -= by_others
        for name in output.finished_recving - by_others:
            load = self.loads.pop(name)
            bad = name in output.failed_recving
            report.add(
                load.job,
                [
                    at
                    for at, chunk in enumerate(load.chunks)
                    if bad or output.invalid_block_ids & set(chunk.blocks)
                ],
            )
        ended = self.adapter.update_connector_output(report)
        assert {load.req_id for load in ended} == output.finished_recving - by_others
        self.spoilt |= {load.req_id for load in ended if not load.ok and not load.valid_tokens}
        self.valid.update({load.req_id: load.valid_tokens for load in ended if load.req_id not in self.void})
        self.void -= output.finished_recving
        return []

    def request_finished(self, request: SimRequest, block_ids: tuple[list[int], ...]) -> bool:
        self.recorder.request_finished(request, block_ids)
        loading = self.adapter.request_finished(request)
        assert loading == (request.request_id in self.loads)
        aborted = request.status is Status.FINISHED_ABORTED
        tokens = min(request.num_computed_tokens, request.num_tokens) if aborted else request.num_tokens - 1
        # What a load was to bring, it may not have brought.
        self.written[request.request_id] = self.keys(request, 0, 0 if loading else tokens)
        once = self.keys(request, 0, max(tokens, self.most[request.request_id]))
        self.allowed[request.request_id] = {key for keys in once for key in keys}
        return False

    def reset_cache(self) -> bool:
        self.recorder.reset_cache()
        assert self.adapter.reset_cache("all", timeout=10.0).ok
        self.written.clear()
        self.void.update(self.loads)
        return True

    def has_pending_push_work(self) -> bool:
        return self.over and self.adapter.has_pending_work()

    # Within

    def left_to_compute(self, request: SimRequest, tokens: int) -> int:
        """Of so many tokens the adapter leaves the last one of a prompt out where a window is behind it: the
        engine computes it again, and it needs its own window. The recorded connector knew of no windows."""
        return int(tokens == request.num_tokens and any(group.window is not None for group in self.groups))

    def follow_blocks(self, plan: StepPlan) -> None:
        cached = plan.scheduled_cached_reqs
        for new in plan.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            had = [[] for _ in self.groups] if name in cached.resumed_req_ids else self.tables[name]
            self.tables[name] = [a + list(b) for a, b in zip(had, added, strict=True)] if added else had

    def check_blocks(self, transfers: Sequence[Transfer]) -> None:
        """Each chunk is copied from or to the request's own block of these tokens."""
        for transfer in transfers:
            request = self.requests[transfer.req_id]
            for group, slot, _, blocks in transfer.chunks:
                at = request.block_hashes.index(self.manager.slots[slot][:-4])
                assert list(blocks) == [self.tables[transfer.req_id][group][at]]

    def keys(self, request: SimRequest, start: int, end: int) -> list[list[Key]]:
        """For each group, the keys of the full chunks in these tokens."""
        size = self.groups[0].tokens_per_chunk
        hashes = request.block_hashes[start // size : end // size]
        return [[digest + group.index.to_bytes(4, "big") for digest in hashes] for group in self.groups]

    def end_stores(self) -> None:
        """All stores end, so that the answer is the one that the recording needs."""
        report = WorkerReport()
        for store in self.running + self.planned:
            report.add(store.job)
        self.running, self.planned = [], []
        assert self.adapter.update_connector_output(report) == []

    def drain(self, run: Any) -> None:
        """All requests end, and the scheduler steps until nothing is pending."""
        self.over = True
        for name in list(run.scheduler.requests):
            run.abort(name)
        for _ in range(2000):
            if not run.scheduler.has_requests:
                return
            for name in [*self.loads, *self.brought]:
                run.loaded(name, None)
            run.step()
            threading.Event().wait(0.001)
        raise AssertionError("pending work does not end")


@pytest.fixture
def manager() -> Iterator[ScriptedManager]:
    tiers = [
        {"type": "host", "capacity": SLOTS * CHUNK_BYTES},
        {"type": "memory", "name": "below", "capacity": SLOTS * CHUNK_BYTES, "queue": 1.0},
    ]
    settings = parse_stack({"version": 1, "log_every": "0s", "tiers": tiers})
    with build(settings, Namespace.of(model="recordings"), CHUNK_BYTES) as real:
        yield ScriptedManager(real)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_adapter_follows_the_recorded_calls(path: Path, manager: ScriptedManager) -> None:
    recording = json.loads(path.read_text())
    run = Run(recording)
    groups = [
        GroupSpec(run.shape.tokens_per_block, window=window or None, index=index)
        for index, window in enumerate(run.shape.windows)
    ]
    driver = run.scheduler.connector = Driver(run.connector, groups, manager)

    assert list(run.play()) == recording["calls"]
    driver.drain(run)

    assert manager.begun == manager.ended == dict.fromkeys(manager.begun, 1)
    assert (driver.adapter.requests_known, driver.adapter.jobs_known) == (0, 0)
    assert not driver.adapter.has_pending_work()
    assert (manager.inner.requests_known, manager.inner.get_stats().pinned_slots) == (0, 0)
    for name, allowed in driver.allowed.items():
        assert manager.offered[name] <= allowed, name
    for name, written in driver.written.items():
        for group, keys in zip(groups, written, strict=True):
            if group.window is None:
                assert manager.hits(keys) == len(keys), name
