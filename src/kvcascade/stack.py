"""Builds what a stack's settings describe."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from kvcascade.configs.registry import EVICTION, resolve
from kvcascade.configs.schema import PrimarySettings, SecondarySettings, SharedSettings, StackSettings
from kvcascade.configs.units import format_size
from kvcascade.errors import ConfigError
from kvcascade.manager import SecondaryTierManager
from kvcascade.manager.chain import Chain
from kvcascade.manager.control import TierControl
from kvcascade.manager.events import EventLog
from kvcascade.manager.eviction import EvictionPolicy
from kvcascade.manager.io import IoProcess
from kvcascade.manager.lane import Lane, ThreadLane
from kvcascade.manager.level import Level
from kvcascade.manager.lower import LowerTiers
from kvcascade.manager.opening import open_tier
from kvcascade.manager.primary import Primary
from kvcascade.manager.probes import ProbeTable
from kvcascade.manager.residency import Residency
from kvcascade.manager.slots import SlotTable
from kvcascade.manager.stats import TierStats
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.host import FEWEST_CHUNKS, HostPool, slots_for, too_small
from kvcascade.types import Buffer, Namespace

__all__ = ["build", "build_lower", "pool_slots"]


class LaneMaker(Protocol):
    """Makes the lane of a tier; see `ThreadLane`."""

    def __call__(
        self,
        name: str,
        tier: Tier,
        slot: Callable[[int], Buffer],
        concurrency: int,
        retries: int,
        clock: Callable[[], float],
        /,
    ) -> Lane: ...


def build(
    settings: StackSettings,
    namespace: Namespace,
    chunk_bytes: int,
    engine_id: str = "",
    *,
    place: int = 0,
    pool: HostPool | None = None,
    events: bool = False,
    clock: Callable[[], float] = time.monotonic,
    wrap: Callable[[str, Tier], Tier] | None = None,
    lane: LaneMaker | None = None,
) -> SecondaryTierManager:
    """Opens every tier of a stack and returns its manager. Use it as a context manager, or call `shutdown`.

    Args:
        namespace: what the chunks' bytes belong to; the stack's own `namespace` is added to it.
        chunk_bytes: of one chunk, all ranks together.
        engine_id: names the engine among those that share the stack file; "" takes a free place.
        place: which of them it takes where that is free, else the first that is.
        pool: the memory of primary, where it was made already: at least `pool_slots` slots of `chunk_bytes`. It
            belongs to the manager from here on.
        events: whether anybody takes the manager's events.
        clock: seconds; what deadlines are measured by.
        wrap: may put something in front of a tier, by its name, for tests and measurements.
        lane: makes what runs a tier's I/O. With it, or `wrap`, that is in this process, whatever the stack says.

    A tier that can't be opened now is down, and tried again in the background.

    Raises:
        ConfigError: a tier can't be opened as it is described.
    """
    if chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes: {chunk_bytes} is not a size of a chunk; at least 1 byte")
    context = OpenContext(_within(namespace, settings), chunk_bytes, engine_id, settings.weights_version, place)
    log = EventLog(events)
    slots = _slots(settings.primary, chunk_bytes)
    staging = range(slots, slots + _staging(settings, chunk_bytes))
    with ExitStack() as undo:
        pool = undo.enter_context(pool or HostPool(staging.stop, chunk_bytes))
        if pool.slots < staging.stop or pool.slot_bytes != chunk_bytes:
            raise ConfigError(
                f"pool: {pool.slots} slots of {pool.slot_bytes} bytes; {staging.stop} of {chunk_bytes} are needed"
            )
        site: _Site = _Here(context, pool.slot, clock, wrap, lane)
        if settings.io == "process" and settings.secondary and not (wrap or lane):
            site = _There(IoProcess(pool, settings.secondary, context, clock))
        undo.callback(site.release)
        chain = Chain(_levels(settings, chunk_bytes, site, clock, undo), log, site.release)
        undo.pop_all()
    return SecondaryTierManager(
        pool,
        _primary(settings.primary, slots, chunk_bytes, log),
        chain,
        log,
        watermarks=settings.primary.watermarks,
        pinning=settings.pinning,
        staging=staging,
        reset_scope=settings.reset_scope,
        log_every=settings.log_every,
        clock=clock,
    )


def pool_slots(settings: StackSettings, chunk_bytes: int) -> int:
    """How many slots the host pool of such a stack has: primary's, and those for moves between secondary tiers.

    Raises:
        ConfigError: primary's capacity holds too few chunks.
    """
    return _slots(settings.primary, chunk_bytes) + _staging(settings, chunk_bytes)


def build_lower(
    settings: StackSettings,
    namespace: Namespace,
    chunk_bytes: int,
    slot: Callable[[int], Buffer],
    slots: int,
    engine_id: str = "",
    *,
    place: int = 0,
    events: bool = False,
    clock: Callable[[], float] = time.monotonic,
    wrap: Callable[[str, Tier], Tier] | None = None,
    lane: LaneMaker | None = None,
) -> LowerTiers:
    """Opens the secondary tiers of a stack, below a pool that another manager keeps: the stack's own primary tier
    is left out. Arguments are as those of `build`, but for

    Args:
        slot: the bytes of a slot of that pool: `chunk_bytes` of them, the same memory whenever it is asked for.
        slots: how many there are.

    Raises:
        ConfigError: a tier can't be opened as it is described, or can't stand here.
    """
    if not settings.secondary:
        raise ConfigError(
            f"tiers: none below {settings.primary.name!r}, which is left out here; give at least one"
        )
    for number, tier in enumerate(settings.secondary, 1):
        if tier.write == "on_evict":
            raise ConfigError(
                f"tiers[{number}].write: 'on_evict' needs slots of our own above it, and the host memory is the "
                f"engine's; allowed here: through, off"
            )
    if settings.io == "process":
        raise ConfigError(
            "io: 'process' needs host memory of our own, which can be handed over, and here it is the engine's; "
            "allowed here: thread"
        )
    context = OpenContext(_within(namespace, settings), chunk_bytes, engine_id, settings.weights_version, place)
    log = EventLog(events)
    with ExitStack() as undo:
        site = _Here(context, slot, clock, wrap, lane)
        levels = _levels(settings, chunk_bytes, site, clock, undo)
        undo.pop_all()
    return LowerTiers(
        Chain(levels, log),
        log,
        slots,
        reset_scope=settings.reset_scope,
        log_every=settings.log_every,
        clock=clock,
    )


class _Site(Protocol):
    """Where tiers live and their lanes run."""

    def open(self, place: int, settings: SecondarySettings) -> tuple[TierControl, bool]:
        """A tier, by its place among the secondary ones; and whether it could not be opened yet.

        Raises:
            ConfigError: it can never be opened like this.
        """

    def lane(self, place: int, settings: SecondarySettings) -> Lane:
        """The lane of a tier that was opened."""

    def release(self) -> bool:
        """Ends what lanes run in, by force where they have not ended; False where that can't be."""


class _Here:
    """In this process."""

    def __init__(
        self,
        context: OpenContext,
        slot: Callable[[int], Buffer],
        clock: Callable[[], float],
        wrap: Callable[[str, Tier], Tier] | None,
        lane: LaneMaker | None,
    ) -> None:
        self._context = context
        self._slot = slot
        self._clock = clock
        self._wrap = wrap or (lambda name, tier: tier)
        self._make = lane or ThreadLane
        self._tiers: dict[int, Tier] = {}

    def open(self, place: int, settings: SecondarySettings) -> tuple[TierControl, bool]:
        tier, late = open_tier(settings, self._context)
        self._tiers[place] = self._wrap(settings.name, tier)
        return self._tiers[place], late

    def lane(self, place: int, settings: SecondarySettings) -> Lane:
        tier = self._tiers[place]
        return self._make(settings.name, tier, self._slot, settings.concurrency, settings.retries, self._clock)

    def release(self) -> bool:
        return False


class _There:
    """In a process of their own."""

    def __init__(self, process: IoProcess) -> None:
        self._tiers = process.tiers
        self.release = process.close

    def open(self, place: int, settings: SecondarySettings) -> tuple[TierControl, bool]:
        tier = self._tiers[place]
        return tier, tier.wait_until_open()

    def lane(self, place: int, settings: SecondarySettings) -> Lane:
        return self._tiers[place].lane


def _levels(
    settings: StackSettings, chunk_bytes: int, site: _Site, clock: Callable[[], float], undo: ExitStack
) -> list[Level]:
    tiers = enumerate(settings.secondary)
    return [_level(place, tier, chunk_bytes, site, clock(), undo) for place, tier in tiers]


def _level(
    place: int, settings: SecondarySettings, chunk_bytes: int, site: _Site, now: float, undo: ExitStack
) -> Level:
    """Opens one secondary tier; `undo` closes it again where a later one fails."""
    where = f"tiers[{place + 1}]"
    try:
        tier, late = site.open(place, settings)
    except ConfigError as error:
        raise ConfigError(f"{where} ({settings.name}): {error}") from error
    undo.callback(tier.close)
    residency = _residency(settings, tier, chunk_bytes, where, late, now)
    lane = site.lane(place, settings)
    undo.callback(lane.close, 1.0)
    level = Level(place, settings, tier, residency, lane, chunk_bytes)
    if late:
        level.begin_down(now)
    return level


def _within(namespace: Namespace, settings: StackSettings) -> Namespace:
    """The engine's identity, and in it the stack's tenant."""
    if not settings.namespace:
        return namespace
    return Namespace.of(**dict(namespace.fields), tenant=settings.namespace)


def _slots(settings: PrimarySettings, chunk_bytes: int) -> int:
    slots = slots_for(settings.capacity, chunk_bytes)
    if slots < FEWEST_CHUNKS:
        raise ConfigError(f"tiers[0].capacity: {too_small(settings.capacity, chunk_bytes)}")
    return slots


def _staging(settings: StackSettings, chunk_bytes: int) -> int:
    """Slots beyond primary's capacity, where chunks move between secondary tiers."""
    moves = any(tier.write == "on_evict" for tier in settings.secondary[1:])
    return slots_for(settings.primary.staging, chunk_bytes) if moves else 0


def _residency(
    settings: SecondarySettings, tier: TierControl, chunk_bytes: int, where: str, late: bool, now: float
) -> Residency | ProbeTable:
    if tier.capabilities.shared:
        return ProbeTable(getattr(settings, "probe_ttl", SharedSettings.model_fields["probe_ttl"].default))
    capacity = tier.usage().capacity
    fits = capacity // tier.footprint(chunk_bytes) if capacity is not None else None
    if fits is not None and fits < FEWEST_CHUNKS and not late:
        raise ConfigError(
            f"{where}.capacity: {format_size(capacity or 0)} holds {fits} chunks of "
            f"{format_size(tier.footprint(chunk_bytes))}; at least {FEWEST_CHUNKS} are needed"
        )
    policy = _policy(getattr(settings, "eviction", None) or "lru", fits or 0)
    residency = Residency(tier.footprint, capacity, policy, settings.ttl)
    residency.now = now
    with _no_collections():
        residency.load(tier.entries())
    return residency


@contextmanager
def _no_collections() -> Iterator[None]:
    """What lists a tier makes an object or two for each chunk, and no garbage; going through all of them again and
    again would take a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _primary(settings: PrimarySettings, slots: int, chunk_bytes: int, events: EventLog) -> Primary:
    table = SlotTable(slots, _policy(settings.eviction, slots))
    stats = TierStats(settings.name, settings.type, capacity=slots * chunk_bytes)
    return Primary(table, stats, chunk_bytes, events)


def _policy(name: str, capacity: int) -> EvictionPolicy:
    policy: EvictionPolicy = resolve(EVICTION, name)(capacity)
    return policy
