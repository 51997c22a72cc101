"""`SchedulerAdapter`: decides what to look up, load and store. The half that lives in the engine's scheduler."""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Literal

from kvcascade.errors import ConfigError, ProtocolError
from kvcascade.manager import ResetReport
from kvcascade.types import Key, RequestContext

from .coverage import hit_unit
from .fences import Fences
from .groups import GroupSpec, check_groups
from .jobs import Job, JobTable
from .lookup import Lookup
from .plans import StorePlan, plan_load, plan_store
from .protocols import Blocks, Manager, Request, StepOutput
from .requests import RequestState
from .stats import AdapterStats
from .steps import check_step, follow_blocks
from .transfers import ConnectorMetadata, Direction, EndedLoad, Transfer, WorkerReport

__all__ = ["SchedulerAdapter"]


class SchedulerAdapter:
    """Drives a manager on behalf of a paged-attention engine. Names and meanings are those of the scheduler's side
    of vLLM's `KVConnectorBase_V1`; all calls come from the engine's scheduler thread.

    In each step, in this order: any number of `on_new_request`, `request_finished`, `get_num_new_matched_tokens`
    and `update_state_after_alloc`; then once `build_connector_meta`, whose result goes to every worker. What the
    workers report goes into `update_connector_output`, between any two of these calls; in which step, and whether
    all workers in the same one, does not matter.

    Raises:
        ProtocolError: the engine broke this protocol; the text says what was expected.
    """

    def __init__(
        self,
        manager: Manager,
        groups: Sequence[GroupSpec],
        *,
        tokens_per_hash: int | None = None,
        workers: int = 1,
        prompt_only: bool = False,
        share_loads: bool = True,
        context: Callable[[Request], RequestContext] | None = None,
    ) -> None:
        """Args:
            groups: the engine's KV cache groups that are offloaded.
            tokens_per_hash: of the requests' `block_hashes`; by default the smallest `tokens_per_block`.
            workers: how many report each job.
            prompt_only: whether only chunks of prompts are stored.
            share_loads: whether a request waits while another loads a chunk that it needs, to find it in the
                engine's own prefix cache afterwards; False for an engine without one.
            context: makes what the manager is told of a request; by default a `RequestContext` of its id and its
                `kv_transfer_params`.

        Raises:
            ConfigError: groups or numbers that can't be.
        """
        if workers < 1:
            raise ConfigError(f"workers: {workers}; at least 1")
        self._manager = manager
        self._groups = tuple(groups)
        self._tokens_per_hash = check_groups(groups, tokens_per_hash)
        self._prompt_only = prompt_only
        self._share_loads = share_loads
        self._context = context or _context
        self._unit = hit_unit(groups)
        self._lookup = Lookup(manager, groups)
        self._jobs = JobTable(workers)
        self._fences = Fences()
        self._running: dict[str, RequestState] = {}
        self._finishing: dict[str, RequestState] = {}
        """Finished, but the step that lists them as such has not come: their last chunks have not been offered."""
        self._finalised: set[str] = set()
        """Finished and over already, before the step that lists them; the names may be in use again."""
        self._planning = False
        """A step is under way: the engine has allocated blocks in it, and it has not been planned to the end."""
        self._loads: list[Transfer] = []
        """Loads begun in the step being planned."""
        self._found: list[RequestState] = []
        """Requests that were told in it what can be loaded for them."""
        self._stats = AdapterStats()

    # Requests

    def on_new_request(self, request: Request) -> None:
        """A request has come. Its object is read until it is finished.

        `max_load_tokens` and `max_offload_tokens` in its `kv_transfer_params` bound what is loaded and stored;
        values that are no integer of at least 0 are ignored, with one warning.
        """
        name = request.request_id
        if name in self._running or name in self._finishing:
            raise ProtocolError(f"on_new_request: {name!r} is in use, until the step that lists it as finished")
        context = self._context(request)
        self._manager.on_new_request(context)
        self._running[name] = RequestState(
            request, context, self._groups, self._tokens_per_hash, self._prompt_only
        )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded after the `num_computed_tokens` that the engine has itself, and whether
        that happens asynchronously (always, if there are any).

        None means not known yet: ask again in a later step. So it is while the request still has jobs of its own
        in flight, while a chunk of its prefix is on its way up, and while another request loads one. May be asked
        again at any time before `update_state_after_alloc`, which belongs to the same step: a hit holds to its end
        only, and in a later step must be asked for again. All tokens of the request may be there: the engine
        computes the last one again, to sample. An engine's own hit that ends inside a block gets nothing on top.
        """
        state = self._state(request.request_id, "get_num_new_matched_tokens")
        state.drop_blocks()
        state.matched = 0
        if state.jobs:
            return self._not_yet()
        state.local = num_computed_tokens
        state.take_keys()
        if getattr(request, "skip_reading_prefix_cache", False) or self._inside_block(num_computed_tokens):
            return 0, False
        boundary = self._lookup.boundary(state)
        if boundary is None or (self._share_loads and self._jobs.loading(state.needed_keys(boundary))):
            return self._not_yet()
        state.matched = boundary - state.local
        self._found.append(state)
        return state.matched, state.matched > 0

    def update_state_after_alloc(self, request: Request, blocks: Blocks, num_external_tokens: int) -> None:
        """The engine has allocated `blocks`, all the request's blocks for its own hit and for
        `num_external_tokens` more (at most what the last answer was; 0: nothing is loaded). The request is not
        scheduled until `update_connector_output` names it. With sliding windows fewer tokens than were found need
        other chunks; where those are not there the load ends with nothing loaded."""
        state = self._state(request.request_id, "update_state_after_alloc")
        self._planning = True
        if num_external_tokens == 0:
            return
        if not 0 < num_external_tokens <= state.matched or state.jobs:
            raise ProtocolError(
                f"update_state_after_alloc: {num_external_tokens} tokens to load for {state.id!r}; at most "
                f"{state.matched} were found"
            )
        plan = plan_load(state, blocks, state.local + num_external_tokens)
        if num_external_tokens < state.matched and not self._lookup.there(plan.keys, state):
            plan = plan.given_up()
        state.matched = 0
        slots = self._manager.prepare_load(plan.keys, state.context)
        job = self._jobs.open(state, Direction.LOAD, plan.keys, plan.copies(slots), plan)
        self._stats.loads += 1
        self._fences.hand_out(job.blocks)
        self._fences.guard(job.id, job.blocks)
        self._loads.append(job.transfer)
        for group in state.groups:
            group.skip_loaded(state.local, plan.tokens)

    def chunks_loading(self, request: Request) -> tuple[int, list[tuple[int, int, Key]]]:
        """What is being loaded for this request: the token where that starts, and of each chunk its first token,
        the token after its last one, and its key."""
        state = self._state(request.request_id, "chunks_loading")
        return state.local, self._jobs.ranges_of(state)

    def request_finished(self, request: Request) -> bool:
        """The request has ended, in whatever way; its blocks have not been freed. They may be now, and given to
        others from the next step on, but where the answer is True: then after the `EndedLoad` that names it."""
        state = self._running.pop(request.request_id, None)
        if state is None:
            if request.request_id in self._finishing:
                raise ProtocolError(f"request_finished: {request.request_id!r} has finished already")
            context = self._context(request)
            self._manager.on_new_request(context)
            self._manager.on_request_finished(context)
            self._finalised.add(request.request_id)
            return False
        self._finishing[state.id] = state
        return self._jobs.load_of(state)

    # Steps

    def build_connector_meta(self, step: StepOutput) -> ConnectorMetadata:
        """The step is planned: what workers are to load, store and flush. Called in every step, also one that runs
        nothing, before `num_computed_tokens` of the requests is moved on.

        The last chunks of requests that have finished are offered here, before anybody can write their blocks.
        """
        check_step(step, self._groups, self._running, self._finishing, self._finalised, self._jobs)
        self._planning = True
        follow_blocks(step, self._running, self._finishing, self._fences)
        stores = [self._store(state, 0) for state in self._finished_in(step)]
        stores += [self._store(self._running[name], count) for name, count in step.num_scheduled_tokens.items()]
        for state in self._finished_in(step):
            del self._finishing[state.id]
            self._manager.on_request_finished(state.context)
        self._manager.on_schedule_end()
        self._finalised.clear()
        self._planning = False
        for state in self._found:
            state.matched = 0  # a hit holds to the end of its step
        self._found.clear()
        loads, self._loads = self._loads, []
        flush = self._fences.end_step()
        self._stats.flushed += len(flush)
        return ConnectorMetadata(loads, [job.transfer for job in stores if job], flush)

    def update_connector_output(self, report: WorkerReport) -> list[EndedLoad]:
        """Workers have ended jobs. Returns the loads that have ended on all of them.

        Raises:
            ProtocolError: of such a report nothing is applied.
        """
        self._jobs.check(report)
        loads = []
        for number, count in report.ended.items():
            job = self._jobs.report(number, count, report.failed.get(number, ()))
            if job is None:
                continue
            self._fences.release(job.id, job.blocks)
            if job.direction is Direction.STORE:
                self._stored(job)
            else:
                loads.append(self._loaded(job))
        return loads

    def distrust_stores(self) -> None:
        """Blocks have turned out not to hold what the engine took for computed: somebody else was to fill them,
        and steps have computed with them. Nobody knows which other blocks are wrong by that: no store in flight
        counts, the requests that there are store nothing more, and none of their blocks is stored for anybody (it
        may be in the engine's prefix cache) before it is written anew. To be called before
        `update_connector_output` has the reports of the step in which it turned out."""
        self._fences.distrust(self._jobs.fail_stores())
        for state in (*self._running.values(), *self._finishing.values()):
            self._fences.distrust(block for group in state.groups for block in group.blocks)
            state.max_store = 0

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping, even with nothing to run."""
        return bool(self._jobs or self._finishing) or self._manager.has_pending_work()

    def take_events(self) -> Sequence[Any]:
        """The manager's events since the last call."""
        return self._manager.take_events()

    def get_stats(self) -> AdapterStats:
        """The manager's counters and the adapter's own."""
        stats = copy(self._stats)
        stats.late_reports = self._jobs.late_reports
        stats.manager = self._manager.get_stats()
        return stats

    @property
    def requests_known(self) -> int:
        """Requests of which something is kept."""
        return len(self._running) + len(self._finishing)

    @property
    def jobs_known(self) -> int:
        """Jobs that some worker has not reported."""
        return len(self._jobs)

    # These wait

    def reset_cache(
        self, scope: Literal["all", "primary"] | None = None, weights_version: str = "", timeout: float = 10.0
    ) -> ResetReport:
        """Voids what is cached; between two steps. Requests go on: what they store is offered again from their
        first chunk, what they were loading comes back as not loaded."""
        if self._planning:
            raise ProtocolError("reset_cache: in the middle of a step; build_connector_meta must come before")
        self._fences.reset(self._jobs.in_flight)
        for state in self._finishing.values():
            self._manager.on_request_finished(state.context)
        self._finalised |= self._finishing.keys()
        self._finishing.clear()
        report = self._manager.reset_cache(scope, weights_version, timeout)
        self._jobs.reset()
        for state in self._running.values():
            state.reset()
        return report

    def shutdown(self, timeout: float = 10.0) -> None:
        """Shuts the manager down. The workers must have been before."""
        self._manager.shutdown(timeout)

    # Within a step

    def _state(self, name: str, call: str) -> RequestState:
        state = self._running.get(name)
        if state is None:
            raise ProtocolError(
                f"{call}: request {name!r} is not running; on_new_request must come before, request_finished after"
            )
        return state

    def _not_yet(self) -> tuple[None, bool]:
        self._stats.deferred += 1
        return None, False

    def _inside_block(self, tokens: int) -> bool:
        return any(tokens % group.tokens_per_block for group in self._groups)

    def _finished_in(self, step: StepOutput) -> list[RequestState]:
        return [self._finishing[name] for name in step.finished_req_ids or () if name in self._finishing]

    # Jobs

    def _store(self, state: RequestState, scheduled: int) -> Job | None:
        """Offers what can be stored of a request after this step; returns the job of what was granted."""
        state.take_keys()
        plan = plan_store(state, scheduled, self._unit, self._jobs.voided, self._fences.distrusted)
        offer = self._manager.prepare_store(list(plan.wanted), state.context) if plan.wanted else None
        if plan.wanted and offer is None:
            self._refused(state, len(plan.wanted))
            return None
        job = None
        if offer is not None:
            refused = getattr(offer, "refused", ())
            if refused:
                self._refused(state, len(refused))
                plan.stop_at(refused)
            job = self._open_store(state, plan, offer) if offer.keys else None
        for group, end in zip(state.groups, plan.ends, strict=True):
            group.cursor = max(group.cursor, end)
        return job

    def _open_store(self, state: RequestState, plan: StorePlan, offer: Any) -> Job:
        job = self._jobs.open(state, Direction.STORE, offer.keys, plan.copies(offer, state.groups))
        self._fences.guard(job.id, job.blocks, freed=state.request.is_finished())
        self._stats.stores += 1
        return job

    def _refused(self, state: RequestState, chunks: int) -> None:
        self._stats.refused_offers += 1
        if state.request.is_finished():
            self._stats.lost_chunks += chunks

    def _stored(self, job: Job) -> None:
        copied, failed = job.keys_by_success()
        self._stats.failed_stores += len(failed)
        if copied:
            self._manager.complete_store(copied, job.owner.context)
        if failed:
            self._manager.complete_store(failed, job.owner.context, success=False)

    def _loaded(self, job: Job) -> EndedLoad:
        copied, failed = job.keys_by_success()
        self._stats.failed_loads += len(failed)
        if copied:
            self._manager.complete_load(copied, job.owner.context)
        if failed:
            self._manager.complete_load(failed, job.owner.context, success=False)
        return self._ended(job)

    def _ended(self, job: Job) -> EndedLoad:
        """What a load has left: of one from before a reset nothing is valid. The request loads no more than that
        from now on: the same might happen for ever, and vLLM's scheduler, which goes on counting the blocks of a
        load that has left nothing, might never have room for another one."""
        if self._jobs.is_void(job):
            job.failed = set(range(len(job.chunks)))
        valid = job.valid_tokens()
        if job.incomplete:
            job.owner.load_limit = valid
        failed = tuple(job.keys[place] for place in sorted(job.failed))
        return EndedLoad(job.owner.id, valid, job.failed_blocks(len(self._groups)), failed)


def _context(request: Request) -> RequestContext:
    return RequestContext(request.request_id, getattr(request, "kv_transfer_params", None))
