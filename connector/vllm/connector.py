"""The second way in: a connector of our own.

--kv-transfer-config '{"kv_connector": "KVCascadeConnector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"stack": "stack.yaml"}}'
"""

import copy
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from kvcascade.connector.groups import GroupSpec
from kvcascade.connector.transfers import ConnectorMetadata, WorkerReport

from . import compat, plugin
from .cache_groups import check_served, groups_of
from .scheduler_side import LostLoad, SchedulerSide
from .spec import KVCascadeSpec
from .worker_side import WorkerSide

__all__ = ["KVCascadeConnector", "StepPlan", "StepReport"]

logger = logging.getLogger("kvcascade")


class StepPlan(compat.ConnectorMetadata):
    """What the workers are to do in a step."""

    def __init__(self, plan: ConnectorMetadata, lost: Sequence[LostLoad] = ()) -> None:
        self.plan = plan
        self.lost = lost
        """Loads of earlier steps that vLLM is to be told of as failed."""


class StepReport(compat.WorkerMetadata):
    """What one worker has ended, or several; vLLM puts them together."""

    def __init__(self, report: WorkerReport) -> None:
        self.report = report

    def aggregate(self, other: "StepReport") -> "StepReport":
        return StepReport(WorkerReport().merge(self.report).merge(other.report))


class KVCascadeConnector(compat.KVConnectorBase, compat.SupportsHMA):
    """One in vLLM's scheduler, one in each of its workers. The namespace is that of the other way in, so both find
    each other's chunks.

    Raises:
        ConfigError: the stack can't be used, or not with this engine or model.
    """

    scheduler: SchedulerSide
    """In the scheduler only."""
    worker: WorkerSide
    """In a worker only."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_served(kv_cache_config)
        spec = KVCascadeSpec(compat.offloading_config(vllm_config, kv_cache_config))
        groups = groups_of(kv_cache_config, spec.config)
        self._spec = spec
        if self._in_scheduler:
            _warn_of_policy(vllm_config.kv_transfer_config)
            self.scheduler = SchedulerSide(
                spec.open_stack(),
                groups,
                spec.places,
                spec.kv_events_config,
                tokens_per_hash=spec.tokens_per_hash,
                workers=spec.config.parallel.world_size,
                prompt_only=spec.offload_prompt_only,
                by_block=_told_by_block(spec, groups),
            )
        else:
            self.worker = WorkerSide(spec, _told_by_block(spec, groups))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        """The bytes of a block together, layer by layer."""
        return "LBHNC"

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may lose what it is given."""
        return False

    # In the workers, in the order of a step

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        caches = compat.canonical_caches(self._spec, self._vllm_config, self._kv_cache_config, kv_caches)
        self.worker.register(caches)

    def handle_preemptions(self, kv_connector_metadata: StepPlan) -> None:
        self.worker.before_forward(kv_connector_metadata.plan, kv_connector_metadata.lost)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """After the forward pass: all loads are asynchronous."""
        self.worker.start_loads(self._get_connector_metadata().plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No load is waited for by a layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Chunks are stored as a whole."""

    def wait_for_save(self) -> None:
        self.worker.note_stores(self._get_connector_metadata().plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self.worker.take_results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        report = self.worker.take_report()
        return StepReport(report) if report else None

    # In the scheduler

    def on_new_request(self, request: Any) -> None:
        self.scheduler.adapter.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.adapter.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.adapter.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        return self.scheduler.hits_by_source(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return StepPlan(self.scheduler.adapter.build_connector_meta(scheduler_output), self.scheduler.take_lost())

    def update_connector_output(self, connector_output: Any) -> None:
        self.scheduler.hear_of(connector_output.invalid_block_ids)
        told = connector_output.kv_connector_worker_meta
        if told is None:
            return
        lost = self.scheduler.take_report(told.report)
        if lost and connector_output.finished_recving:
            connector_output.finished_recving -= lost

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """vLLM itself keeps the blocks of a request that is loading; nothing else has to be kept."""
        self.scheduler.adapter.request_finished(request)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return self.request_finished(request, [])

    def has_pending_push_work(self) -> bool:
        return self.scheduler.has_pending_work()

    def take_events(self) -> Iterable[Any]:
        return self.scheduler.take_events()

    def reset_cache(self) -> bool:
        return self.scheduler.reset_cache()

    # In both

    def get_kv_connector_stats(self) -> Any:
        return self.scheduler.get_stats() if self._in_scheduler else self.worker.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return compat.ConnectorStats() if data is None else compat.ConnectorStats(data=data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, *args: Any, **more: Any) -> Any:
        """vLLM's own, which takes our definitions by the name of our spec."""
        plugin.register()
        named = copy.copy(vllm_config)
        named.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
        extra = {**named.kv_transfer_config.kv_connector_extra_config, "spec_name": plugin.SPEC}
        named.kv_transfer_config.kv_connector_extra_config = extra
        return compat.PromMetrics(named, *args, **more)

    def shutdown(self) -> None:
        side = self.scheduler if self._in_scheduler else self.worker
        side.shutdown()

    @property
    def _in_scheduler(self) -> bool:
        return bool(self.role is compat.KVConnectorRole.SCHEDULER)


def _told_by_block(spec: KVCascadeSpec, groups: Sequence[GroupSpec]) -> bool:
    """Whether vLLM can be told which blocks were not loaded: with several groups it can't, behind a sliding window
    it has let go of what is before them, and with context parallelism it counts a block's tokens otherwise."""
    parallel = spec.config.parallel
    plain = len(groups) == 1 and groups[0].window is None
    return plain and parallel.pcp_size == parallel.dcp_size == 1


def _warn_of_policy(transfer: Any) -> None:
    if transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            'kv_load_failure_policy is %r: a request whose chunks can\'t be loaded fails; with "recompute" in '
            "--kv-transfer-config its tokens are computed instead",
            transfer.kv_load_failure_policy,
        )
