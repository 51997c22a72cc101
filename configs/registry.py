"""Finds tier types and eviction policies by name, through entry points: nothing is listed here by hand."""

from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvcascade.errors import ConfigError

__all__ = ["EVICTION", "TIERS", "known", "nearest", "resolve"]

TIERS = "kvcascade.tiers"
EVICTION = "kvcascade.eviction"

_KIND = {TIERS: "tier type", EVICTION: "eviction policy"}


@cache
def known(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, of all installed packages."""
    return {point.name: point for point in entry_points(group=group)}


def nearest(name: str, names: "list[str] | dict[str, Any]") -> str:
    """ " (did you mean X?)", or "" where nothing is near."""
    match = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


def resolve(group: str, name: str) -> Any:
    """The object that an entry point names, imported now.

    Raises:
        ConfigError: nothing of that name is installed, or what it names can't be imported; with what is there,
            the nearest name, and a hint how to install it.
    """
    points = known(group)
    if name not in points:
        raise ConfigError(
            f"unknown {_KIND[group]} {name!r}{nearest(name, points)}; allowed: {', '.join(sorted(points))}. "
            f"If another package brings it, install that package here with pip (it declares it as an entry point "
            f"of {group!r})"
        )
    point = points[name]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        package = point.dist.name if point.dist else point.value
        raise ConfigError(
            f"{name!r} is declared by the package {package} but can't be imported: {error}. "
            f"Reinstall it with: pip install --force-reinstall {package}"
        ) from error
