"""The schema of a tier stack: what one YAML file may say, with the defaults.

The settings class of each tier type stands beside its tier and derives from `PrimarySettings` or
`SecondarySettings`. All are strict (no guessing between types), frozen, and refuse unknown keys.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    SerializeAsAny,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from kvcascade.errors import ConfigError

from .masking import masked
from .registry import EVICTION, TIERS, known, resolve
from .units import Duration, Size

__all__ = [
    "CONTRADICTION",
    "BoundedSettings",
    "BreakerSettings",
    "EvictionName",
    "PinningSettings",
    "PrimarySettings",
    "PromoteAfter",
    "SecondarySettings",
    "Settings",
    "SharedSettings",
    "StackSettings",
    "TierBase",
    "Watermarks",
    "tier_class",
]

CONTRADICTION = "contradiction"
"""The type of pydantic's error for settings that are right each, but not together: `ctx["found"]` holds a
(key path below that of the error, text) for each."""

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"


def _name(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise ValueError("expected 1 to 63 letters, digits, '_', '-' or '.', the first a letter or digit")
    return name


TierName = Annotated[str, AfterValidator(_name), WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"})]
Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
NonZeroSize = Annotated[Size, Field(gt=0)]
NonZeroDuration = Annotated[Duration, Field(gt=0)]


def _policy(name: str) -> str:
    try:
        resolve(EVICTION, name)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return name


EvictionName = Annotated[str, AfterValidator(_policy)]
"""The name of an eviction policy that is installed, by entry point."""


class Settings(BaseModel):
    """The base of all settings: data only; what runs is built from it once."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", hide_input_in_errors=True)

    not_served: ClassVar[dict[str, str]] = {}
    """Keys whose names are settled but that this version serves only with their default: key -> what it does
    instead, in words."""

    @field_validator("*", mode="after")
    @classmethod
    def _refuse_not_served(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.field_name or ""
        if name in cls.not_served and value != cls.model_fields[name].get_default(call_default_factory=True):
            raise ValueError(f"not served yet by this version; {cls.not_served[name]}")
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(value, name or "")


class PinningSettings(Settings):
    """How far requests may have their chunks kept in primary."""

    share: Annotated[float, Field(ge=0, le=0.5)] = 0.1
    """Of primary's slots, all requests together; 0: none."""
    longest: NonZeroDuration = 600.0


class TierBase(Settings):
    """What every tier has."""

    type: str
    name: TierName = Field(default_factory=lambda data: data.get("type", ""))
    """Unique in the stack; used in metrics, logs and commands. Default: the type."""

    @model_validator(mode="after")
    def _eviction_needs_capacity(self) -> Self:
        if "eviction" in self.model_fields_set and getattr(self, "capacity", 0) is None:
            raise PydanticCustomError(
                CONTRADICTION,
                "eviction without capacity",
                {"found": [(("eviction",), "evicts nothing without a capacity; give one, or leave eviction out")]},
            )
        return self

    def claims(self) -> frozenset[str]:
        """Things in the world that only one tier of a stack may use (a folder, a bucket's prefix), in words."""
        return frozenset()


class Watermarks(Settings):
    """Shares of the capacity between which demotion runs ahead of need."""

    high: Fraction = 0.95
    low: Fraction = 0.90

    @model_validator(mode="after")
    def _low_below_high(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g})")
        return self


class BreakerSettings(Settings):
    """When a tier counts as down, and how often it is tried again."""

    failures: Annotated[int, Field(ge=1)] = 5
    probe_every: NonZeroDuration = 5.0


class PromoteAfter(Settings):
    """Promotion from the n-th use on."""

    after: Annotated[int, Field(ge=1)]


class PrimarySettings(TierBase):
    """The first tier: the pool that exchanges bytes with the engine."""

    capacity: NonZeroSize
    """Bytes of the pool, per engine, all ranks together."""
    eviction: EvictionName = "arc"
    watermarks: Watermarks = Watermarks()
    staging: Size = 64 << 20
    pin: Literal["auto"] | bool = "auto"
    hugepages: bool = False

    not_served = {
        "pin": "memory is page-locked by the worker of an engine",
        "hugepages": "the pool uses pages of the usual size",
    }


class SecondarySettings(TierBase):
    """What every tier behind the primary one has."""

    write: Literal["through", "on_evict", "off"] = "through"
    """How this tier receives: `through`: from primary, when a store has completed; `on_evict`: what the tier
    directly above evicts; `off`: nothing new."""
    fill: bool = True
    """Receives too what is promoted from below it."""
    promote: Literal["always", "never"] | PromoteAfter = "always"
    ttl: NonZeroDuration | None = None
    deadline: NonZeroDuration = 2.0
    """Seconds an operation may take, waiting and retries included."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = 4
    """Threads, and with them connections and operations at a time."""
    queue: Fraction = 0.125
    """Share of primary's slots that stores waiting for this tier may pin; beyond it they are shed."""
    admit_after: Annotated[int, Field(ge=1)] = 1
    """Stores chunks only from their n-th use on."""
    retries: Annotated[int, Field(ge=0, le=10)] = 0
    breaker: BreakerSettings = BreakerSettings()

    @property
    def evicted_by_us(self) -> bool:
        """Whether the manager chooses what goes, so that the tier below can receive it."""
        return getattr(self, "eviction", None) is not None


class BoundedSettings(SecondarySettings):
    """A tier with a hard capacity, whose victims the manager chooses."""

    capacity: NonZeroSize
    eviction: EvictionName = "lru"


def tier_class(kind: str) -> type[TierBase]:
    """The settings class of a tier type, imported now.

    Raises:
        ConfigError: it is not installed, or can't be used.
    """
    found = resolve(TIERS, kind)
    if not (isinstance(found, type) and issubclass(found, TierBase)):
        raise ConfigError(
            f"{kind!r} is declared by {known(TIERS)[kind].value}, which is no settings class of a tier"
        )
    return found


class SharedSettings(SecondarySettings):
    """A tier that others write to too, so that it has to be asked what it holds."""

    fill: bool = False
    probe_ttl: NonZeroDuration = 10.0
    """Seconds for which an existence answer is believed."""


class StackSettings(Settings):
    """A whole stack. The order of `tiers` is the chain; the first is the primary tier."""

    version: Literal[1]
    """Of the stack's format."""
    namespace: str = ""
    """Added to the identity that the engine gives: a tenant, for example."""
    weights_version: str = ""
    """Names the weights, where an engine changes them in place."""
    io: Literal["process", "thread"] = "thread"
    """Where lanes run: in the engine's process, or in one of their own."""
    reset_scope: Literal["all", "primary"] = "all"
    pinning: PinningSettings = PinningSettings()
    log_every: Duration = 60.0
    """Seconds between two summary lines in the log; 0 = none."""
    tiers: Annotated[tuple[SerializeAsAny[InstanceOf[TierBase]], ...], Field(min_length=1)]

    @field_validator("version", mode="before")
    @classmethod
    def _readable(cls, version: Any) -> Any:
        if type(version) is not int or version != 1:  # True is 1, too
            raise ValueError("this release reads version 1")
        return version

    @field_validator("tiers")
    @classmethod
    def _chain(cls, tiers: tuple[TierBase, ...]) -> tuple[TierBase, ...]:
        found = [*_misplaced(tiers), *_namesakes(tiers), *_sharing(tiers), *_demoting(tiers)]
        if found:
            text = "; ".join(text for _, text in found).replace("{", "{{")
            raise PydanticCustomError(CONTRADICTION, text, {"found": found})
        return tiers

    @property
    def primary(self) -> PrimarySettings:
        first = self.tiers[0]
        if not isinstance(first, PrimarySettings):
            raise TypeError("validated above")
        return first

    @property
    def secondary(self) -> tuple[SecondarySettings, ...]:
        return tuple(tier for tier in self.tiers[1:] if isinstance(tier, SecondarySettings))


_Found: TypeAlias = "Iterator[tuple[tuple[str | int, ...], str]]"


def _misplaced(tiers: tuple[TierBase, ...]) -> _Found:
    if not isinstance(tiers[0], PrimarySettings):
        yield (0, "type"), f"{tiers[0].type!r} can't be the first tier; that is of type 'host'"
    for place, tier in enumerate(tiers[1:], 1):
        if not isinstance(tier, SecondarySettings):
            yield (place, "type"), f"{tier.type!r} can only be the first tier"


def _demoting(tiers: tuple[TierBase, ...]) -> _Found:
    for place, tier in enumerate(tiers[1:], 1):
        above = tiers[place - 1]
        makes_room = isinstance(above, SecondarySettings) and not above.evicted_by_us
        if isinstance(tier, SecondarySettings) and tier.write == "on_evict" and makes_room:
            yield (
                (place, "write"),
                f"'on_evict' is allowed only directly below a tier whose eviction is ours; tiers[{place - 1}] of "
                f"type {above.type!r} makes room by itself",
            )


def _namesakes(tiers: tuple[TierBase, ...]) -> _Found:
    seen: dict[str, int] = {}
    for place, tier in enumerate(tiers):
        if tier.name in seen:
            yield (
                (place, "name"),
                f"{tier.name!r} is the name of tiers[{seen[tier.name]}]; give another one",
            )
        seen.setdefault(tier.name, place)


def _sharing(tiers: tuple[TierBase, ...]) -> _Found:
    users: dict[str, int] = {}
    for place, tier in enumerate(tiers):
        for claim in sorted(tier.claims()):
            if claim in users:
                yield (place,), f"uses {claim}, as tiers[{users[claim]}] does; each needs its own"
            for other, user in users.items():
                if f"{claim}/".startswith(f"{other}/") != f"{other}/".startswith(f"{claim}/"):
                    yield (place,), f"uses {claim}, and tiers[{user}] {other}: one lies in the other"
            users.setdefault(claim, place)
