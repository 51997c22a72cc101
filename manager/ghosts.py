"""Remembers why chunks are not there, so that every miss has a reason."""

from collections.abc import Iterable

from kvcascade.types import Key, MissReason

__all__ = ["Ghosts"]

_SHARDS = 256
_A_SHARD = 256
_SEEN_BITS = 1 << 15
"""A shard."""


class Ghosts:
    """At least the last 65,536 chunks that one tier lost or did not take, each with its reason.

    They are kept in shards of two generations, so that none is forgotten by itself, and no call forgets many.
    Beyond that bitmaps of 1 MiB in all (one bit a key: Bloom filters with one hash) tell a chunk that was never
    here from one whose reason is forgotten. A shard has its own: what is done at once is near in memory.
    """

    def __init__(self) -> None:
        self._young: list[dict[Key, MissReason]] = [{} for _ in range(_SHARDS)]
        self._old: list[dict[Key, MissReason]] = [{} for _ in range(_SHARDS)]
        self._seen = [bytearray(_SEEN_BITS // 8) for _ in range(_SHARDS)]

    def add(self, key: Key, reason: MissReason) -> None:
        """The tier does not have this key, and this is why."""
        self.add_all((key,), reason)

    def add_all(self, keys: Iterable[Key], reason: MissReason) -> None:
        """As `add`, of several keys."""
        shards = self._young
        for key in keys:
            young = shards[key[0]]
            if len(young) >= _A_SHARD:
                young = self._turn_over(key[0])
            young[key] = reason

    def why(self, key: Key) -> MissReason:
        """Why the tier, which does not have this key, does not."""
        reason = self._young[key[0]].get(key) or self._old[key[0]].get(key)
        if reason is not None:
            return reason
        bit = hash(key) & _SEEN_BITS - 1
        seen = self._seen[key[0]][bit >> 3] >> (bit & 7) & 1
        return MissReason.UNKNOWN if seen else MissReason.NEVER_STORED

    def _turn_over(self, shard: int) -> dict[Key, MissReason]:
        """The older generation of a shard is forgotten, but for having been here; returns the new one."""
        seen = self._seen[shard]
        for key in self._old[shard]:
            bit = hash(key) & _SEEN_BITS - 1
            seen[bit >> 3] |= 1 << (bit & 7)
        self._old[shard] = self._young[shard]
        self._young[shard] = {}
        return self._young[shard]
