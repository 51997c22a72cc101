"""Remembers why chunks are not there, so that every miss has a reason."""

from kvcascade.types import Key, MissReason

from .keymap import KeyMap

__all__ = ["Ghosts"]

_REMEMBERED = 1 << 16
_SEEN_BITS = 1 << 23


class Ghosts:
    """The last 65,536 chunks that one tier lost or did not take, each with its reason.

    Beyond that a bitmap of 1 MiB (one bit a key: a Bloom filter with one hash) tells a chunk that was never here
    from one whose reason is forgotten.
    """

    def __init__(self) -> None:
        self._reasons: KeyMap[MissReason] = KeyMap()
        self._ring: list[Key | None] = [None] * _REMEMBERED
        self._at = 0
        self._seen = bytearray(_SEEN_BITS // 8)

    def add(self, key: Key, reason: MissReason) -> None:
        """The tier does not have this key, and this is why."""
        if key not in self._reasons:
            forgotten = self._ring[self._at]
            if forgotten is not None:
                self._reasons.pop(forgotten)
            self._ring[self._at] = key
            self._at = (self._at + 1) % _REMEMBERED
            bit = hash(key) % _SEEN_BITS
            self._seen[bit >> 3] |= 1 << (bit & 7)
        self._reasons[key] = reason

    def why(self, key: Key) -> MissReason:
        """Why the tier, which does not have this key, does not."""
        reason = self._reasons.get(key)
        if reason is not None:
            return reason
        bit = hash(key) % _SEEN_BITS
        return MissReason.UNKNOWN if self._seen[bit >> 3] >> (bit & 7) & 1 else MissReason.NEVER_STORED
