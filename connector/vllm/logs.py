"""Makes the lines of the logger `kvcascade` visible where vLLM's are."""

import logging

from kvcascade.manager import ResetReport

__all__ = ["log_reset", "share_handlers"]

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
