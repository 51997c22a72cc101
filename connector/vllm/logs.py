"""Makes the lines of the logger `kvcascade` visible where vLLM's are."""

import logging

__all__ = ["share_handlers"]


def share_handlers() -> None:
    """Gives the logger `kvcascade` the handlers and the level of vLLM's logger, where it has no handler itself."""
    ours, theirs = logging.getLogger("kvcascade"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
    ours.propagate = False
