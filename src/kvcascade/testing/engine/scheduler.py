"""The scheduler: continuous batching, chunked prefill, preemption, drafts, steps planned ahead.

It makes the decisions that vLLM's `Scheduler` and `AsyncScheduler` make, and calls a connector where they do; the
recordings of those two prove it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .allocator import Block, Blocks, BlockTables
from .connector import EngineConnector
from .outputs import ModelOutput, NewRequest, StepPlan
from .requests import SimRequest, Status
from .shape import EngineShape

__all__ = ["EngineScheduler"]


@dataclass(slots=True)
class _Draft:
    """A step while it is being planned."""

    budget: int
    running: list[SimRequest] = field(default_factory=list)
    admitted: list[tuple[SimRequest, Status]] = field(default_factory=list)
    new_blocks: dict[str, list[list[Block]]] = field(default_factory=dict)
    scheduled: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    preempted: bool = False
    prefills: bool = False


class EngineScheduler:
    """Requests in, plans out, results back in.

    Args:
        hold_back: how many hashes of a request's full blocks are to come late, asked whenever it has new tokens.
    """

    def __init__(
        self, shape: EngineShape, connector: EngineConnector, hold_back: Callable[[], int] = lambda: 0
    ) -> None:
        self.shape = shape
        self.connector = connector
        self.tables = BlockTables(shape)
        self.requests: dict[str, SimRequest] = {}
        self.running: list[SimRequest] = []
        self.waiting: deque[SimRequest] = deque()
        self.holding: deque[SimRequest] = deque()
        """Requests that wait, and have blocks; they come before the others."""
        self._hold_back = hold_back
        self._planned = self._processed = 0
        self._deferred: deque[tuple[int, list[Block]]] = deque()
        """Blocks that a step in flight may still write to, and that step."""
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self.received: set[str] = set()
        """Requests whose load has ended, and that have not been considered since."""
        self._failed: set[str] = set()
        self._prefilling: set[SimRequest] = set()

    # Requests come and go

    def add(self, request: SimRequest) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.connector.on_new_request(request)

    def abort(self, req_id: str) -> None:
        """A client has gone. Nothing happens where the request is not there, or over."""
        request = self.requests.get(req_id)
        if request is None or request.is_finished():
            return
        for queue in (self.running, self.waiting, self.holding):
            if request in queue:
                queue.remove(request)
        loading = request.status is Status.LOADING and req_id not in self.received
        self.received.discard(req_id)
        self._failed.discard(req_id)
        request.status = Status.FINISHED_ABORTED
        self._end(request, keep_blocks=loading)

    @property
    def has_requests(self) -> bool:
        """Whether there is a reason for another step."""
        return bool(self.requests) or bool(self._finished) or self.connector.has_pending_push_work()

    def knows(self, req_id: str) -> bool:
        """Whether a request of this name is there, or has finished since the last step."""
        return req_id in self.requests or req_id in self._finished

    def reset(self, preempt: bool, connector: bool = True) -> bool | None:
        """Empties the prefix cache, and the connector's. False where blocks are in use; the connector's is
        emptied all the same. None where `preempt` could not free them: then nothing was."""
        while preempt and self.running:
            self._preempt(self.running.pop(), drop_stale=True)
        done = self.tables.pool.reset()
        if preempt and not done:
            return None
        return (not connector or self.connector.reset_cache() is not False) and done

    # A step is planned

    def schedule(self) -> StepPlan:
        """The next step. Its connector metadata are in it."""
        draft = _Draft(self.shape.budget)
        self._schedule_running(draft)
        if not draft.preempted:
            self._schedule_waiting(draft)
        plan = self._plan(draft)
        plan.kv_connector_metadata = self.connector.build_connector_meta(plan)
        if draft.scheduled:
            self._planned += 1
            plan.step = self._planned
        self._advance(plan)
        return plan

    def _schedule_running(self, draft: _Draft) -> None:
        place = 0
        while place < len(self.running) and draft.budget > 0:
            request = self.running[place]
            new = self._wanted(request, draft)
            if new <= 0:
                place += 1
                continue
            added = self._make_room(request, new, draft)
            if added is None:
                break
            place += 1
            draft.running.append(request)
            draft.prefills |= request.is_prefill_chunk
            self._take(draft, request, new, added)
            if request.drafts:
                verified = request.num_computed_tokens - request.num_tokens - request.num_output_placeholders
                self._schedule_drafts(draft, request, min(request.drafts, new + verified))

    def _wanted(self, request: SimRequest, draft: _Draft) -> int:
        """Tokens that a running request gets in this step."""
        placeholders = request.num_output_placeholders
        limit = request.num_prompt_tokens + request.max_tokens
        if placeholders and request.num_computed_tokens + 2 - placeholders >= limit:
            return 0  # the steps in flight reach its end, even if all drafts are rejected
        new = request.num_tokens + request.drafts + placeholders - request.num_computed_tokens
        return min(new, draft.budget, self.shape.max_tokens - request.num_computed_tokens - 1)

    def _make_room(self, request: SimRequest, new: int, draft: _Draft) -> list[list[Block]] | None:
        """Blocks for a running request, if need be from the last ones to run. None where that does not help."""
        while True:
            added = self.tables.allocate(request, new, lookahead=self.shape.drafts)
            if added is not None:
                self.tables.cache(request, min(request.num_computed_tokens + new, request.num_tokens))
                return added
            victim = self.running[-1]
            if not self._may_free(victim):
                return None
            self.running.pop()
            self._preempt(victim, drop_stale=False)
            draft.preempted = True
            if victim is request:
                return None

    @staticmethod
    def _take(draft: _Draft, request: SimRequest, new: int, added: list[list[Block]]) -> None:
        draft.budget -= new
        draft.scheduled[request.request_id] = new
        draft.new_blocks[request.request_id] = added

    @staticmethod
    def _schedule_drafts(draft: _Draft, request: SimRequest, count: int) -> None:
        if count > 0:
            draft.drafts[request.request_id] = [-1] * count
        request.drafts = 0

    def _schedule_waiting(self, draft: _Draft) -> None:
        skipped: dict[bool, list[SimRequest]] = {True: [], False: []}
        while draft.budget > 0 and (self.holding or self.waiting) and len(self.running) < self.shape.seqs:
            queue = self.holding or self.waiting
            verdict = self._consider(queue[0], draft)
            if verdict is None:
                break
            request = queue.popleft()
            if verdict:
                self.running.append(request)
            else:
                skipped[request.holds_blocks].append(request)
        self.holding.extendleft(reversed(skipped[True]))
        self.waiting.extendleft(reversed(skipped[False]))

    def _consider(self, request: SimRequest, draft: _Draft) -> bool | None:
        """Whether a waiting request runs in this step; None where it has no room, so that nobody behind it has."""
        if request.status is Status.LOADING and not self._end_load(request):
            return False
        if request.num_stale_tokens and not request.drop_stale:
            return False
        hit: list[list[Block]] = []
        local = external = 0
        load = False
        if request.num_computed_tokens == 0:
            hit, local = self.tables.find_hit(request)
            answer, load = self.connector.get_num_new_matched_tokens(request, local)
            if answer is None:
                return False
            external = answer
        if load:
            return False if self._start_load(request, hit, local, external) else None
        return self._admit(request, draft, hit, local)

    def _admit(self, request: SimRequest, draft: _Draft, hit: list[list[Block]], local: int) -> bool | None:
        computed = request.num_computed_tokens + local
        new = request.num_tokens - computed
        padded = bool(self.shape.drafts) and new == 1 and not draft.prefills and bool(draft.running or computed)
        if padded and computed + self.shape.drafts + 2 <= self.shape.max_tokens:
            new += self.shape.drafts
            if new > draft.budget:
                return None
        else:
            padded = False
        new = min(new, draft.budget)
        if self.tables.allocate(request, new, hit, local, 0, self.shape.drafts, whole=True) is None:
            return None
        self.tables.cache(request, min(computed + new, request.num_tokens))
        blocks = self.tables.blocks(request.request_id)
        self.connector.update_state_after_alloc(request, blocks, 0)
        draft.admitted.append((request, request.status))
        self._take(draft, request, new, [list(group) for group in blocks.blocks])
        if padded:
            self._schedule_drafts(draft, request, self.shape.drafts)
        request.status = Status.RUNNING
        request.num_computed_tokens = computed
        if computed + new < request.num_tokens:
            self._prefilling.add(request)
        return True

    def _start_load(self, request: SimRequest, hit: list[list[Block]], local: int, external: int) -> bool:
        lookahead_blocks = -(-(1 + 2 * self.shape.drafts) // self.shape.tokens_per_block)
        reserved = sum(map(self._remaining, self._prefilling))
        reserved += lookahead_blocks * len(self.shape.windows) if self.shape.drafts else 0
        if self.tables.allocate(request, 0, hit, local, external, reserved=reserved, whole=True) is None:
            return False
        blocks = self.tables.blocks(request.request_id)
        self.connector.update_state_after_alloc(request, blocks, external)
        request.status = Status.LOADING
        request.num_computed_tokens = local + external
        self._prefilling.add(request)
        return True

    def _remaining(self, request: SimRequest) -> int:
        """Blocks that a request which is being filled will still need."""
        extra = 1 + 2 * self.shape.drafts if self.shape.drafts else 0
        return self.tables.missing(request, request.num_tokens + extra)

    def _end_load(self, request: SimRequest) -> bool:
        """Takes note of a load that has ended, well or not. False where it has not."""
        if request.request_id not in self.received:
            return False
        self.received.remove(request.request_id)
        failed = request.request_id in self._failed
        self._failed.discard(request.request_id)
        if failed and not request.num_computed_tokens:
            self.tables.free(request.request_id)
        else:
            self.tables.cache(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True

    def _preempt(self, request: SimRequest, drop_stale: bool) -> None:
        self._free_blocks(request)
        self._prefilling.discard(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = request.num_output_placeholders = request.drafts = 0
        request.drop_stale = drop_stale or (request.drop_stale and request.num_stale_tokens > 0)
        request.num_stale_tokens = request.num_in_flight_tokens
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self._preempted.add(request.request_id)

    def _plan(self, draft: _Draft) -> StepPlan:
        plan = StepPlan(
            self._planned,
            num_scheduled_tokens=draft.scheduled,
            scheduled_spec_decode_tokens=draft.drafts,
            preempted_req_ids=self._preempted,
            finished_req_ids=self._finished,
        )
        self._finished, self._preempted = set(), set()
        cached = plan.scheduled_cached_reqs
        resumed = [request for request, before in draft.admitted if before is Status.PREEMPTED]
        plan.tokens = {request.request_id: list(request.all_token_ids) for request, _ in draft.admitted}
        for request, before in draft.admitted:
            if before is Status.WAITING:
                ids = Blocks(draft.new_blocks[request.request_id]).get_block_ids()
                plan.scheduled_new_reqs.append(
                    NewRequest(request.request_id, request.prompt_token_ids, ids, request.num_computed_tokens)
                )
        cached.resumed_req_ids = {request.request_id for request in resumed}
        for request in (*draft.running, *resumed):
            ids = Blocks(draft.new_blocks[request.request_id]).get_block_ids()
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(ids if any(ids) else None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.num_output_tokens.append(request.num_output_tokens)
        return plan

    def _advance(self, plan: StepPlan) -> None:
        """The step counts as done from here on; what it turns out otherwise is taken back with its results."""
        for req_id, count in plan.num_scheduled_tokens.items():
            request = self.requests[req_id]
            plan.starts[req_id] = request.num_computed_tokens
            plan.tables[req_id] = self.tables.blocks(req_id).get_block_ids()
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            request.last_step = self._planned
            request.was_scheduled = True
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )
            plan.samples[req_id] = not request.is_prefill_chunk
            if request.is_prefill_chunk:
                continue
            self._prefilling.discard(request)
            if self.shape.asynchronous:
                request.num_output_placeholders += 1 + len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
                request.drafts = self.shape.drafts

    # Its results come in

    def update(self, plan: StepPlan, output: ModelOutput) -> None:
        """Takes the results of the oldest step that is in flight."""
        if plan.num_scheduled_tokens:
            self._processed += 1
            while self._deferred and self._deferred[0][0] <= self._processed:
                self.tables.pool.release(self._deferred.popleft()[1])
        result = output.kv_connector_output
        self._fail_loads(result.failed_recving, result.invalid_block_ids)
        for req_id, count in plan.num_scheduled_tokens.items():
            self._update_request(plan, req_id, count, output.sampled.get(req_id, []))
        for load in self.connector.update_connector_output(result):
            self._end_load_at(self.requests[load.req_id], load.valid_tokens, load.ok)
        for req_id in sorted(result.finished_recving):
            self._end_receive(self.requests[req_id])

    def _update_request(self, plan: StepPlan, req_id: str, count: int, sampled: list[int]) -> None:
        request = self.requests.get(req_id)
        if request is None:
            return
        request.num_in_flight_tokens -= count
        stale = request.num_stale_tokens > 0
        request.num_stale_tokens -= count if stale else 0
        if request.is_finished() or (stale and request.drop_stale):
            return
        drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
        if drafts and sampled and not stale:
            rejected = drafts - (len(sampled) - 1)
            request.num_computed_tokens -= rejected if request.num_computed_tokens else 0
            request.num_output_placeholders -= rejected if request.num_output_placeholders else 0
        self._append(request, sampled, stale)

    def _append(self, request: SimRequest, sampled: Sequence[int], stale: bool) -> None:
        stopped = False
        for token in sampled:
            stopped = request.append(token)
            if self.shape.asynchronous and not stale:
                request.num_output_placeholders -= 1
            if stopped:
                break
        request.update_block_hashes(self._hold_back())
        if self.shape.asynchronous and sampled and request.status is Status.RUNNING:
            self.tables.cache(request, request.num_computed_tokens - request.num_output_placeholders)
        if not stopped:
            if sampled and not self.shape.asynchronous and not request.is_prefill_chunk:
                request.drafts = self.shape.drafts
            return
        for queue in (self.running, self.waiting, self.holding):
            if request in queue:
                queue.remove(request)
        request.status = Status.FINISHED_STOPPED
        self._end(request)

    def _end_receive(self, request: SimRequest) -> None:
        """The connector has done with the blocks that it was to fill."""
        if request.is_finished():
            del self.requests[request.request_id]
            self._free_blocks(request)
        else:
            self.received.add(request.request_id)

    def _end_load_at(self, request: SimRequest, valid_tokens: int, ok: bool) -> None:
        if not ok and not request.is_finished():
            request.num_computed_tokens = valid_tokens
            self._failed.add(request.request_id)
        self._end_receive(request)

    def _fail_loads(self, req_ids: set[str], block_ids: set[int]) -> None:
        """Some blocks were not filled: what depends on them is computed again."""
        for request in self.holding:
            if request.status is not Status.LOADING:
                continue
            if request.request_id in req_ids:
                request.num_computed_tokens = 0
                self._failed.add(request.request_id)
            (table, *_) = self.tables.blocks(request.request_id).blocks
            for place, block in enumerate(table[: -(-request.num_computed_tokens // self.shape.tokens_per_block)]):
                if block.block_id in block_ids:
                    request.num_computed_tokens = place * self.shape.tokens_per_block
                    self._failed.add(request.request_id)
                    break

    # Blocks become free

    def _end(self, request: SimRequest, keep_blocks: bool = False) -> None:
        self._prefilling.discard(request)
        request.update_block_hashes()
        self.tables.release_skipped(request, max(0, request.num_computed_tokens - request.num_in_flight_tokens))
        valid = -(-request.num_computed_tokens // self.shape.tokens_per_block)
        ids = tuple(group[:valid] for group in self.tables.blocks(request.request_id).get_block_ids())
        keep_blocks |= self.connector.request_finished(request, ids)
        self._finished.add(request.request_id)
        if not keep_blocks:
            del self.requests[request.request_id]
            self._free_blocks(request)

    def _may_free(self, request: SimRequest) -> bool:
        """Whether no step in flight may still write to the request's blocks."""
        return not self.shape.asynchronous or request.last_step <= self._processed

    def _free_blocks(self, request: SimRequest) -> None:
        if self._may_free(request):
            self.tables.free(request.request_id)
        else:
            self._deferred.append((self._planned, self.tables.pop(request.request_id)))
