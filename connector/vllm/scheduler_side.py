"""The connector's half in vLLM's scheduler."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvcascade.connector.groups import GroupSpec
from kvcascade.connector.scheduler import SchedulerAdapter
from kvcascade.connector.transfers import WorkerReport
from kvcascade.manager import SecondaryTierManager
from kvcascade.types import RequestContext

from . import compat
from .hits import hits_by_source
from .logs import log_reset
from .media import Place, allowed, in_vllm
from .metrics import Counters

__all__ = ["LostLoad", "SchedulerSide"]

logger = logging.getLogger("kvcascade")


class LostLoad(NamedTuple):
    """A load that has ended and has not brought all that vLLM counts on. Pickles."""

    req_id: str
    blocks: frozenset[int]
    """Device blocks without their content, of all cache groups."""


class SchedulerSide:
    """Our scheduler adapter and our manager, on the scheduler's thread."""

    def __init__(
        self,
        stack: SecondaryTierManager,
        groups: Sequence[GroupSpec],
        places: Iterable[Place],
        events: Any,
        *,
        tokens_per_hash: int,
        workers: int,
        prompt_only: bool,
        by_block: bool,
    ) -> None:
        """`events`: the configuration of vLLM's KV events; `by_block`: vLLM is told which blocks were not loaded,
        else which requests."""
        self.stack = stack
        self.adapter = SchedulerAdapter(
            stack,
            groups,
            tokens_per_hash=tokens_per_hash,
            workers=workers,
            prompt_only=prompt_only,
            context=self._context,
        )
        self._places = {place.name: place for place in places}
        self._tells_events = events.enable_kv_cache_events
        self._events = compat.EventsTracker(events)
        self._counters = Counters()
        self._lost: list[LostLoad] = []
        self._by_block = by_block
        self._told: set[int] = set()
        """Device blocks of which workers are to tell vLLM that our loads have not filled them."""

    def take_report(self, report: WorkerReport) -> set[str]:
        """What workers have ended. Returns the requests whose loads have not brought all: copies have failed, or
        the cache was reset meanwhile. They are not to go on before vLLM knows, and it hears of that from workers
        only: they tell it in the next step (`take_lost`)."""
        lost = [ended for ended in self.adapter.update_connector_output(report) if not ended.ok]
        for ended in lost:
            logger.warning(
                "request %s: %d chunks were not loaded to the device; tokens from %d on are computed",
                ended.req_id,
                len(ended.keys),
                ended.valid_tokens,
            )
        self._lost += [LostLoad(ended.req_id, frozenset().union(*ended.invalid)) for ended in lost]
        return {load.req_id for load in self._lost}

    def take_lost(self) -> list[LostLoad]:
        """What the workers are to tell vLLM in the next step."""
        lost, self._lost = self._lost, []
        if self._by_block:
            self._told.update(*(load.blocks for load in lost))
        return lost

    def hear_of(self, invalid: set[int]) -> None:
        """vLLM was told that these device blocks were not filled. Ours have not been computed with; those of
        another connector, beside ours in a MultiConnector, may have been, and what came of it is being stored."""
        others = invalid - self._told
        self._told -= invalid
        if others:
            logger.warning(
                "%d blocks were not filled by another connector: requests that run now store nothing", len(others)
            )
            self.adapter.distrust_stores()

    def has_pending_work(self) -> bool:
        return bool(self._lost) or self.adapter.has_pending_work()

    def hits_by_source(self, request: Any, tokens: int) -> dict[Any, int]:
        """Where the tokens come from that are being loaded for a request."""
        if not tokens:
            return {}
        start, chunks = self.adapter.chunks_loading(request)
        context = self._context(request)
        sources = [
            (first, last, self._places[self.stack.source(key, context)].source) for first, last, key in chunks
        ]
        return hits_by_source(sources, start, start + tokens)

    def take_events(self) -> Iterable[Any]:
        if not self._tells_events:
            return
        yield from self._events.take_events(in_vllm(self.adapter.take_events(), self._places))

    def get_stats(self) -> Any:
        stats = self.adapter.get_stats()
        self._counters.lost = stats.lost_chunks
        self._counters.failed_stores = stats.failed_stores
        self._counters.failed_loads = stats.failed_loads
        return self._counters.take(stats.manager)

    def reset_cache(self) -> bool:
        """False where a tier could not be cleared."""
        report = self.adapter.reset_cache()
        log_reset(report)
        self._events.reset()
        return not report.failed

    def shutdown(self) -> None:
        self.adapter.shutdown()

    def _context(self, request: Any) -> RequestContext:
        asked = compat.request_context(request)
        names = allowed(self._places.values(), asked.load_tier_filter)
        return RequestContext(request.request_id, request.kv_transfer_params, names)
