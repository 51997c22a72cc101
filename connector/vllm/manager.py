"""Our `SecondaryTierManager` as vLLM's `OffloadingManager`: every result is one of vLLM's own types."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kvcascade.manager import SecondaryTierManager
from kvcascade.types import Key, LookupResult, RequestContext, StoreOffer

from . import compat
from .ledger import CopyLedger
from .logs import log_reset
from .media import Place, allowed, in_vllm
from .metrics import Counters
from .slots import SlotSpec

__all__ = ["CascadeManager"]

_RESULTS = {
    LookupResult.MISS: compat.LookupResult.MISS,
    LookupResult.HIT: compat.LookupResult.HIT,
    LookupResult.HIT_PENDING: compat.LookupResult.HIT_PENDING,
    LookupResult.RETRY: compat.LookupResult.RETRY,
}


class _Request:
    """What has to be remembered of a request beside what the stack's manager does."""

    __slots__ = ("context", "full", "held", "refused")

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.held = 0
        """Chunks that it has stored: making room for its next ones never evicts them."""
        self.refused = 0
        """Chunks of its last offer, where that was not taken."""
        self.full = False
        """Its prompt is larger than primary: the prefix is stored, and nothing more of it."""


class CascadeManager(compat.OffloadingManager):
    """Runs in vLLM's scheduler, on its thread. See `SecondaryTierManager` for what the verbs mean; what is
    different here is how vLLM calls them:

    - An offer is taken whole or not at all, since vLLM offers again only what was refused as a whole. Of a prompt
      that can never fit, the longest prefix is taken.
    - vLLM never says that a copy has failed, and after a reset not even that it has ended. Workers say so in the
      marks of the pool.
    """

    def __init__(
        self, stack: SecondaryTierManager, ledger: CopyLedger, places: Sequence[Place], tell_events: bool
    ) -> None:
        self._stack = stack
        self._ledger = ledger
        self._places = {place.name: place for place in places}
        self._tell_events = tell_events
        self._requests: dict[str, _Request] = {}
        self._counters = Counters()

    def on_new_request(self, req_context: Any) -> Any:
        names = allowed(self._places.values(), req_context.load_tier_filter)
        context = RequestContext(req_context.req_id, req_context.kv_transfer_params, names)
        self._requests[context.req_id] = _Request(context)
        self._stack.on_new_request(context)
        return compat.RequestOffloadingContext(policy=compat.OffloadPolicy.CHUNK_LEVEL)

    def on_request_finished(self, req_context: Any) -> None:
        request = self._requests.pop(req_context.req_id)
        self._counters.lost += request.refused
        self._stack.on_request_finished(request.context)

    def lookup(self, key: Key, req_context: Any) -> Any:
        return _RESULTS[self._stack.lookup(key, req_context)]

    def get_load_source(self, key: Key, req_context: Any) -> Any:
        return self._places[self._stack.source(key, req_context)].source

    def prepare_load(self, keys: Collection[Key], req_context: Any) -> SlotSpec:
        keys = list(keys)
        slots = self._stack.prepare_load(keys, req_context)
        self._ledger.grant(req_context.req_id, keys, slots, store=False)
        return SlotSpec(slots)

    def complete_load(self, keys: Collection[Key], req_context: Any) -> None:
        self._ledger.close(req_context.req_id, keys, store=False)
        self._stack.complete_load(list(keys), req_context)

    def touch(self, keys: Collection[Key], req_context: Any) -> None:
        self._stack.touch(list(keys), req_context)

    def prepare_store(self, keys: Collection[Key], req_context: Any) -> Any:
        request = self._requests[req_context.req_id]
        if request.full:
            return _output([], [], [])
        request.refused = 0
        ordered = _by_position(keys, req_context)
        offer = self._stack.prepare_store(ordered, request.context, partial=False)
        if offer is None and request.held + len(keys) > self._stack.capacity:
            offer = self._head_only(ordered, request)
        if offer is None:
            request.refused = len(keys)
            return None
        request.held += len(offer.keys)
        slots = dict(zip(offer.keys, offer.slots, strict=True))
        granted = [key for key in keys if key in slots]  # vLLM pairs slots and blocks in the order of its offer
        self._ledger.grant(request.context.req_id, granted, [slots[key] for key in granted], store=True)
        return _output(granted, [slots[key] for key in granted], offer.evicted)

    def complete_store(self, keys: Collection[Key], req_context: Any, success: bool = True) -> None:
        failed = set(self._ledger.close(req_context.req_id, keys, store=True))
        stored = [key for key in _by_position(keys, req_context) if key not in failed]
        self._stack.complete_store(stored, req_context, success)
        if failed:
            self._counters.failed_stores += len(failed)
            self._stack.complete_store(list(failed), req_context, success=False)

    def on_schedule_end(self, context: Any) -> None:
        self._release_void()
        self._stack.on_schedule_end()

    def has_pending_work(self) -> bool:
        return self._stack.has_pending_work() or self._ledger.awaited

    def reset_cache(self) -> None:
        self._ledger.void()
        report = self._stack.reset_cache()
        for request in self._requests.values():
            request.held, request.refused, request.full = 0, 0, False
        log_reset(report)

    def take_events(self) -> Iterable[Any]:
        if self._tell_events:
            yield from in_vllm(self._stack.take_events(), self._places)

    def get_stats(self) -> Any:
        return self._counters.take(self._stack.get_stats())

    def shutdown(self) -> None:
        self._stack.shutdown()

    def _head_only(self, keys: Sequence[Key], request: _Request) -> StoreOffer | None:
        """What is granted of an offer that can never be taken whole; None where it may be, at another time."""
        offer = self._stack.prepare_store(keys, request.context)
        new = len(keys) if offer is None else len(offer.keys) + len(offer.refused)
        if request.held + new <= self._stack.capacity:
            self._stack.complete_store(offer.keys if offer else [], request.context, success=False)
            return None
        if offer is None and request.held < self._stack.capacity:
            return None
        request.full = True
        return offer or StoreOffer([], [], [])

    def _release_void(self) -> None:
        """Copies that a reset has voided and that have ended since: their slots may be used again."""
        for copy in self._ledger.take_ended():
            complete = self._stack.complete_store if copy.store else self._stack.complete_load
            complete([copy.key], RequestContext(copy.req_id), False)


def _by_position(keys: Collection[Key], req_context: Any) -> list[Key]:
    """The head of the prompt first; one offer mixes the cache groups."""
    return sorted(keys, key=lambda key: req_context.get_offload_key_position(key) or 0)


def _output(keys: list[Key], slots: list[int], evicted: list[Key]) -> Any:
    return compat.PrepareStoreOutput(keys_to_store=keys, store_spec=SlotSpec(slots), evicted_keys=evicted)
