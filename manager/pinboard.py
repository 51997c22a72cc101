"""Chunks that requests have asked to keep in primary for a while."""

from collections.abc import Iterable

from kvcascade.types import Key

from .slots import SlotState, SlotTable

__all__ = ["Pinboard"]

_LOOK_EVERY = 1.0


class Pinboard:
    """Pins slots until a time. At most a share of primary, and none longer than the stack allows: beyond that a
    wish is ignored. Used by the scheduler thread only."""

    def __init__(self, slots: SlotTable, share: float, longest: float) -> None:
        """`share`: of primary's slots; `longest`: seconds."""
        self._slots = slots
        self._room = int(share * slots.capacity)
        self._longest = longest
        self._until: dict[int, float] = {}
        self._look_at = 0.0

    def pin(self, keys: Iterable[Key], seconds: float, now: float) -> None:
        """These chunks, head first, are to stay for so long."""
        until = now + min(seconds, self._longest)
        for key in keys:
            slot = self._slots.find(key)
            if slot < 0 or self._slots.state(slot) != SlotState.READY:
                continue
            if slot in self._until:
                self._until[slot] = max(self._until[slot], until)
            elif len(self._until) < self._room:
                self._until[slot] = until
                self._slots.pin(slot)

    def release_overdue(self, now: float) -> None:
        """Releases those whose time is over; looks at most once a second."""
        if not self._until or now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY
        self._release([slot for slot, until in self._until.items() if until <= now])

    def reset(self) -> None:
        """Releases all."""
        self._release(list(self._until))

    def _release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            del self._until[slot]
            self._slots.unpin(slot)
