"""Drives a manager as an engine does, with bytes that are derived from the keys."""

import time
from collections.abc import Callable, Sequence

from kvcascade.manager import SecondaryTierManager
from kvcascade.types import Key, LookupResult, PrefixMatch, RequestContext, StoreOffer

from .bytes import fill, holds

__all__ = ["Driver", "ManualClock"]

_HANG = 30.0


class ManualClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Driver:
    """An engine in a few lines: it stores `bytes_for(key)` and compares every byte that it loads.

    Attributes:
        manager: what is driven.
        running: the requests that have begun and not finished, by their ids.
    """

    def __init__(self, manager: SecondaryTierManager, epoch: str = "") -> None:
        self.manager = manager
        self.epoch = epoch
        self.running: dict[str, RequestContext] = {}

    def begin(self, req_id: str) -> RequestContext:
        """A new request."""
        ctx = self.running[req_id] = RequestContext(req_id)
        self.manager.on_new_request(ctx)
        return ctx

    def finish(self, ctx: RequestContext) -> None:
        del self.running[ctx.req_id]
        self.manager.on_request_finished(ctx)

    def offer(self, ctx: RequestContext, keys: Sequence[Key]) -> StoreOffer | None:
        """Offers these chunks, and writes those that were granted."""
        offer = self.manager.prepare_store(keys, ctx)
        if offer is not None:
            self.write(offer)
        return offer

    def write(self, offer: StoreOffer) -> None:
        """Writes the granted chunks into their slots."""
        for key, slot in zip(offer.keys, offer.slots, strict=True):
            fill(self.manager.pool.slot(slot), key, self.epoch)

    def store(self, ctx: RequestContext, keys: Sequence[Key]) -> list[Key]:
        """Offers, writes and completes these chunks; returns those that were granted.

        Raises:
            AssertionError: some of the offer was refused.
        """
        offer = self.offer(ctx, keys)
        if offer is None or offer.refused:
            raise AssertionError(f"the store of {len(keys)} chunks was refused")
        self.manager.complete_store(offer.keys, ctx)
        return offer.keys

    def load(self, ctx: RequestContext, keys: Sequence[Key]) -> None:
        """Loads these chunks, which are HIT, and compares every byte.

        Raises:
            AssertionError: a byte is wrong.
        """
        slots = self.manager.prepare_load(keys, ctx)
        for key, slot in zip(keys, slots, strict=True):
            if not holds(self.manager.pool.slot(slot), key, self.epoch):
                raise AssertionError(f"slot {slot} does not hold the bytes of {key.hex()}")
        self.manager.complete_load(keys, ctx)

    def step(self, steps: int = 1) -> None:
        """So many steps end, without waiting for anything."""
        for _ in range(steps):
            self.manager.on_schedule_end()

    def settle(self) -> None:
        """Steps until nothing is pending, the manager's own moves between tiers included.

        Raises:
            TimeoutError: it still is after 30 seconds.
        """
        self.until(lambda: not (self.manager.has_pending_work() or self._queued()), "pending work does not end")

    def match(self, ctx: RequestContext, keys: Sequence[Key]) -> PrefixMatch:
        """Asks step by step until the prefix is decided."""
        found: list[PrefixMatch] = []

        def decided() -> bool:
            found.append(self.manager.match_prefix(keys, ctx))
            return not found[-1].pending

        self.until(decided, "the prefix is never decided")
        return found[-1]

    def lookup(self, ctx: RequestContext, key: Key) -> LookupResult:
        """Asks step by step until the key is decided."""
        found: list[LookupResult] = []

        def decided() -> bool:
            found.append(self.manager.lookup(key, ctx))
            return found[-1] in (LookupResult.HIT, LookupResult.MISS)

        self.until(decided, "the lookup is never decided")
        return found[-1]

    def serve(self, req_id: str, keys: Sequence[Key]) -> int:
        """A whole request: loads the prefix that is found, stores the rest, finishes. Returns the chunks found."""
        ctx = self.begin(req_id)
        hits = self.match(ctx, keys).hits
        self.manager.touch(keys[:hits], ctx)
        self.load(ctx, keys[:hits])
        if keys[hits:]:
            self.store(ctx, keys[hits:])
        self.finish(ctx)
        self.settle()
        return hits

    def check_at_rest(self) -> None:
        """Raises `AssertionError` where something is left of the requests, which have all finished."""
        self.settle()
        stats = self.manager.get_stats()
        resident = stats.tiers[0].chunks
        capacity = (stats.tiers[0].capacity or 0) // self.manager.pool.slot_bytes
        left = {
            "pinned slots": stats.pinned_slots,
            "missing slots": capacity - stats.free_slots - resident,
            "requests": self.manager.requests_known,
            "queued jobs": self._queued(),
            "lookups without an outcome": stats.lookups
            - stats.hits
            - stats.unused
            - stats.failed
            - stats.misses.total(),
        }
        if any(left.values()):
            raise AssertionError(f"left at rest: { ({what: number for what, number in left.items() if number}) }")

    def _queued(self) -> int:
        return sum(tier.queue for tier in self.manager.get_stats().tiers)

    def until(self, done: Callable[[], bool], complaint: str) -> None:
        """Steps until `done()`.

        Raises:
            TimeoutError: it is not after 30 seconds.
        """
        end = time.monotonic() + _HANG
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"{complaint}, after {_HANG:g} s")
            self.step()
            time.sleep(0.0005)
