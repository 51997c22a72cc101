"""A note for each of the last chunks that went."""

from kvcascade.manager.keymap import KeyMap
from kvcascade.types import Key

__all__ = ["GhostNotes"]


class GhostNotes:
    """The last `capacity` keys that were added, each with an int of 0 or more; the oldest are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._ring: list[Key | None] = [None] * capacity
        self._at = 0
        self._packed: KeyMap[int] = KeyMap()
        """Note and place in the ring, in one int."""

    def take(self, key: Key) -> int | None:
        """Removes the key; its note, None where it is not known."""
        packed = self._packed.pop(key)
        if packed is None:
            return None
        note, place = divmod(packed, len(self._ring))
        self._ring[place] = None
        return note

    def add(self, key: Key, note: int) -> int | None:
        """Adds a key that is not here. The note of the one that is forgotten for it, None for none."""
        oldest = self._ring[self._at]
        forgotten = None if oldest is None else self.take(oldest)
        self._ring[self._at] = key
        self._packed[key] = note * len(self._ring) + self._at
        self._at = (self._at + 1) % len(self._ring)
        return forgotten
