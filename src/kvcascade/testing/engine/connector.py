"""What the scheduler calls: the scheduler's side of vLLM's `KVConnectorBase_V1`, and the adapter behind it."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from kvcascade.connector import EndedLoad, SchedulerAdapter
from kvcascade.manager import ResetReport

from .allocator import Blocks
from .outputs import ConnectorOutput, StepPlan
from .requests import SimRequest

__all__ = ["AdapterConnector", "EngineConnector"]


class EngineConnector(Protocol):
    """Called where vLLM's schedulers call their connector, in the same order."""

    def on_new_request(self, request: SimRequest) -> None: ...

    def get_num_new_matched_tokens(
        self, request: SimRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]: ...

    def update_state_after_alloc(self, request: SimRequest, blocks: Blocks, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, plan: StepPlan) -> Any: ...

    def update_connector_output(self, output: ConnectorOutput) -> Sequence[EndedLoad]:
        """Returns loads that have ended, beside those that `output` itself names."""
        ...

    def request_finished(self, request: SimRequest, block_ids: tuple[list[int], ...]) -> bool:
        """Returns whether the blocks must be kept until a load has ended."""
        ...

    def reset_cache(self) -> bool | None: ...

    def has_pending_push_work(self) -> bool: ...


class AdapterConnector:
    """A `SchedulerAdapter` as the scheduler's connector."""

    def __init__(self, adapter: SchedulerAdapter) -> None:
        self.adapter = adapter
        self.scope: Literal["all", "primary"] = "all"
        """What a reset voids."""
        self.last_reset: ResetReport | None = None
        self.on_new_request = adapter.on_new_request
        self.get_num_new_matched_tokens = adapter.get_num_new_matched_tokens
        self.update_state_after_alloc = adapter.update_state_after_alloc
        self.build_connector_meta = adapter.build_connector_meta
        self.has_pending_push_work = adapter.has_pending_work

    def update_connector_output(self, output: ConnectorOutput) -> Sequence[EndedLoad]:
        return self.adapter.update_connector_output(output.kv_connector_worker_meta)

    def request_finished(self, request: SimRequest, block_ids: tuple[list[int], ...]) -> bool:
        return self.adapter.request_finished(request)

    def reset_cache(self) -> bool:
        self.last_reset = self.adapter.reset_cache(self.scope, timeout=0.0)
        return self.last_reset.ok
