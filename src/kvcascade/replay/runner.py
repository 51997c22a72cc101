"""Plays requests against a stack as an engine would, with real bytes, and compares every byte that is loaded."""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from kvcascade.errors import KVCascadeError
from kvcascade.types import Key, Namespace, RequestContext, StoreOffer

from .content import Content, key_of
from .simulate import Lru
from .trace import Request

if TYPE_CHECKING:
    from kvcascade.manager import SecondaryTierManager

__all__ = ["Player", "StuckError", "Tally", "namespace_of"]

_PORTION = 16
"""Chunks that one step prefills of a request."""
_OFFERS = 64
"""How often a portion is offered at most."""
_PATIENCE = 60.0
"""Seconds without progress after which the stack counts as stuck. Every job's deadline is far below."""

Steps = Generator[None, None, None]


class StuckError(KVCascadeError):
    """The stack made no progress for a minute; a bug of the stack."""


@dataclass(slots=True)
class Tally:
    """What the engine's side of a replay has seen, of the requests that were played to their end."""

    requests: int = 0
    chunks: int = 0
    """Chunks of all prompts."""
    gpu_hits: int = 0
    """Leading chunks found in the GPU's own cache."""
    loaded: int = 0
    """Leading chunks after those that the stack delivered. Each was compared, byte by byte."""
    stored: int = 0
    """Chunks written into slots of the stack."""
    refused: int = 0
    """Chunks that the stack refused for good, and the rest of their prompts."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens in the hits: they needed no prefill."""

    @property
    def hit_rate(self) -> float:
        return (self.gpu_hits + self.loaded) / self.chunks if self.chunks else 0.0

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that needed no prefill."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def namespace_of(trace: str, chunk_bytes: int) -> Namespace:
    """The namespace of a replay's chunks: those of another trace or size are other chunks."""
    return Namespace.of(engine="replay", trace=trace, chunk_bytes=chunk_bytes)


class Player:
    """An engine's scheduler and worker in one thread.

    A step does the next action of every active request: ask for the prefix; load it; then, portion by portion,
    prefill the rest and store it. A copy between engine and slots begins in one step and ends in the next, so its
    slots stay pinned over the end of the step. Between two steps the player waits for the stack's I/O: the time
    that a replay takes is the time of the I/O, not of an engine.

    Args:
        manager: the stack. The player does not shut it down.
        content: what the chunks' bytes are.
        concurrency: requests that are active at a time; they enter in the order of the trace.
        gpu_chunks: size of the GPU's own cache in front of the stack.
        stopped: asked between actions; once it is true no request enters, and the active ones are aborted.
        on_finish: called after each request that was played to its end.
    """

    def __init__(
        self,
        manager: "SecondaryTierManager",
        content: Content,
        *,
        concurrency: int = 1,
        gpu_chunks: int = 0,
        stopped: Callable[[], bool] = lambda: False,
        on_finish: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        self.tally = Tally()
        self._manager = manager
        self._content = content
        self._concurrency = concurrency
        self._gpu = Lru(gpu_chunks)
        self._stopped = stopped
        self._on_finish = on_finish
        self._waits = False
        """Whether somebody waits for what the stack is moving: a lookup that is not decided, a refused offer."""

    def play(self, requests: Iterable[Request]) -> None:
        """Plays the requests to their end, or until it is stopped.

        Raises:
            WrongBytesError: a load brought other bytes than were stored.
            StuckError: the stack hangs.
        """
        waiting = enumerate(requests)
        active: list[Steps] = []
        while True:
            if not self._stopped():
                free = self._concurrency - len(active)
                active += [self._live(str(number), request) for number, request in islice(waiting, free)]
            if not active:
                return
            active = [request for request in active if _goes_on(request)]
            self._end_step()

    def _live(self, req_id: str, request: Request) -> Steps:
        """A request's life; each `yield` is the end of a step."""
        ctx = RequestContext(req_id)
        keys = [key_of(each) for each in request.hash_ids]
        self._manager.on_new_request(ctx)
        resident = self._gpu.prefix(request.hash_ids)
        self._manager.touch(keys[:resident], ctx)
        hits = yield from self._match(keys, resident, ctx)
        yield from self._load(keys[resident : resident + hits], ctx)
        # What the GPU holds is offered too: the stack may have evicted it since.
        computed = [*range(resident), *range(resident + hits, len(keys))]
        yield from self._prefill(keys, computed, ctx)
        self._manager.on_request_finished(ctx)
        if not self._stopped():
            self._gpu.admit(request.hash_ids)
            self._count(request, resident, hits)

    def _match(self, keys: Sequence[Key], resident: int, ctx: RequestContext) -> Generator[None, None, int]:
        """How many keys after the resident ones the stack has. They are HIT until the end of this step."""
        if resident == len(keys):
            return 0
        asked = time.monotonic()
        while (match := self._manager.match_prefix(keys[resident:], ctx)).pending:
            if self._stopped():
                return 0
            _check_progress(asked, f"request {ctx.req_id} waits for its lookup")
            self._waits = True
            yield
        self._manager.touch(keys[: resident + match.hits], ctx)
        return match.hits

    def _load(self, keys: Sequence[Key], ctx: RequestContext) -> Steps:
        if not keys:
            return
        slots = self._manager.prepare_load(keys, ctx)
        yield
        for key, slot in zip(keys, slots, strict=True):
            self._content.check(key, self._manager.pool.slot(slot))
        self._manager.complete_load(keys, ctx)

    def _prefill(self, keys: Sequence[Key], computed: Sequence[int], ctx: RequestContext) -> Steps:
        """Stores the computed places of the prompt. After a chunk that stays refused the rest would be a prefix
        with a gap, which nobody finds, so it is not offered."""
        start = 0
        while start < len(computed) and not self._stopped():
            portion = [keys[place] for place in computed[start : start + _PORTION]]
            offer = yield from self._offer(portion, ctx)
            if offer is None:
                self.tally.refused += len(computed) - start
                return
            start += portion.index(offer.refused[0]) if offer.refused else len(portion)
            self._manager.touch(keys[: computed[start - 1] + 1], ctx)
            yield from self._store(offer, ctx)

    def _offer(self, keys: Sequence[Key], ctx: RequestContext) -> Generator[None, None, StoreOffer | None]:
        """Offers the keys; where all are refused, once more in the next step, and again after each step in which
        the stack was moving chunks, since that may make room."""
        for tries in range(_OFFERS):
            offer = self._manager.prepare_store(keys, ctx)
            if offer is not None or (tries and not self._manager.jobs_under_way):
                return offer
            self._waits = True
            yield
        return None

    def _store(self, offer: StoreOffer, ctx: RequestContext) -> Steps:
        yield
        if not offer.keys:
            return
        for key, slot in zip(offer.keys, offer.slots, strict=True):
            self._content.write(key, self._manager.pool.slot(slot))
        self._manager.complete_store(offer.keys, ctx)
        self.tally.stored += len(offer.keys)

    def _count(self, request: Request, resident: int, hits: int) -> None:
        tally = self.tally
        tally.requests += 1
        tally.chunks += len(request.hash_ids)
        tally.gpu_hits += resident
        tally.loaded += hits
        tally.prompt_tokens += request.input_length
        tally.cached_tokens += request.tokens(resident + hits)
        self._on_finish(tally)

    def _end_step(self) -> None:
        """Ends the step, and waits until no job needs another one; where somebody waits, until none is left."""
        self._manager.on_schedule_end()
        began = time.monotonic()
        pause = 50e-6
        while self._manager.has_pending_work() or (self._waits and self._manager.jobs_under_way):
            _check_progress(began, "has_pending_work stays true")
            time.sleep(pause)
            pause = min(pause * 1.2, 200e-6)
            self._manager.on_schedule_end()
        self._waits = False


def _goes_on(request: Steps) -> bool:
    try:
        next(request)
    except StopIteration:
        return False
    return True


def _check_progress(since: float, what: str) -> None:
    if time.monotonic() - since > _PATIENCE:
        raise StuckError(f"the stack has made no progress for {_PATIENCE:.0f} s: {what}")
