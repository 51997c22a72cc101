"""What the adapter needs of an engine and of a manager. Names and meanings are vLLM's, so that its objects fit as
they are; an engine of another kind gives objects with these attributes, and inherits nothing."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from kvcascade.manager import ResetReport
from kvcascade.types import Key, LookupResult, RequestContext, StoreOffer

__all__ = [
    "NO_BLOCK",
    "Block",
    "Blocks",
    "CachedRequests",
    "Manager",
    "NewRequest",
    "Request",
    "Status",
    "StepOutput",
]

NO_BLOCK = 0
"""The id of the block that holds nothing: it stands where a sliding window has let a block go. Never copied."""


class Status(Protocol):
    """A member of the engine's enum of states.

    `FINISHED_STOPPED`, `FINISHED_LENGTH_CAPPED` and `FINISHED_REPETITION` are normal ends; any other finished
    state (`FINISHED_ABORTED`, `FINISHED_ERROR` ...) counts as an abort.
    """

    @property
    def name(self) -> str: ...


class Request(Protocol):
    """One request, the engine's own object: it is kept from `on_new_request` on and read in every step.

    May also have `kv_transfer_params` (a dict from the client, with `max_load_tokens` and `max_offload_tokens`)
    and `skip_reading_prefix_cache` (True: it loads nothing).
    """

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: prompt and accepted output. Neither drafts nor placeholders for tokens that a
        step in flight will sample."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV has been computed, or will have been when the steps planned so far have run; drafts that
        may yet be rejected included. 0 again after a preemption."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """A hash of each full run of `tokens_per_hash` tokens and all before it. May lag behind the tokens."""
        ...

    @property
    def status(self) -> Status: ...

    def is_finished(self) -> bool: ...


class Block(Protocol):
    """One block of the device's KV memory."""

    @property
    def block_id(self) -> int:
        """Its index in the KV tensors."""
        ...

    @property
    def is_null(self) -> bool:
        """Whether it is the block that holds nothing."""
        ...

    @property
    def block_hash(self) -> object | None:
        """Set where the engine's own prefix cache has the block's content already; None where it is to be
        filled."""
        ...


class Blocks(Protocol):
    """What was allocated for a request: all its blocks so far, for each group of the engine."""

    @property
    def blocks(self) -> Sequence[Sequence[Block]]: ...


class NewRequest(Protocol):
    """A request that is scheduled for the first time."""

    @property
    def req_id(self) -> str: ...

    @property
    def block_ids(self) -> Sequence[Sequence[int]]:
        """All its blocks, for each group of the engine."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in these blocks already: the engine's own hit and what was loaded."""
        ...


class CachedRequests(Protocol):
    """Requests that have been scheduled before. The lists are parallel."""

    @property
    def req_ids(self) -> Sequence[str]: ...

    @property
    def resumed_req_ids(self) -> Collection[str]:
        """Those that come back from a preemption: their `new_block_ids` are all their blocks."""
        ...

    @property
    def new_block_ids(self) -> Sequence[Sequence[Sequence[int]] | None]:
        """Blocks that were added in this step, for each group of the engine; None for none."""
        ...

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """As in `NewRequest`; before this step."""
        ...


class StepOutput(Protocol):
    """What one step will run. Also given for a step that runs nothing.

    May also have `kv_cache_block_copies`: copies between device blocks before the step runs, each with a
    `dst_block_id`.
    """

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]: ...

    @property
    def scheduled_cached_reqs(self) -> CachedRequests: ...

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Request -> tokens of it that are computed in this step, drafts included."""
        ...

    @property
    def finished_req_ids(self) -> Collection[str]:
        """Requests that have finished since the step before; `request_finished` has been called for each. Blocks
        of theirs may have been given to others in this step, not before."""
        ...

    @property
    def preempted_req_ids(self) -> Collection[str] | None:
        """Requests that have lost all their blocks since the step before."""
        ...


class Manager(Protocol):
    """The verbs of vLLM's `OffloadingManager`; `kvcascade.manager.SecondaryTierManager` has them.

    May also have `match_prefix(keys, ctx) -> PrefixMatch`, the batch form of `lookup`; and what `prepare_store`
    grants may have `refused`: keys that were asked for and are to be offered again.
    """

    def on_new_request(self, ctx: RequestContext) -> Any: ...

    def on_request_finished(self, ctx: RequestContext) -> None: ...

    def lookup(self, key: Key, ctx: RequestContext) -> LookupResult: ...

    def prepare_load(self, keys: Sequence[Key], ctx: RequestContext) -> Sequence[int]: ...

    def complete_load(self, keys: Sequence[Key], ctx: RequestContext, success: bool = True) -> None: ...

    def prepare_store(self, keys: Sequence[Key], ctx: RequestContext) -> StoreOffer | None: ...

    def complete_store(self, keys: Sequence[Key], ctx: RequestContext, success: bool = True) -> None: ...

    def on_schedule_end(self) -> None: ...

    def has_pending_work(self) -> bool: ...

    def take_events(self) -> Sequence[Any]: ...

    def get_stats(self) -> Any: ...

    def reset_cache(
        self, scope: Literal["all", "primary"] | None = None, weights_version: str = "", timeout: float = 10.0
    ) -> ResetReport: ...

    def shutdown(self, timeout: float = 10.0) -> None: ...
