"""`SchedulerAdapter`: decides what to look up, load and store. The half that lives in the engine's scheduler."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from kvcascade.manager import ResetReport
from kvcascade.types import RequestContext

from .groups import GroupSpec
from .protocols import Blocks, Manager, Request, StepOutput
from .transfers import ConnectorMetadata, EndedLoad, WorkerReport

__all__ = ["SchedulerAdapter"]


class SchedulerAdapter:
    """Drives a manager on behalf of a paged-attention engine. Names and meanings are those of the scheduler's side
    of vLLM's `KVConnectorBase_V1`; all calls come from the engine's scheduler thread.

    In each step, in this order: any number of `on_new_request`, `request_finished`, `get_num_new_matched_tokens`
    and `update_state_after_alloc`; then once `build_connector_meta`, whose result goes to every worker. What the
    workers report goes into `update_connector_output`, between any two of these calls but not between an
    `update_state_after_alloc` and the `build_connector_meta` after it; in which step, and whether all workers in
    the same one, does not matter.

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
            share_loads: whether a request waits while another loads a chunk that it needs, to find it in the engine's
                own prefix cache afterwards; False for an engine without one.
            context: makes what the manager is told of a request; by default a `RequestContext` of its id.

        Raises:
            ConfigError: groups or numbers that can't be.
        """
        raise NotImplementedError

    def on_new_request(self, request: Request) -> None:
        """A request has come. Its object is read until it is finished.

        `max_load_tokens` and `max_offload_tokens` in its `kv_transfer_params` bound what is loaded and stored; values
        that are no integer of at least 0 are ignored, with one warning.
        """
        raise NotImplementedError

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded after the `num_computed_tokens` that the engine has itself, and whether that
        happens asynchronously (always, if there are any).

        None means not known yet: ask again in a later step. So it is while the request still has jobs of its own in
        flight, while a chunk of its prefix is on its way up, and while another request loads one. May be asked again
        at any time before `update_state_after_alloc`. All tokens of the request may be there: the engine computes
        the last one again, to sample.
        """
        raise NotImplementedError

    def update_state_after_alloc(self, request: Request, blocks: Blocks, num_external_tokens: int) -> None:
        """The engine has allocated `blocks`, all the request's blocks for its own hit and for `num_external_tokens`
        more (at most what the last answer was; 0: nothing is loaded). The request is not scheduled until
        `update_connector_output` names it."""
        raise NotImplementedError

    def build_connector_meta(self, step: StepOutput) -> ConnectorMetadata:
        """The step is planned: what workers are to load, store and flush. Called in every step, also one that runs
        nothing, before `num_computed_tokens` of the requests is moved on."""
        raise NotImplementedError

    def update_connector_output(self, report: WorkerReport) -> list[EndedLoad]:
        """Workers have ended jobs. Returns the loads that have ended on all of them."""
        raise NotImplementedError

    def request_finished(self, request: Request) -> bool:
        """The request has ended, in whatever way; its blocks have not been freed. They may be now, and given to
        others from the next step on, but where the answer is True: then after the `EndedLoad` that names it."""
        raise NotImplementedError

    def reset_cache(
        self, scope: Literal["all", "primary"] | None = None, weights_version: str = "", timeout: float = 10.0
    ) -> ResetReport:
        """Voids what is cached; between two steps. Requests go on: what they store is offered again from their first
        chunk, what they were loading comes back as not loaded."""
        raise NotImplementedError

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping, even with nothing to run."""
        raise NotImplementedError

    def take_events(self) -> Sequence[Any]:
        """The manager's events since the last call."""
        raise NotImplementedError

    def get_stats(self) -> Any:
        """The manager's counters and the adapter's own."""
        raise NotImplementedError

    def shutdown(self, timeout: float = 10.0) -> None:
        """Shuts the manager down. The workers must have been before."""
        raise NotImplementedError
