"""The connector's half in vLLM's scheduler."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

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

__all__ = ["SchedulerSide"]

logger = logging.getLogger("kvcascade")


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
    ) -> None:
        """`events`: the configuration of vLLM's KV events."""
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

    def take_report(self, report: WorkerReport) -> None:
        """Failed loads need no word here: the workers have told vLLM, which computes those tokens."""
        for ended in self.adapter.update_connector_output(report):
            if not ended.ok:
                logger.warning(
                    "request %s: %d chunks could not be copied to the device; tokens from %d on are computed",
                    ended.req_id,
                    len(ended.keys),
                    ended.valid_tokens,
                )

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
