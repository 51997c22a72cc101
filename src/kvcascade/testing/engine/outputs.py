"""What a step's plan and its results look like; the names are vLLM's."""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["CachedRequests", "ConnectorOutput", "ModelOutput", "NewRequest", "StepPlan"]


@dataclass(slots=True)
class NewRequest:
    """A request in its first step."""

    req_id: str
    prompt_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequests:
    """Requests that have run before. New block ids are appended, but where a request is resumed."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """vLLM's `SchedulerOutput`."""

    step: int
    """Its number among the steps that run the model; that of the last such step where it runs nothing."""
    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)
    finished_req_ids: set[str] = field(default_factory=set)
    starts: dict[str, int] = field(default_factory=dict)
    """Request -> tokens computed before this step, as far as the scheduler knows."""
    tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    """Request -> all its blocks."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Request that is new or resumed -> all its tokens."""
    samples: dict[str, bool] = field(default_factory=dict)
    """Request -> whether this step reaches its last token, so that the next one is sampled."""
    kv_connector_metadata: Any = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(slots=True)
class ConnectorOutput:
    """vLLM's `KVConnectorOutput`: what the workers' connectors say after a step."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    kv_connector_worker_meta: Any = None


@dataclass(slots=True)
class ModelOutput:
    """vLLM's `ModelRunnerOutput`."""

    sampled: dict[str, list[int]] = field(default_factory=dict)
    kv_connector_output: ConnectorOutput = field(default_factory=ConnectorOutput)
