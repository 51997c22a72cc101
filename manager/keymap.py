"""A large map from keys, in shards."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from kvcascade.types import Key

__all__ = ["KeyMap"]

V = TypeVar("V")

_SHARDS = 256


class KeyMap(Generic[V]):
    """A dict over keys, split so that no single insert pays for the growth of the whole.

    Growing one dict of 100,000 keys stalls its caller for several milliseconds, which is a visible hitch of an
    engine's step; a shard of it grows in tens of microseconds.
    """

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[Key, V]] = [{} for _ in range(_SHARDS)]

    def get(self, key: Key) -> V | None:
        return self._shards[hash(key) & 255].get(key)

    def __setitem__(self, key: Key, value: V) -> None:
        self._shards[hash(key) & 255][key] = value

    def pop(self, key: Key) -> V | None:
        """Removes and returns the value, None where there is none."""
        return self._shards[hash(key) & 255].pop(key, None)

    def __contains__(self, key: Key) -> bool:
        return key in self._shards[hash(key) & 255]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __iter__(self) -> Iterator[Key]:
        for shard in self._shards:
            yield from shard

    def clear(self) -> None:
        for shard in self._shards:
            shard.clear()
