"""What vLLM calls the places where our tiers keep their chunks."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kvcascade.configs.schema import TierBase
from kvcascade.manager.events import Event

from . import compat

__all__ = ["Place", "allowed", "in_vllm", "place_of"]


class Place(NamedTuple):
    """One tier in vLLM's terms."""

    name: str
    medium: Any
    locality: Any
    """None: not known."""
    source: Any
    owner: str | None
    """As KV events name it: None for primary."""
    tells_removals: bool
    """Whether an event comes for each chunk that goes."""


def place_of(tier: TierBase) -> Place:
    """The tier's place; what a tier type that is not known here is, is not guessed."""
    medium, local, source = compat.Medium, compat.Locality, compat.CacheHitSource
    if tier.type == "host":
        return Place(tier.name, medium.CPU, local.LOCAL, source.HOST, None, True)
    known = {
        "disk": (local.LOCAL, source.DISK),
        "fs": (None, source.DISK),
        "redis": (local.REMOTE, source.EXTERNAL_UNSPECIFIED),
        "s3": (local.REMOTE, source.EXTERNAL_UNSPECIFIED),
    }
    locality, hit_source = known.get(tier.type, (None, source.EXTERNAL_UNSPECIFIED))
    return Place(tier.name, medium.STORAGE, locality, hit_source, tier.name, tier.type == "disk")


def allowed(places: Iterable[Place], tiers: Any) -> frozenset[str] | None:
    """The names of the tiers that a client's `kv_load_tiers` allows; None for all of them."""
    if tiers is compat.TierFilter.ALL:
        return None
    return frozenset(place.name for place in places if tiers.allows(place.medium, place.locality))


def in_vllm(events: Iterable[Event], places: Mapping[str, Place]) -> Iterator[Any]:
    """Our events as vLLM's."""
    for event in events:
        place = places[event.tier]
        yield compat.OffloadingEvent(
            keys=list(event.keys),
            medium=place.medium,
            removed=event.removed,
            locality=place.locality,
            ownership=place.owner,
            removal_expected=place.tells_removals,
        )
