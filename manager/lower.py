"""The tiers of a stack below a pool that another manager keeps."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from kvcascade.errors import KVCascadeError, ProtocolError
from kvcascade.types import Key, LookupResult, MissReason, RequestContext

from .chain import Chain
from .events import Event, EventLog
from .level import Level
from .manager import ResetReport
from .orders import Carried, Orders, Wanted
from .probing import Probing
from .requests import Delivery, Request, RequestTable
from .stats import StackStats
from .summary import SummaryLog

__all__ = ["LowerTiers"]

logger = logging.getLogger("kvcascade")

_SAY_EVERY = 10.0


class LowerTiers:
    """Presents the secondary tiers of a stack as one tier below a pool of slots that another manager keeps: that
    manager gives orders to load chunks into slots or to store them from there, and the slots of an order are ours
    until it is reported, once, by `take_ended`. What is stored goes to all tiers; a load comes from the topmost
    that has the chunk, and from one below where that turns out not to have it.

    All verbs run on one thread. Only `drain`, `reset` and `close` wait. What a medium does wrong never reaches the
    caller: it is a chunk that was not loaded, and a MISS from then on to the request that asked for it.
    """

    def __init__(
        self,
        chain: Chain,
        events: EventLog,
        slots: int,
        reset_scope: Literal["all", "primary"] = "all",
        log_every: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots`: how many the pool has; `log_every`: seconds between two summary lines in the log, 0: none."""
        self._chain = chain
        self._events = events
        self._reset_scope = reset_scope
        self._clock = clock
        self._now = clock()
        self._probing = Probing(chain)
        self._patience = max(level.settings.deadline for level in chain.levels)
        self._requests = RequestTable()
        self._stats = StackStats([])
        self._orders = Orders(chain, slots, self._stats, clock)
        self._closed = False
        self._summary = SummaryLog(log_every, self.get_stats) if log_every else None

    # Requests

    def on_new_request(self, ctx: RequestContext) -> None:
        self._requests.new(ctx)

    def on_request_finished(self, ctx: RequestContext) -> None:
        """The request gives no more orders; those that it has given are reported all the same."""
        request = self._find(ctx)
        if request is None:
            return
        self._requests.finish(request)
        self._chain.used(request.keys)
        self._chain.finish(request.owner)
        self._end_if_over(request)

    def lookup(self, key: Key, ctx: RequestContext) -> LookupResult:
        """HIT: it can be loaded. RETRY: a tier is asked; ask again in a later step. Else MISS."""
        request = self._find(ctx)
        if request is None:
            return LookupResult.MISS
        first = key not in request.answers
        request.keys[key] = None
        level = self._chain.find(key, request.load_from)
        if first:
            self._count_misses(key, self._chain.levels[: level.place] if level else self._chain.levels)
        reason = request.turned_down.get(key)
        if reason is None and level is not None:
            request.answers[key] = Delivery.FOUND
            return LookupResult.HIT
        if reason is None and self._probing.ask(key, request.load_from):
            if self._has_patience(request):
                request.answers[key] = Delivery.PENDING
                return LookupResult.RETRY
            reason = request.turned_down[key] = MissReason.TIMED_OUT
        if request.answers.get(key) is not Delivery.FAILED:
            request.answers[key] = reason or self._chain.why(key)
        return LookupResult.MISS

    def touch(self, keys: Sequence[Key], ctx: RequestContext) -> None:
        """These chunks were used, as one prompt, head first."""
        request = self._find(ctx)
        if request is None:
            return
        request.keys.update(dict.fromkeys(keys))
        self._chain.touch(keys, request.number)
        for level in self._chain.levels:
            missed = level.take_missed(keys)
            if level.settings.write == "through":
                self._orders.want(level, missed)

    # Orders

    def load(self, order: int, slots: Mapping[Key, int], ctx: RequestContext) -> None:
        """Reads these chunks into these slots."""
        self._orders.load(order, slots, self._find(ctx))

    def store(self, order: int, slots: Mapping[Key, int], ctx: RequestContext) -> None:
        """Brings these chunks, head first, to each tier that receives `through`, and does not have them. Stores
        that wait use at most a tier's `queue` share of the pool, and half of it in all; beyond that they are shed,
        and wanted again when their chunk is used."""
        request = self._find(ctx)
        priority = request.wishes.priority if request else "normal"
        levels = [] if priority == "low" else [lv for lv in self._chain.levels if lv.settings.write == "through"]
        if request is not None:
            request.keys.update(dict.fromkeys(slots))
            request.waiting_since = None
        self._orders.store(order, slots, request, dict.fromkeys(slots, levels), at_once=priority == "high")

    def take_wanted(self) -> Wanted:
        """Chunks that some tiers should receive, if they are still in the pool: what was promoted from below them,
        and stores that did not happen. Each is named once; `fill` follows for those that are there."""
        return self._orders.take_wanted()

    def fill(self, order: int, slots: Mapping[Key, int], wanted: Wanted) -> None:
        """As `store`, for chunks that `take_wanted` has named."""
        self._orders.store(order, slots, None, wanted)

    def give_up(self, order: int) -> None:
        """An order that could not be given is reported as failed."""
        self._orders.give_up(order)

    def take_ended(self) -> list[Carried]:
        """The orders that have ended since the last call. To be called in each step, before all lookups."""
        self._read_results()
        return self._orders.take_ended()

    # Steps

    def on_schedule_end(self) -> None:
        """The step ends: tiers are asked for what its lookups wanted to know."""
        self._now = self._clock()
        self._probing.flush(self._now)
        self._chain.start()

    @property
    def orders_under_way(self) -> int:
        return self._orders.under_way

    @property
    def requests_known(self) -> int:
        return len(self._requests)

    @property
    def has_wanted(self) -> bool:
        """Whether `take_wanted` has something to give."""
        return self._orders.has_wanted

    def take_events(self) -> list[Event]:
        return self._events.take()

    def get_stats(self) -> StackStats:
        """The counters up to now, without those of the pool. May be called from any thread."""
        return self._stats.copy([level.snapshot() for level in self._chain.levels])

    # These wait

    def drain(self) -> None:
        """Withdraws what has not begun and waits for the rest, however long it takes: the memory is another's. The
        orders' ends are there to be taken."""
        self._read_results()
        while self._orders.under_way:
            if not self._chain.drain(_SAY_EVERY):
                logger.warning("waiting for %d transfers that have not ended", self._orders.under_way)
            self._read_results()

    def reset(self, timeout: float = 10.0) -> ResetReport:
        """The pool is to be cleared: drains, and with `reset_scope: all` makes everything in the tiers void, too,
        durably."""
        self.drain()
        self._orders.reset()
        for request in self._requests:
            request.forget_transfers()
        names = tuple(level.name for level in self._chain.levels)
        if self._reset_scope == "primary":
            return ResetReport(cleared=(), kept=names)
        self._chain.drain(timeout)  # probes
        self._read_results()
        failed = self._chain.void("", timeout, self._now)
        return ResetReport(cleared=tuple(name for name in names if name not in failed), failed=failed)

    def close(self, timeout: float = 10.0) -> None:
        """Stores that wait are given so many seconds to reach their tiers, then every tier is closed.

        Raises:
            KVCascadeError: transfers still use the pool.
            Exception: the first error of closing a tier.
        """
        if self._closed:
            return
        self._closed = True
        self._orders.close()
        if self._summary:
            self._summary.close()
        self._chain.flush(timeout)
        ended, problems = self._chain.close(timeout)
        if not ended:
            raise KVCascadeError("transfers have not ended and still use the pool's memory")
        if problems:
            raise problems[0]

    # Within

    def _find(self, ctx: RequestContext) -> Request | None:
        try:
            return self._requests.get(ctx, "lookup")
        except ProtocolError:
            return None

    def _read_results(self) -> None:
        self._now = self._clock()
        for level, report in self._chain.poll(self._now):
            report.job.flow.ended(level, report, self._now)
        for request in self._requests.ending:
            self._end_if_over(request)

    def _has_patience(self, request: Request) -> bool:
        """Whether this request has been told "not yet" for less time than any tier may take."""
        if request.waiting_since is None:
            request.waiting_since = self._now
        return self._now - request.waiting_since <= self._patience

    def _count_misses(self, key: Key, levels: Sequence[Level]) -> None:
        for level in levels:
            level.stats.misses[level.why(key)] += 1

    def _end_if_over(self, request: Request) -> None:
        """After its last event: counts what became of its chunks."""
        if not request.over or not self._requests.drop(request):
            return
        self._stats.requests += 1
        self._stats.lookups += len(request.answers)
        for answer in request.answers.values():
            if isinstance(answer, MissReason):
                self._stats.misses[answer] += 1
            elif answer is Delivery.FAILED:
                self._stats.failed += 1
            elif answer is not Delivery.DELIVERED:
                self._stats.unused += 1
