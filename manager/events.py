"""What others may want to know: which tier has come to hold, or has lost, which chunks."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcascade.types import Key

__all__ = ["Event", "EventLog"]

_KEPT = 1 << 16


@dataclass(frozen=True, slots=True)
class Event:
    """One tier's own change, after it has happened. A chunk in two tiers is stored twice and removed twice.

    Of a shared tier it is told what this engine knows: what it stores, and what its probes and reads find there or
    find gone. Nothing is told as removed that was not told as stored.
    """

    tier: str
    keys: tuple[Key, ...]
    removed: bool


class EventLog:
    """Events since the last `take`, the last 65,536 where nobody takes them; none where nobody wants any."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._events: deque[Event] = deque(maxlen=_KEPT)

    def stored(self, tier: str, keys: Iterable[Key]) -> None:
        if self._wanted and (stored := tuple(keys)):
            self._events.append(Event(tier, stored, removed=False))

    def removed(self, tier: str, keys: Sequence[Key]) -> None:
        if self._wanted and keys:
            self._events.append(Event(tier, tuple(keys), removed=True))

    def take(self) -> list[Event]:
        events = list(self._events)
        self._events.clear()
        return events
