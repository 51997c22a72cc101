"""Our scheduler adapter where vLLM's own tests expect vLLM's scheduler: a pytest plugin for running those tests.

    pytest -p kvcascade.testing.vllm.hosted tests/v1/kv_connector/unit/offloading_connector/test_scheduler.py

in vLLM's source distribution. It drives whatever `OffloadingManager` a test brings, and gives the worker's side
what vLLM's would. Of vLLM's attributes only those are there that the tests' runner reads or sets.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace as Object
from typing import Any

from kvcascade.connector.protocols import NO_BLOCK
from kvcascade.connector.scheduler import SchedulerAdapter
from kvcascade.connector.transfers import Direction, Transfer, WorkerReport
from kvcascade.connector.vllm import compat
from kvcascade.connector.vllm.cache_groups import check_served, groups_of
from kvcascade.connector.vllm.hits import hits_by_source
from kvcascade.manager import ResetReport
from kvcascade.types import Key, LookupResult, PrefixMatch, RequestContext, StoreOffer

__all__ = ["HostedScheduler", "pytest_configure"]


def pytest_configure(config: Any) -> None:
    """Puts it in place, before a test module imports what it replaces."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    for module in (scheduler, offloading_connector):
        vars(module)["OffloadingConnectorScheduler"] = HostedScheduler


class HostedScheduler:
    """The scheduler's side of vLLM's OffloadingConnector, by our adapter."""

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import SchedulerOffloadConfig

        self.manager = spec.get_manager()
        self.config = SchedulerOffloadConfig.from_spec(spec, vllm_config, kv_cache_config)
        check_served(kv_cache_config)
        self._maximal_prefix_lookup: Any = None
        """What a test puts here says how many leading keys are hits."""
        self._verbs = _Verbs(self)
        self._events_tracker = compat.EventsTracker(spec.kv_events_config)
        described = Object(groups=spec.config.groups, cache=Object(blocks_per_chunk=spec.blocks_per_chunk))
        self.adapter = SchedulerAdapter(
            self._verbs,
            groups_of(kv_cache_config, described),
            tokens_per_hash=spec.tokens_per_hash,
            workers=vllm_config.parallel_config.world_size,
            prompt_only=spec.offload_prompt_only,
            context=compat.request_context,
        )

    @property
    def _jobs(self) -> dict[int, Any]:
        table = self.adapter._jobs
        return {
            number: Object(
                req_id=job.owner.id,
                keys=set(job.keys),
                is_store=job.direction is Direction.STORE,
                pending_count=job.left,
            )
            for number, job in (table._live | table._void).items()
        }

    def on_new_request(self, request: Any) -> None:
        self.adapter.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        return self.adapter.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.adapter.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        if not num_external_tokens:
            return {}
        start, chunks = self.adapter.chunks_loading(request)
        context = compat.request_context(request)
        sources = [(first, last, self.manager.get_load_source(key, context)) for first, last, key in chunks]
        return hits_by_source(sources, start, start + num_external_tokens)

    def build_connector_meta(self, step: Any) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata

        self._verbs.step = step
        plan = self.adapter.build_connector_meta(step)
        loads, stores = self._verbs.take_granted()
        return OffloadingConnectorMetadata(
            load_jobs={one.job: self._job(one, spec) for one, spec in zip(plan.loads, loads, strict=True)},
            store_jobs={one.job: self._job(one, spec) for one, spec in zip(plan.stores, stores, strict=True)},
            jobs_to_flush=plan.flush or None,
        )

    def update_connector_output(self, connector_output: Any) -> None:
        told = connector_output.kv_connector_worker_meta
        if told is not None:
            self.adapter.update_connector_output(WorkerReport(dict(told.completed_jobs)))

    def request_finished(self, request: Any) -> tuple[bool, None]:
        self.adapter.request_finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self.adapter.has_pending_work()

    def take_events(self) -> Iterable[Any]:
        yield from self._events_tracker.take_events(self.manager.take_events())

    def get_stats(self) -> Any:
        return self.manager.get_stats()

    def reset_cache(self) -> None:
        self.adapter.reset_cache()
        self._events_tracker.reset()

    def shutdown(self) -> None:
        self.adapter.shutdown()

    def _job(self, transfer: Transfer, spec: Any) -> Any:
        """A job in vLLM's form: the blocks of each group together, and the chunks in that order."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob

        table = self.adapter._jobs
        keys = (table._live.get(transfer.job) or table._void[transfer.job]).keys
        places = sorted(range(len(keys)), key=lambda place: transfer.chunks[place].group)
        spec.offload_keys = [keys[place] for place in places]
        groups = range(len(self.config.kv_group_configs))
        chunks = {
            group: [transfer.chunks[p] for p in places if transfer.chunks[p].group == group] for group in groups
        }
        blocks = {
            group: [block for chunk in chunks[group] for block in chunk.blocks if block != NO_BLOCK]
            for group in groups
        }
        device = compat.GPULoadStoreSpec(
            [block for group in groups for block in blocks[group]],
            group_sizes=[len(blocks[group]) for group in groups],
            block_indices=[chunks[group][0].first if chunks[group] else 0 for group in groups],
        )
        store = transfer.direction is Direction.STORE
        return TransferJob(transfer.req_id, *((device, spec) if store else (spec, device)))


class _Verbs:
    """A manager of vLLM's kind as the adapter drives it. Where chunks lie it alone knows: in place of slots are
    numbers that nobody reads."""

    def __init__(self, hosted: HostedScheduler) -> None:
        self._hosted = hosted
        self._manager = hosted.manager
        self._loads: list[Any] = []
        self._stores: list[Any] = []
        self.step: Any = None

    def take_granted(self) -> tuple[list[Any], list[Any]]:
        granted = self._loads, self._stores
        self._loads, self._stores = [], []
        return granted

    def lookup(self, key: Key, ctx: RequestContext) -> LookupResult:
        return LookupResult[self._manager.lookup(key, ctx).name]

    def match_prefix(self, keys: Sequence[Key], ctx: RequestContext) -> PrefixMatch:
        if self._hosted._maximal_prefix_lookup:
            hits = self._hosted._maximal_prefix_lookup(keys, ctx)
            return PrefixMatch(hits or 0, hits is None)
        hits, pending = 0, False
        for key in keys:
            answer = self.lookup(key, ctx)
            if answer is LookupResult.MISS:
                break
            pending = pending or answer is not LookupResult.HIT
            hits += not pending
        return PrefixMatch(hits, pending)

    def prepare_load(self, keys: Sequence[Key], ctx: RequestContext) -> Sequence[int]:
        self._loads.append(self._manager.prepare_load(keys, ctx))
        return range(len(keys))

    def complete_load(self, keys: Sequence[Key], ctx: RequestContext, success: bool = True) -> None:
        self._manager.complete_load(set(keys), ctx)

    def prepare_store(self, keys: Sequence[Key], ctx: RequestContext) -> StoreOffer | None:
        output = self._manager.prepare_store(keys, ctx)
        if output is None:
            return None
        granted = list(output.keys_to_store)
        if granted:
            self._stores.append(output.store_spec)
        return StoreOffer(granted, list(range(len(granted))), list(output.evicted_keys))

    def complete_store(self, keys: Sequence[Key], ctx: RequestContext, success: bool = True) -> None:
        self._manager.complete_store(set(keys), ctx, success)

    def on_schedule_end(self) -> None:
        new = [request.req_id for request in self.step.scheduled_new_reqs]
        self._manager.on_schedule_end(
            compat.ScheduleEndContext(new_req_ids=new, preempted_req_ids=self.step.preempted_req_ids or ())
        )

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work() is True

    def reset_cache(self, *_: Any) -> ResetReport:
        self._manager.reset_cache()
        return ResetReport((), (), {}, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
