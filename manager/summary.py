"""One line in the log, now and then, that says how the stack does."""

import logging
from collections.abc import Callable
from threading import Event, Thread

from kvcascade.configs.units import format_size

from .stats import StackStats, TierStats

__all__ = ["SummaryLog"]

logger = logging.getLogger("kvcascade")


class SummaryLog:
    """A thread of its own, so that nothing is logged on the engine's step path."""

    def __init__(self, every: float, get_stats: Callable[[], StackStats]) -> None:
        """`every`: seconds between two lines."""
        self._every = every
        self._get_stats = get_stats
        self._closing = Event()
        self._thread = Thread(target=self._work, name="kvcascade-summary", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closing.wait(self._every):
            logger.info("%s", _line(self._get_stats()))


def _line(stats: StackStats) -> str:
    rate = stats.hits / stats.lookups if stats.lookups else 0.0
    tiers = "; ".join(_tier(tier, stats.lookups) for tier in stats.tiers)
    return f"{stats.requests} requests, {stats.lookups} chunks looked up, {rate:.1%} delivered; {tiers}"


def _tier(tier: TierStats, lookups: int) -> str:
    """What it holds, what share of all that was looked up it gave, and what it has taken and what not."""
    rate = tier.hits / lookups if lookups else 0.0
    bound = f" of {format_size(tier.capacity)}" if tier.capacity is not None else ""
    down = "" if tier.up else " DOWN"
    return (
        f"{tier.name}{down}: {tier.chunks} chunks, {format_size(tier.bytes)}{bound}, "
        f"{tier.hits} hits ({rate:.1%}), {tier.written} stored, {tier.refused + tier.shed} refused"
    )
