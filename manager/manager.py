"""`SecondaryTierManager`: the verbs that an engine calls."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile
from math import inf
from typing import Literal

from kvcascade.configs.schema import PinningSettings, Watermarks
from kvcascade.errors import ClosedError, ProtocolError
from kvcascade.tiers.host import HostPool
from kvcascade.types import Key, LookupResult, MissReason, PrefixMatch, RequestContext, StoreOffer

from .cascade import Cascade
from .chain import Chain
from .copies import Copies, Ended
from .demotion import Demotion
from .events import Event, EventLog
from .lookups import Lookups
from .pinboard import Pinboard
from .primary import Primary
from .promotion import Promotion
from .requests import Delivery, Request, RequestTable
from .slots import SlotState
from .stats import StackStats
from .summary import SummaryLog

__all__ = ["ResetReport", "SecondaryTierManager"]


@dataclass(frozen=True, slots=True)
class ResetReport:
    """What a reset has done. Truthful: what could not be done by the deadline is said here."""

    cleared: tuple[str, ...]
    """Tiers that hold nothing of before, for good."""
    kept: tuple[str, ...] = ()
    """Tiers that were not asked for and keep what they hold."""
    failed: dict[str, str] = field(default_factory=dict)
    """Tier -> why it could not be cleared in time. It is down, and serves nothing, until it could."""
    quarantined: int = 0
    """Slots that a copy begun before the reset may still use; they come back when it ends."""

    @property
    def ok(self) -> bool:
        """Whether all that was asked for is gone."""
        return not self.failed


class SecondaryTierManager:
    """Chains a host pool and the tiers below it, behind the verbs of vLLM's `OffloadingManager`.

    All verbs run on one thread, the engine's scheduler. None of them does I/O; only `reset_cache` and `shutdown`
    may wait, up to their timeout. Between two `on_schedule_end` lies one step; results of the lanes are read at
    the first verb of a step. A key that was HIT stays so to the step's end, hence `prepare_load` never fails.

    What a medium does wrong never reaches the caller: it is a miss. Exceptions are the caller's own mistakes
    (`ProtocolError`) and calls after `shutdown` (`ClosedError`).
    """

    def __init__(
        self,
        pool: HostPool,
        primary: Primary,
        chain: Chain,
        events: EventLog,
        reset_scope: Literal["all", "primary"] = "all",
        log_every: float = 0.0,
        watermarks: Watermarks | None = None,
        pinning: PinningSettings | None = None,
        staging: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`log_every`: seconds between two summary lines in the log, 0 for none; `staging`: slots of the pool that
        are not primary's, for moves between the tiers below."""
        self.pool = pool
        self._primary = primary
        self._slots = primary.slots
        self._chain = chain
        self._events = events
        self._reset_scope = reset_scope
        self._clock = clock
        self._cascade = Cascade(primary, chain)
        self._promotion = Promotion(primary, chain, self._cascade)
        self._patience = max([level.settings.deadline for level in chain.levels], default=2.0)
        self._lookups = Lookups(primary, chain, self._promotion, self._patience)
        self._demotion = Demotion(primary, chain, self._cascade, watermarks or Watermarks(), staging)
        self._cascade.hold, self._cascade.makes_room = self._demotion.hold, self._demotion.makes_room
        pinning = pinning or PinningSettings()
        self._pinboard = Pinboard(self._slots, pinning.share, pinning.longest)
        self._requests = RequestTable()
        self._storing = Copies()
        self._loading = Copies()
        self._stats = StackStats([])
        self._now = clock()
        self._stepping = False
        self._closed = False
        self._summary = SummaryLog(log_every, self.get_stats) if log_every else None

    # Requests

    def on_new_request(self, ctx: RequestContext) -> None:
        """A request begins. Every other verb of it comes between this and `on_request_finished`, but for the
        completion of what it has begun."""
        self._begin_step()
        self._requests.new(ctx)

    def on_request_finished(self, ctx: RequestContext) -> None:
        """The request makes no more offers. What it has begun may still complete, and cascades then."""
        self._begin_step()
        request = self._requests.get(ctx, "on_request_finished")
        self._requests.finish(request)
        self._promotion.drop(request)
        if request.wishes.pin_for:
            self._pinboard.pin(request.keys, request.wishes.pin_for, self._now)
        self._use(list(request.keys), request)
        self._chain.used(request.keys)
        self._end_if_over(request)

    # Lookups

    def lookup(self, key: Key, ctx: RequestContext) -> LookupResult:
        """What is known of one chunk. A chunk that is further down is promoted: ask again in a later step."""
        self._begin_step()
        request = self._requests.get(ctx, "lookup")
        request.keys[key] = None
        slot = self._slots.find(key)
        if slot >= 0 and self._slots.protect(slot):
            request.answers[key] = Delivery.FOUND
            return LookupResult.HIT
        return self._lookups.answer(key, slot, request, self._now)

    def match_prefix(self, keys: Sequence[Key], ctx: RequestContext) -> PrefixMatch:
        """`lookup` for a prompt's chunks, head first, up to the first that is not there."""
        self._begin_step()
        request = self._requests.get(ctx, "match_prefix")
        hits = self._slots.hit_prefix(keys)
        if hits:
            found = keys if hits == len(keys) else keys[:hits]
            request.keys.update(dict.fromkeys(found))
            request.answers.update(dict.fromkeys(found, Delivery.FOUND))
        pending = False
        for key in islice(keys, hits, None):
            answer = self.lookup(key, ctx)
            if answer is LookupResult.MISS:
                break
            pending = pending or answer is not LookupResult.HIT
            hits += not pending
        return PrefixMatch(hits, pending)

    def source(self, key: Key, ctx: RequestContext) -> str:
        """The name of the tier that this request has its chunk from: the one that it was promoted from for this
        request, else primary."""
        place = self._requests.get(ctx, "source").sources.get(key)
        return self._primary.stats.name if place is None else self._chain.levels[place].name

    def touch(self, keys: Sequence[Key], ctx: RequestContext) -> None:
        """These chunks were used, as one prompt, head first; also where the engine had them itself."""
        self._begin_step()
        request = self._requests.get(ctx, "touch")
        request.keys.update(dict.fromkeys(keys))
        self._use(keys, request)

    # Loads

    def prepare_load(self, keys: Sequence[Key], ctx: RequestContext) -> list[int]:
        """The slots of these chunks, pinned until `complete_load`.

        Raises:
            ProtocolError: a key was not HIT in this step.
        """
        self._begin_step()
        request = self._requests.get(ctx, "prepare_load")
        slots = self._slots.readable(keys)
        if -1 in slots:
            key = keys[slots.index(-1)]
            raise ProtocolError(f"prepare_load: {key.hex()} is not HIT; lookup must have said so in this step")
        self._slots.pin_all(slots)
        self._loading.begin(request, keys, slots)
        request.loading += len(keys)
        request.waiting_since = None
        if request.held:
            self._promotion.release(request, slots)
        return slots

    def complete_load(self, keys: Sequence[Key], ctx: RequestContext, success: bool = True) -> None:
        """The engine has copied these chunks, or failed to. Completions of loads that a reset has voided are
        taken too; what belongs to nothing is ignored."""
        self._begin_step()
        ended, others = self._loading.end(ctx.req_id, keys)
        for copies in ended:
            self._finish_load(copies, success)
        for key in others:
            self._slots.release_quarantined(key, ctx.req_id)

    # Stores

    def prepare_store(self, keys: Sequence[Key], ctx: RequestContext, partial: bool = True) -> StoreOffer | None:
        """Slots for those of these chunks that are neither here nor on their way; the head of the prompt first.

        Granted is the longest prefix of them that fits now, up to the first of which a transfer begun before a
        reset still uses the slot. The rest is refused and may be offered again; None where that is all of them, or
        any of them and not `partial`.
        Making room evicts, but never a chunk of the same request: a prompt larger than the pool keeps its head.
        """
        self._begin_step()
        request = self._requests.get(ctx, "prepare_store")
        request.waiting_since = None  # who stores runs, and waits no longer
        offered = dict.fromkeys(keys)
        request.keys.update(offered)
        new = self._slots.absent(offered)
        room, victims = self._room_for(new, request)
        granted, refused = new[:room], new[room:]
        if refused:
            self._primary.refuse(refused)
            if not (granted and partial):
                return None
        evicted = self._primary.evict(victims)
        slots = self._slots.allocate(granted, SlotState.STORING)
        self._storing.begin(request, granted, slots)
        request.storing += len(granted)
        return StoreOffer(granted, slots, evicted, refused)

    def complete_store(self, keys: Sequence[Key], ctx: RequestContext, success: bool = True) -> None:
        """The engine has written these chunks: they are HIT from here on, and cascade. Or it has failed to: they
        are MISS. Completions of stores that a reset has voided are taken too; what belongs to nothing is
        ignored."""
        self._begin_step()
        ended, others = self._storing.end(ctx.req_id, keys)
        for copies in ended:
            self._finish_store(copies, success)
        for key in others:
            self._slots.release_quarantined(key, ctx.req_id)

    # Steps

    def on_schedule_end(self) -> None:
        """The step ends: what its lookups wanted is submitted."""
        self._begin_step()
        self._lookups.flush(self._now)
        self._promotion.flush(self._now)
        self._demotion.advance(self._now)
        self._cascade.resume(self._now)
        self._release_overdue()
        self._pinboard.release_overdue(self._now)
        self._chain.start()
        self._slots.end_step()
        self._stepping = False

    def has_pending_work(self) -> bool:
        """True exactly while something needs further steps: a promotion or cascade that has not been reported, or
        a finished request whose stores have not completed."""
        return self._chain.awaited or self._requests.storing_after_finish

    @property
    def capacity(self) -> int:
        """How many chunks primary holds."""
        return self._slots.capacity

    @property
    def jobs_under_way(self) -> int:
        """Jobs that wait or run, the manager's own moves between tiers included. As long as there are any, an
        offer that was refused may be granted later."""
        return self._chain.under_way

    @property
    def requests_known(self) -> int:
        """Requests of which something is kept: those that run, and those that have not had their last event."""
        return len(self._requests)

    def take_events(self) -> list[Event]:
        """What tiers have come to hold and lost since the last call."""
        return self._events.take()

    def get_stats(self) -> StackStats:
        """The counters up to now. May be called from any thread."""
        stats = self._stats.copy([self._primary.snapshot(), *(level.snapshot() for level in self._chain.levels)])
        stats.free_slots, stats.pinned_slots = self._slots.free, self._slots.pinned
        return stats

    # These wait

    def reset_cache(
        self, scope: Literal["all", "primary"] | None = None, weights_version: str = "", timeout: float = 10.0
    ) -> ResetReport:
        """Voids what is cached: in primary, or (`all`) in every tier, durably.

        Queued transfers are withdrawn, running ones waited for, up to `timeout` seconds. Slots that the engine is
        copying to or from stay out of use, and their keys can't be stored, until those copies are completed.
        `weights_version` names the weights that follow, for tiers that outlive this process.
        """
        self._begin_step()
        scope = scope or self._reset_scope
        end = time.monotonic() + timeout
        self._chain.drain(timeout)
        self._read_results(overdue=inf)
        copies: dict[Key, list[str]] = {}
        for key, req_id in chain(self._storing, self._loading):
            copies.setdefault(key, []).append(req_id)
        for request in self._requests:
            self._promotion.release(request)
            request.forget_transfers()
        self._storing.clear()
        self._loading.clear()
        self._pinboard.reset()
        self._promotion.reset()
        self._demotion.reset()
        self._cascade.reset()
        self._primary.clear(copies)
        for request in self._requests.ending:
            self._end_if_over(request)
        names = tuple(level.name for level in self._chain.levels)
        failed = (
            self._chain.void(weights_version, max(timeout / 10, end - time.monotonic()), self._now)
            if scope == "all"
            else {}
        )
        cleared = tuple(name for name in names if name not in failed) if scope == "all" else ()
        return ResetReport(
            cleared=(self._primary.stats.name, *cleared),
            kept=names if scope == "primary" else (),
            failed=failed,
            quarantined=self._slots.quarantine_size,
        )

    def shutdown(self, timeout: float = 10.0) -> None:
        """Ends all: stores that wait are given up to `timeout` seconds to reach their tiers, then every tier is
        closed, whatever the others do; the pool is unmapped only if no thread can still use it. A second call does
        nothing.

        Raises:
            Exception: the first error of closing a tier, after all have been closed.
        """
        if self._closed:
            return
        self._closed = True
        if self._summary:
            self._summary.close()
        end = time.monotonic() + timeout
        self._chain.flush(timeout)
        ended, problems = self._chain.close(max(timeout / 10, end - time.monotonic()))
        if ended:
            self.pool.close()
        if problems:
            raise problems[0]

    def __enter__(self) -> "SecondaryTierManager":
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    # Within a step

    def _begin_step(self) -> None:
        if self._stepping:
            return
        if self._closed:
            raise ClosedError("the manager was shut down")
        self._stepping = True
        self._now = self._clock()
        self._read_results()
        self._promotion.fill(self._now)

    def _read_results(self, overdue: float | None = None) -> None:
        """Brings all up to date with what the lanes say."""
        for level, report in self._chain.poll(self._now, overdue):
            report.job.flow.ended(level, report, self._now)

    def _room_for(self, keys: Sequence[Key], request: Request) -> tuple[int, list[int]]:
        """How many leading ones of these absent keys can be stored now, and the slots that have to go for them."""
        storable = keys
        if self._slots.quarantine_size:
            storable = list(takewhile(lambda key: not self._slots.quarantined(key), keys))
        spare = request.keys if len(request.keys) > len(keys) else ()  # else it has none here
        victims = self._slots.coldest(len(storable) - self._slots.free, spare)
        if self._cascade.keeps(victims, self._now):
            victims = []
        return min(len(storable), self._slots.free + len(victims)), victims

    def _use(self, keys: Sequence[Key], request: Request) -> None:
        self._slots.touch(keys, request.number)
        self._chain.touch(keys, request.number)
        self._cascade.again(keys, request.owner, self._now)

    def _finish_store(self, copies: Ended, success: bool) -> None:
        request, keys, slots = copies
        request.storing -= len(keys)
        if success:
            self._slots.publish_all(slots)
            self._primary.stored(keys)
            self._cascade.store(keys, request.owner, self._now, request.wishes.priority)
            if request.finished:  # its last use came before this, but is one of what comes to the tiers below, too
                self._chain.touch(keys, request.number)
            self._slots.unpin_all(slots)
        else:
            for slot in slots:
                self._slots.discard(slot)
        self._end_if_over(request)

    def _finish_load(self, copies: Ended, success: bool) -> None:
        request, keys, slots = copies
        request.loading -= len(keys)
        self._slots.unpin_all(slots)
        request.answers.update(dict.fromkeys(keys, Delivery.DELIVERED if success else Delivery.FAILED))
        if success:
            self._primary.loaded(keys)
        self._end_if_over(request)

    def _release_overdue(self) -> None:
        """What was promoted for a request that does not come for it is pinned no longer than a deadline."""
        for request in self._promotion.overdue(self._now):
            self._promotion.release(request)

    def _end_if_over(self, request: Request) -> None:
        """After its last event: counts what became of its chunks, and tells the lanes, once."""
        if request.finished and not request.storing and not request.finish_sent:
            request.finish_sent = True
            self._chain.finish(request.owner)
        if request.over and self._requests.drop(request):
            self._tally(request)

    def _tally(self, request: Request) -> None:
        stats, answers = self._stats, request.answers
        delivered, failed = Delivery.DELIVERED, Delivery.FAILED
        hits = [key for key, answer in answers.items() if answer is delivered]
        stats.requests += 1
        stats.lookups += len(answers)
        stats.hits += len(hits)
        self._count_hits(hits, request)
        if len(hits) == len(answers):
            return
        for answer in answers.values():
            if isinstance(answer, MissReason):
                stats.misses[answer] += 1
            elif answer is failed:
                stats.failed += 1
            elif answer is not delivered:
                stats.unused += 1

    def _count_hits(self, keys: Sequence[Key], request: Request) -> None:
        """Of each tier, what was found in it."""
        promoted = [request.sources[key] for key in keys if key in request.sources] if request.sources else []
        self._primary.stats.hits += len(keys) - len(promoted)
        for place in promoted:
            self._chain.levels[place].stats.hits += 1
