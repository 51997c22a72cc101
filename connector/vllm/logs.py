"""Makes the lines of the logger `kvcascade` visible where vLLM's are."""

import logging
from typing import Any

from kvcascade import __version__
from kvcascade.configs.units import format_size
from kvcascade.manager import ResetReport
from kvcascade.manager.stats import StackStats
from kvcascade.types import Namespace

from . import compat

__all__ = ["log_reset", "log_start", "share_handlers"]

logger = logging.getLogger("kvcascade")


def share_handlers() -> None:
    """Gives the logger `kvcascade` the handlers and the level of vLLM's logger, where it has no handler itself."""
    ours, theirs = logging.getLogger("kvcascade"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False


def log_start(where: str, stats: StackStats, chunk_bytes: int, offloading: Any, namespace: Namespace) -> None:
    """What there is, and how many tokens each tier holds. `offloading`: vLLM's configuration of what is kept; of
    several cache groups each has its own chunks for the same tokens."""
    block = max(group.tokens_per_block for group in offloading.groups)
    tokens = block * offloading.cache.blocks_per_chunk / len(offloading.groups)
    tiers = [
        f"{tier.name} without a bound"
        if tier.capacity is None
        else f"{tier.name} {format_size(tier.capacity)} = {int(tier.capacity // chunk_bytes * tokens):,} tokens"
        for tier in stats.tiers
    ]
    logger.info(
        "KVCascade %s %s %s: %s; chunks of %s; namespace %s (%s)",
        __version__,
        where,
        compat.version,
        ", ".join(tiers),
        format_size(chunk_bytes),
        namespace.digest.hex(),
        namespace,
    )


def log_reset(report: ResetReport) -> None:
    """What a reset has done. vLLM's own answer to its client hardly tells."""
    logger.info(
        "reset: cleared %s; kept %s; %d slots are still being copied",
        ", ".join(report.cleared),
        ", ".join(report.kept) or "none",
        report.quarantined,
    )
    for tier, problem in report.failed.items():
        logger.error("reset: tier %r could not be cleared, and serves nothing until it could: %s", tier, problem)
