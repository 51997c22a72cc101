"""What stands between adapter and manager, and holds both to what they promise each other."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcascade.manager.slots import SlotState
from kvcascade.testing.invariants import require
from kvcascade.types import Key, LookupResult, PrefixMatch, RequestContext, StoreOffer

from .content import Content
from .engine import SimulatedEngine
from .requests import SimRequest, Status

__all__ = ["Spy"]


@dataclass(eq=False, slots=True)
class _Told:
    """What the manager was told of a request."""

    covered: set[Key] = field(default_factory=set)
    """Chunks that were offered and not refused, or loaded."""
    offered: set[Key] = field(default_factory=set)
    refused: bool = False
    """Some of the last offer was."""
    incomplete: bool = False
    """Nothing is to be said of its last offers."""
    finished: bool = False
    waits_since: float | None = None
    """Since when all its lookups have been answered 'not yet'."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy between the engine and a slot, granted and not completed."""

    owner: _Told
    slot: int
    store: bool
    settled: bool = False
    """It holds what the request has generated, and the request goes on: none of it is to be written again."""
    void: bool = False
    """A reset came since."""


class Spy:
    """Passes all on to a manager.

    Attributes:
        engine: set once there is one.
        content: told of each chunk before it is offered.
        requests: those that the engine has been given, by name; whoever gives one enters it.
        begun: how many the manager has been told of.

    Args:
        batch: whether it has `match_prefix`.
    """

    engine: SimulatedEngine
    content: Content

    def __init__(self, manager: Any, batch: bool = True) -> None:
        self._manager = manager
        self.match_prefix = self._match_prefix if batch else None
        self.begun = 0
        self.requests: dict[str, SimRequest] = {}
        self._hits: set[Key] = set()
        """Keys that were HIT in this step."""
        self._running: dict[str, _Told] = {}
        self._copies: defaultdict[tuple[str, Key, bool], list[_Copy]] = defaultdict(list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    # What is under way

    @property
    def slots_in_use(self) -> Iterator[int]:
        """The slots that the engine's copies use, once for each."""
        return (copy.slot for copies in self._copies.values() for copy in copies)

    @property
    def known(self) -> int:
        """Requests of which something is still to come."""
        return len(self._running) + len(self._ending(stores_only=False))

    @property
    def finished(self) -> int:
        """Requests after which no cascade can come any more."""
        return self.begun - len(self._running) - len(self._ending(stores_only=True))

    @property
    def stores_after_finish(self) -> bool:
        return bool(self._ending(stores_only=True))

    def _ending(self, stores_only: bool) -> set[_Told]:
        """Finished requests with copies in flight."""
        return {
            copy.owner
            for copies in self._copies.values()
            for copy in copies
            if copy.owner.finished and not copy.void and (copy.store or not stores_only)
        }

    # The verbs

    def on_new_request(self, ctx: RequestContext) -> None:
        require(ctx.req_id not in self._running, f"{ctx.req_id} is new twice")
        self._running[ctx.req_id] = _Told()
        self.begun += 1
        self._manager.on_new_request(ctx)

    def lookup(self, key: Key, ctx: RequestContext) -> LookupResult:
        answer: LookupResult = self._manager.lookup(key, ctx)
        if answer is LookupResult.HIT:
            self._found([key])
        elif answer is not LookupResult.MISS:
            self._waits(ctx)
        return answer

    def _match_prefix(self, keys: Sequence[Key], ctx: RequestContext) -> PrefixMatch:
        match: PrefixMatch = self._manager.match_prefix(keys, ctx)
        self._found(keys[: match.hits])
        if match.pending:
            self._waits(ctx)
        return match

    def prepare_store(self, keys: Sequence[Key], ctx: RequestContext) -> StoreOffer | None:
        require(ctx.req_id in self._running, f"an offer of {ctx.req_id} after its finish")
        told = self._running[ctx.req_id]
        told.waits_since = None
        self.content.learn(self.requests[ctx.req_id])
        void = {key for (_, key, _), copies in self._copies.items() if any(copy.void for copy in copies)}
        require(void.isdisjoint(keys), "chunks are offered that copies of before a reset still use")
        offer: StoreOffer | None = self._manager.prepare_store(keys, ctx)
        self._check_hits()
        told.refused = offer is None or bool(offer.refused)
        if offer is not None:
            told.covered.update(set(keys).difference(offer.refused))
            told.offered.update(keys)
            self._begin(offer.keys, offer.slots, ctx, store=True)
        return offer

    def complete_store(self, keys: Sequence[Key], ctx: RequestContext, success: bool = True) -> None:
        copies = [self._end(key, ctx, store=True) for key in keys]
        self._manager.complete_store(keys, ctx, success)
        for key, copy in zip(keys, copies, strict=True):
            require(copy.void or self._readable(key) == success, f"{key.hex()[:8]} was stored: {success}")
            if copy.settled and success and not copy.void:
                self.content.check_settled(key, self._manager.pool.slot(copy.slot), f"slot {copy.slot}, stored")

    def prepare_load(self, keys: Sequence[Key], ctx: RequestContext) -> Sequence[int]:
        told = self._running[ctx.req_id]
        told.waits_since = None
        told.covered.update(keys)
        if self.engine.share_loads:
            self._check_alone(keys)
        self._check_margin(keys, self.requests[ctx.req_id])
        slots: Sequence[int] = self._manager.prepare_load(keys, ctx)
        self._begin(keys, slots, ctx, store=False)
        for key, slot in zip(keys, slots, strict=True):
            self.content.check(key, self._manager.pool.slot(slot), f"slot {slot}, to be loaded")
        return slots

    def complete_load(self, keys: Sequence[Key], ctx: RequestContext, success: bool = True) -> None:
        for key in keys:
            self._end(key, ctx, store=False)
        self._manager.complete_load(keys, ctx, success)

    def on_schedule_end(self) -> None:
        self._manager.on_schedule_end()
        self._check_hits()
        self._hits.clear()

    def on_request_finished(self, ctx: RequestContext) -> None:
        require(ctx.req_id in self._running, f"{ctx.req_id} is finished twice")
        told = self._running.pop(ctx.req_id)
        told.finished = True
        self._manager.on_request_finished(ctx)
        request = self.requests.pop(ctx.req_id, None)
        if request is not None and not told.incomplete:
            self._check_complete(request, told)

    def reset_cache(self, *args: Any, **kwargs: Any) -> Any:
        over = [name for name in self._running if name in self.requests and self.requests[name].is_finished()]
        require(not over, f"a reset, and the manager has not heard that {over} have finished")
        report = self._manager.reset_cache(*args, **kwargs)
        self._hits.clear()
        for told in self._running.values():
            told.covered.clear()
            told.offered.clear()
            told.waits_since = None
        for copies in self._copies.values():
            for copy in copies:
                copy.void = True
        require(not list(self._manager._slots), "readable after a reset")
        return report

    # What comes of them

    def _begin(self, keys: Sequence[Key], slots: Sequence[int], ctx: RequestContext, store: bool) -> None:
        in_use = Counter(self.slots_in_use)
        for key, slot in zip(keys, slots, strict=True):
            require(not (store and in_use[slot]), f"slot {slot} is granted, and in use")
            settled = store and self._is_settled(key, self.requests[ctx.req_id])
            self._copies[ctx.req_id, key, store].append(_Copy(self._running[ctx.req_id], slot, store, settled))

    def _end(self, key: Key, ctx: RequestContext, store: bool) -> _Copy:
        copies = self._copies[ctx.req_id, key, store]
        require(bool(copies), f"a copy of {key.hex()[:8]} is completed that was not granted")
        return copies.pop(0)

    def _is_settled(self, key: Key, request: SimRequest) -> bool:
        """Whether a draft model's chunk ends with what the request itself has generated, and it goes on. What ends
        with a prompt or a request may have been computed with a draft that was rejected, and stay so."""
        group = self.engine.shape.groups[int.from_bytes(key[-4:], "big")]
        if not group.draft or request.is_finished() or request.num_preemptions:
            return False
        chunk = self.engine.shape.keys(request, group).index(key)
        return (chunk + 1) * group.tokens_per_chunk > request.num_prompt_tokens

    def _check_alone(self, keys: Sequence[Key]) -> None:
        """No chunk is loaded by two requests at once."""
        loading = {
            key
            for (_, key, store), copies in self._copies.items()
            if not store and any(not copy.void for copy in copies)
        }
        require(loading.isdisjoint(keys), "chunks are loaded by two requests at once")

    def _check_margin(self, keys: Sequence[Key], request: SimRequest) -> None:
        """A draft model's layers go on only where the next chunk is there, too: what they hold for a chunk's last
        token depends on the one after it, of which the chunk's key says nothing."""
        for group in self.engine.shape.groups:
            own = self.engine.shape.keys(request, group)
            last = max((place for place, key in enumerate(own) if key in keys), default=None)
            if group.draft and last is not None:
                found = self._hits.intersection(own[last + 1 : last + 2])
                require(
                    bool(found), f"{request.request_id}: no hit after chunk {last} of {group}, which is loaded"
                )

    def _found(self, keys: Sequence[Key]) -> None:
        require(all(map(self._readable, keys)), "a HIT that is not readable")
        self._hits.update(keys)

    def _check_hits(self) -> None:
        require(all(map(self._readable, self._hits)), "HIT in this step, and gone")

    def _readable(self, key: Key) -> bool:
        slots = self._manager._slots
        slot: int = slots.find(key)
        return slot >= 0 and bool(slots.state(slot) == SlotState.READY)

    def _waits(self, ctx: RequestContext) -> None:
        """A request is told 'not yet' no longer than any tier may take."""
        told, now = self._running[ctx.req_id], self._manager._now
        since = told.waits_since = now if told.waits_since is None else told.waits_since
        patience = self._manager._patience
        require(now - since <= patience, f"{ctx.req_id} has waited for {now - since} s; at most {patience} s")

    # What each request has offered in the end

    def before_reset(self) -> None:
        """What finishes within a reset has its last chunks dropped."""
        for req_id in self.requests:
            if req_id in self._running:
                self._running[req_id].incomplete = True

    def after_reset(self) -> None:
        """What loads when a reset comes has its chunks taken for loaded."""
        for req_id, told in self._running.items():
            request = self.engine.scheduler.requests.get(req_id)
            told.incomplete |= request is not None and request.status is Status.LOADING

    def _check_complete(self, request: SimRequest, told: _Told) -> None:
        """All that is written at a normal end has been offered, and no chunk beyond: neither a gap nor a tail."""
        if not request.was_scheduled:
            require(not told.offered, f"{request.request_id} never ran, and chunks of it were offered")
        if request.status is not Status.FINISHED_STOPPED:
            return
        shape = self.engine.shape
        written = max(request.num_prompt_tokens, request.num_tokens - 1)
        limit = self.engine.store_limit(request)
        if limit is not None:
            written = min(limit, written)
        for group in shape.groups:
            keys, full = shape.keys(request, group), written // group.tokens_per_chunk
            beyond = [place for place, key in enumerate(keys) if key in told.offered and place >= full]
            require(not beyond, f"{request.request_id}: {beyond} of {group} offered, {full} are written")
            missing = [place for place, key in enumerate(keys[:full]) if key not in told.covered]
            if not (group.window or told.refused or self.engine.adapter._jobs._void):
                require(not missing, f"{request.request_id}: of {full} chunks of {group}, {missing} not offered")
