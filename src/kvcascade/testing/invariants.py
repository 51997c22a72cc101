"""What holds of a manager after every call, whatever its engine does and whatever becomes of its tiers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvcascade.manager import SecondaryTierManager
from kvcascade.manager.jobs import Job, JobKind
from kvcascade.manager.residency import Residency
from kvcascade.manager.slots import SlotState
from kvcascade.types import Key

from .lanes import WatchedLane

__all__ = [
    "BrokenInvariantError",
    "check_deadlines",
    "check_levels",
    "check_shares",
    "check_slots",
    "jobs_of",
    "require",
]


class BrokenInvariantError(AssertionError):
    """Something that must always hold does not."""


def require(holds: bool, what: str) -> None:
    """Raises `BrokenInvariantError` where `what` does not hold."""
    if not holds:
        raise BrokenInvariantError(what)


def jobs_of(lanes: Iterable[WatchedLane]) -> list[Job]:
    """The jobs whose slots are in use."""
    return [job for lane in lanes for job in lane.unsettled.values()]


def check_slots(manager: SecondaryTierManager, copies: Iterable[int], lanes: Sequence[WatchedLane]) -> None:
    """A slot has a pin for each that uses it, and no other; a free one has none, and none is lost.

    Args:
        copies: the slots that the engine's copies use, once for each.
    """
    slots = manager._slots
    users = Counter(copies)
    for job in jobs_of(lanes):
        users.update(slot for slot in job.slots if slot < slots.capacity)
    for request in manager._requests:
        users.update(request.held)
    users.update(manager._pinboard._until.keys())
    pins = {slot: slots.pins(slot) for slot in range(slots.capacity)}
    wrong = {slot: f"{count}, not {users[slot]}" for slot, count in pins.items() if count != users[slot]}
    require(not wrong, f"pins of slots: {wrong}")
    require(slots.pinned == sum(map(bool, pins.values())), "the count of pinned slots is wrong")
    free = set(slots._free)
    states = [SlotState(slots.state(slot)) for slot in pins]
    empty = {slot for slot, state in enumerate(states) if state is SlotState.FREE}
    require(len(free) == slots.free and free == empty, "a slot is free twice, or lost, or free and in use")
    require(slots.resident == states.count(SlotState.READY), "the count of readable slots is wrong")


def check_shares(manager: SecondaryTierManager, lanes: Sequence[WatchedLane]) -> None:
    """Promotions take at most half of primary, stores that wait for tiers too, and at most their tier's share."""
    capacity = manager._slots.capacity
    half = max(1, capacity // 2)
    jobs = jobs_of(lanes)
    reads = {slot for job in jobs if job.kind is JobKind.READ for slot in job.slots if slot < capacity}
    held = {slot for request in manager._requests for slot in request.held}
    require(len(reads | held) <= half, f"promotions take {len(reads | held)} of {capacity} slots")
    writes = {slot for job in jobs if job.kind is JobKind.WRITE for slot in job.slots if slot < capacity}
    require(len(writes) <= half, f"stores take {len(writes)} of {capacity} slots")
    for lane, level in zip(lanes, manager._chain.levels, strict=True):
        waiting = sum(len(job.keys) for job in jobs_of([lane]) if job.kind is JobKind.WRITE)
        share = max(1, int(level.settings.queue * capacity))
        require(level.pinned == waiting <= share, f"{lane.name}: {waiting} stores wait, its share is {share}")


def check_deadlines(manager: SecondaryTierManager, lanes: Sequence[WatchedLane]) -> None:
    """Nobody waits for a job that is past its deadline."""
    late = [job for job in jobs_of(lanes) if not job.expired and job.deadline <= manager._now]
    require(not late, f"past their deadlines: {late}")


def check_levels(
    manager: SecondaryTierManager, lanes: Sequence[WatchedLane], holds: Mapping[str, set[Key]]
) -> None:
    """Of private tiers: they hold no more than fits, and what the events tell.

    Args:
        holds: tier -> the keys that it holds, by the events.
    """
    for lane, level in zip(lanes, manager._chain.levels, strict=True):
        residency = level.residency
        if not isinstance(residency, Residency):
            continue
        room = level.stats.capacity or 0
        require(0 <= residency.bytes <= room, f"{lane.name}: {residency.bytes} bytes in {room}")
        ready = {key for key in residency._entries if key in residency}
        require(residency.chunks == len(ready), f"{lane.name}: the count of chunks is wrong")
        told = holds[lane.name]
        require(ready <= told, f"{lane.name}: readable, and no event has told of it")
        if level.up:
            deleted = {key for job in jobs_of([lane]) if job.kind is JobKind.WRITE for key in job.victims}
            require(told <= ready | deleted, f"{lane.name}: the events tell of more than is readable")
