"""What a request may say of how long its chunks are worth keeping."""

import logging
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from kvcascade.configs.units import parse_duration
from kvcascade.types import RequestContext

__all__ = ["Priority", "Wishes", "wishes_of"]

logger = logging.getLogger("kvcascade")

Priority: TypeAlias = Literal["low", "normal", "high"]
_PRIORITIES: tuple[Priority, ...] = ("low", "normal", "high")


class Wishes(NamedTuple):
    """What a client asks for, as far as it makes sense."""

    priority: Priority = "normal"
    """`low`: not worth a write to the tiers that receive `through`; `high`: worth one at the first use, whatever
    `admit_after` says."""
    pin_for: float = 0.0
    """Seconds for which the chunks are to stay in primary after the request has finished."""


_NONE = Wishes()


def wishes_of(ctx: RequestContext) -> Wishes:
    """Reads `{"kvcascade": {"priority": "high", "pin_for": "10m"}}` in the request's `kv_transfer_params`.

    A client may send anything there: what makes no sense is ignored, with one line in the log.
    """
    params = getattr(ctx, "kv_transfer_params", None)
    asked = params.get("kvcascade") if isinstance(params, Mapping) else None
    if asked is None:
        return _NONE
    try:
        return _parse(asked)
    except ValueError as error:
        logger.warning("request %s: kv_transfer_params.kvcascade is ignored: %s", ctx.req_id, error)
        return Wishes()


def _parse(asked: Any) -> Wishes:
    if not isinstance(asked, Mapping):
        raise ValueError("expected a mapping")
    unknown = set(asked) - {"priority", "pin_for"}
    if unknown:
        raise ValueError(f"unknown key {min(unknown, key=str)!r}; allowed: priority, pin_for")
    priority = asked.get("priority", "normal")
    if priority not in _PRIORITIES:
        raise ValueError(f"priority: expected one of {', '.join(_PRIORITIES)}")
    return Wishes(priority, parse_duration(asked.get("pin_for", "0s")))
