"""What a stack of `StackWorld` is made of."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcascade.configs.schema import SecondarySettings, StackSettings
from kvcascade.tiers.host import HostSettings
from kvcascade.tiers.memory import MemorySettings

from .bytes import key_for
from .stack_media import ShelfSettings

__all__ = ["CHUNK", "PROMPTS", "STAGING", "Shape", "TierShape", "settings_of"]

CHUNK = 64
STAGING = 3
_STRIDE = 4096
_TREE = ((0, 1, 2, 3), (0, 1, 2, 4, 5), (0, 1, 6), (0, 7, 8, 9, 10, 11), (12, 13, 14, 15), (12, 16))
PROMPTS = tuple(tuple(map(key_for, path)) for path in _TREE)
"""Prompts that share prefixes, as keys."""


@dataclass(frozen=True)
class TierShape:
    """One secondary tier."""

    chunks: int = 5
    """Its capacity; a shared one has none."""
    shared: bool = False
    """Others write to it, too."""
    write: str = "through"
    promote: str | int = "always"
    """A number: from the use of that number on."""
    admit_after: int = 1
    ttl: float | None = None
    eviction: str = "lru"


@dataclass
class Shape:
    """What stack it is, and how bad its media are."""

    slots: int = 6
    tiers: Sequence[TierShape] = (TierShape(),)
    eviction: str = "lru"
    """That of primary."""
    weights: str = ""
    """Names the weights at the start."""
    queue: float = 1.0
    concurrency: int = 2
    seed: int = 0
    faults: dict[str, float] = field(default_factory=dict)


def settings_of(shape: Shape) -> StackSettings:
    """The settings of such a stack; its secondary tiers are called t0, t1, ..."""
    host = HostSettings(
        capacity=(shape.slots + 1) * _STRIDE, staging=(STAGING + 1) * _STRIDE, eviction=shape.eviction
    )
    tiers = (host, *(_tier(shape, place, tier) for place, tier in enumerate(shape.tiers)))
    return StackSettings.model_validate(
        {"version": 1, "log_every": "0s", "weights_version": shape.weights, "tiers": tiers}
    )


def _tier(shape: Shape, place: int, tier: TierShape) -> SecondarySettings:
    common = {
        "name": f"t{place}",
        "queue": shape.queue,
        "concurrency": shape.concurrency,
        "deadline": "2s",
        "write": tier.write,
        "promote": tier.promote if isinstance(tier.promote, str) else {"after": tier.promote},
        "admit_after": tier.admit_after,
    }
    if tier.shared:
        return ShelfSettings.model_validate(common | {"probe_ttl": "5s"})
    if tier.ttl is not None:
        common["ttl"] = f"{tier.ttl}s"
    return MemorySettings.model_validate(common | {"capacity": tier.chunks * CHUNK, "eviction": tier.eviction})
