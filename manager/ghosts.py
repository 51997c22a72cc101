"""Remembers why chunks are not there, so that every miss has a reason."""

from collections import deque
from collections.abc import Sequence

from kvcascade.types import Key, MissReason

__all__ = ["Ghosts"]

_GENERATIONS = 8
_A_GENERATION = 8192
_SEEN_BITS = 1 << 23


class Ghosts:
    """What one tier lost or did not take at least the last 65,536 times, each chunk with its reason; of those
    before only that they were here.

    They are kept in generations, and the oldest one is forgotten as fast as others come, so that no call pays for
    many. Kept are hashes of 64 bits: most are never asked for, and to let go of the keys themselves, which have
    left the processor's caches by then, would take longer than all the rest. Beyond that a bitmap of 1 MiB (one
    bit a key: a Bloom filter with one hash) tells a chunk that was never here from one whose reason is forgotten.
    """

    def __init__(self) -> None:
        self._young: dict[int, MissReason] = {}
        self._generations = deque([self._young])
        """The youngest first."""
        self._seen = bytearray(b"\0" * (_SEEN_BITS // 8))  # written, so that its pages are there by now

    def add(self, key: Key, reason: MissReason) -> None:
        """The tier does not have this key, and this is why."""
        self.add_all((key,), reason)

    def add_all(self, keys: Sequence[Key], reason: MissReason) -> None:
        """As `add`, of several keys."""
        self._young.update(dict.fromkeys(map(hash, keys), reason))
        if len(self._young) >= _A_GENERATION:
            self._young = {}
            self._generations.appendleft(self._young)
        if len(self._generations) > _GENERATIONS + 1:
            self._forget(2 * len(keys))

    def why(self, key: Key) -> MissReason:
        """Why the tier, which does not have this key, does not."""
        known = hash(key)
        for generation in self._generations:
            if known in generation:
                return generation[known]
        bit = known % _SEEN_BITS
        return MissReason.UNKNOWN if self._seen[bit >> 3] >> (bit & 7) & 1 else MissReason.NEVER_STORED

    def _forget(self, number: int) -> None:
        """Forgets so many of the oldest generation, but for having been here."""
        oldest, seen = self._generations[-1], self._seen
        for _ in range(min(number, len(oldest))):
            bit = oldest.popitem()[0] % _SEEN_BITS
            seen[bit >> 3] |= 1 << (bit & 7)
        if not oldest:
            self._generations.pop()
