"""Sizes and durations, as people write them."""

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

__all__ = ["Duration", "Size", "format_duration", "format_size", "parse_duration", "parse_size"]

_BINARY = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "PiB": 1 << 50}
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZE_UNITS = _BINARY | _DECIMAL
_DURATION_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST = 10**12
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: Any) -> int:
    """Bytes from 5368709120, "5368709120", "5GiB" or "5GB" (10**9 bytes a GB).

    Raises:
        ValueError: it is none of these, or not a whole number of bytes; the text says what is allowed.
    """
    number, unit = _split(value, "a size such as 512MiB, 8GiB or 5GB")
    factor = 1 if not unit else _SIZE_UNITS.get(unit)
    if factor is None:
        raise ValueError(f"unknown unit {unit!r}{_nearest(unit, _SIZE_UNITS)}; allowed: {', '.join(_SIZE_UNITS)}")
    size = number * factor
    if size >= 1 << 63:
        raise ValueError("expected less than 8 EiB")
    if size != int(size):
        raise ValueError(f"{value!r} is not a whole number of bytes")
    return int(size)


def parse_duration(value: Any) -> float:
    """Seconds from "500ms", "2s", "1.5h"; a bare number is refused, except 0.

    Raises:
        ValueError: it is none of these; the text says what is allowed.
    """
    number, unit = _split(value, "a duration such as 500ms, 2s or 24h")
    if not unit:
        if number == 0:
            return 0.0
        raise ValueError(f"{value!r} has no unit; allowed: {', '.join(_DURATION_UNITS)}")
    factor = _DURATION_UNITS.get(unit)
    if factor is None:
        raise ValueError(
            f"unknown unit {unit!r}{_nearest(unit, _DURATION_UNITS)}; allowed: {', '.join(_DURATION_UNITS)}"
        )
    if number > _LONGEST:
        raise ValueError(f"expected less than {_LONGEST:g} of a unit")
    return number * factor


def format_size(size: float) -> str:
    """The size in the largest binary unit that leaves a number of at least 1: "1.5 GiB"."""
    for unit, factor in reversed(_BINARY.items()):
        if abs(size) >= factor:
            return f"{size / factor:.4g} {unit}"
    return f"{size:.4g} B"


def format_duration(seconds: float) -> str:
    """The duration in a unit that suits it: "500ms", "2s", "24h"."""
    if seconds == 0:
        return "0s"
    for unit, factor in reversed(_DURATION_UNITS.items()):
        if seconds >= factor:
            return f"{seconds / factor:.4g}{unit}"
    return f"{seconds * 1e6:.4g}us"


def _exact_size(size: int) -> str:
    """The same size in the largest unit that leaves a whole number: "8GiB", "5GB", "1025B"."""
    whole = [(unit, factor) for unit, factor in _SIZE_UNITS.items() if size and size % factor == 0]
    unit, factor = max(whole, key=lambda item: item[1], default=("B", 1))
    return f"{size // factor}{unit}"


def _exact_duration(seconds: float) -> str:
    """The same duration in the largest unit that leaves a whole number, else in seconds."""
    for unit, factor in reversed(_DURATION_UNITS.items()):
        if seconds and seconds == round(seconds / factor) * factor:
            return f"{round(seconds / factor)}{unit}"
    return f"{seconds:.17g}s"


def _split(value: Any, wanted: str) -> tuple[float, str]:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"expected {wanted}")
    if isinstance(value, int | float):
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"expected {wanted}; finite, not negative")
        return value, ""
    match = _NUMBER.fullmatch(value)
    if not match:
        raise ValueError(f"expected {wanted}")
    digits, unit = match.groups()
    return (float(digits) if "." in digits else int(digits)), unit


def _nearest(unit: str, units: dict[str, Any]) -> str:
    by_fold = {known.casefold(): known for known in units}
    fold = unit.casefold()
    known = by_fold.get(fold) or by_fold.get(fold + "b") or by_fold.get(fold[:1])
    return f" (did you mean {known}?)" if known else ""


Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(_exact_size, return_type=str, when_used="json"),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["8GiB", "512MiB", 5368709120]}),
]
"""Bytes; in YAML a number or a text with a unit."""

Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(_exact_duration, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "examples": ["500ms", "2s", "24h"]}),
]
"""Seconds; in YAML a text with a unit."""
