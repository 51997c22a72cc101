"""What is known of each request, from its first verb to its last event."""

from collections import Counter
from collections.abc import Iterator
from enum import Enum, auto
from itertools import count
from typing import TypeAlias

from kvcascade.errors import ProtocolError
from kvcascade.types import Key, MissReason, RequestContext

from .wishes import Wishes, wishes_of

__all__ = ["Answer", "Delivery", "Request", "RequestTable"]


class Delivery(Enum):
    """How far a chunk that is there has come on its way to the engine."""

    FOUND = auto()
    PENDING = auto()
    DELIVERED = auto()
    FAILED = auto()


Answer: TypeAlias = Delivery | MissReason


class Request:
    """One request. Slots are pinned on its behalf where `held` says so."""

    __slots__ = (
        "answers",
        "finish_sent",
        "finished",
        "held",
        "held_until",
        "id",
        "keys",
        "load_from",
        "loading",
        "number",
        "owner",
        "promoting",
        "sources",
        "storing",
        "turned_down",
        "waiting_since",
        "wishes",
    )

    def __init__(
        self, req_id: str, number: int, owner: str, wishes: Wishes, load_from: frozenset[str] | None
    ) -> None:
        self.id = req_id
        self.wishes = wishes
        self.load_from = load_from
        """The names of the secondary tiers that may serve it; None: all."""
        self.number = number
        """Higher than that of every request before; from 2, for what earlier processes stored has 1."""
        self.owner = owner
        """Its name to the lanes: the id, or another where an earlier request of that id has not ended for them."""
        self.keys: dict[Key, None] = {}
        """Its chunks in the order in which they came up, which is prompt order."""
        self.answers: dict[Key, Answer] = {}
        """What became of each chunk it asked for."""
        self.sources: dict[Key, int] = {}
        """Chunk -> the level of the chain it was promoted from; primary's own are not listed."""
        self.turned_down: dict[Key, MissReason] = {}
        """Chunks that are MISS to this request from now on, wherever they are."""
        self.held: set[int] = set()
        """Slots pinned for it since their chunks were promoted."""
        self.held_until = 0.0
        self.promoting = 0
        """Chunks on their way into primary for it."""
        self.waiting_since: float | None = None
        """Since when its lookups have been answered 'not yet'."""
        self.storing = 0
        """Chunks granted by `prepare_store` whose `complete_store` has not come."""
        self.loading = 0
        """Chunks granted by `prepare_load` whose `complete_load` has not come."""
        self.finished = False
        self.finish_sent = False

    @property
    def over(self) -> bool:
        """Nothing will come of it any more."""
        return self.finished and not self.storing and not self.loading

    def forget_transfers(self) -> None:
        """A reset came: its transfers, positions and waits begin anew."""
        self.keys.clear()
        self.sources.clear()
        self.turned_down.clear()
        self.held.clear()
        self.promoting = self.storing = self.loading = 0
        self.waiting_since = None


class RequestTable:
    """The requests that are not over. A request's id may be used again as soon as it has finished."""

    def __init__(self) -> None:
        self._running: dict[str, Request] = {}
        self._ending: dict[Request, None] = {}
        self._ids_ending: Counter[str] = Counter()
        self._numbers = count(2)

    def new(self, ctx: RequestContext) -> Request:
        """Raises `ProtocolError` where a request of this id has not finished."""
        if ctx.req_id in self._running:
            raise ProtocolError(f"on_new_request: request {ctx.req_id!r} is running already")
        taken = ctx.req_id in self._ids_ending
        number = next(self._numbers)
        owner = f"{ctx.req_id}#{number}" if taken else ctx.req_id
        load_from = getattr(ctx, "load_from", None)
        request = self._running[ctx.req_id] = Request(ctx.req_id, number, owner, wishes_of(ctx), load_from)
        return request

    def get(self, ctx: RequestContext, verb: str) -> Request:
        """Raises `ProtocolError` where there is no such request."""
        request = self._running.get(ctx.req_id)
        if request is None:
            raise ProtocolError(
                f"{verb}: request {ctx.req_id!r} is not running; on_new_request must come before, and "
                f"on_request_finished after it"
            )
        return request

    def finish(self, request: Request) -> None:
        """It makes no more offers; what it has begun may still end."""
        request.finished = True
        del self._running[request.id]
        self._ending[request] = None
        self._ids_ending[request.id] += 1

    def drop(self, request: Request) -> bool:
        """It is over. False where that was known."""
        if request not in self._ending:
            return False
        del self._ending[request]
        self._ids_ending[request.id] -= 1
        if not self._ids_ending[request.id]:
            del self._ids_ending[request.id]
        return True

    @property
    def ending(self) -> frozenset[Request]:
        """Finished, but not over."""
        return frozenset(self._ending)

    @property
    def storing_after_finish(self) -> bool:
        return any(request.storing for request in self._ending)

    def __iter__(self) -> Iterator[Request]:
        yield from self._running.values()
        yield from self._ending

    def __len__(self) -> int:
        return len(self._running) + len(self._ending)
