"""A large map from keys, in shards."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from kvcascade.types import Key

__all__ = ["KeyMap"]

V = TypeVar("V")

_SHARDS = 256


class KeyMap(Generic[V]):
    """A dict over keys, split so that no single insert pays for the growth of the whole.

    Growing one dict of 100,000 keys stalls its caller for several milliseconds, which is a visible hitch of an
    engine's step; a shard of it grows in tens of microseconds. A key is an engine's hash, so that its first byte
    is as good a choice of the shard as any, and the cheapest one. The forms for many keys take half the time of
    one call a key.
    """

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[Key, V]] = [{} for _ in range(_SHARDS)]

    def get(self, key: Key) -> V | None:
        return self._shards[key[0]].get(key)

    def get_all(self, keys: Iterable[Key], missing: V) -> list[V]:
        """The value of each key; `missing` for one that is not there."""
        shards = self._shards
        return [shards[key[0]].get(key, missing) for key in keys]

    def each(self, keys: Iterable[Key], missing: V) -> Iterator[V]:
        """As `get_all`, but none is looked up before it is asked for."""
        shards = self._shards
        return (shards[key[0]].get(key, missing) for key in keys)

    def absent(self, keys: Iterable[Key]) -> list[Key]:
        """Those of the keys that are not there."""
        shards = self._shards
        return [key for key in keys if key not in shards[key[0]]]

    def __setitem__(self, key: Key, value: V) -> None:
        self._shards[key[0]][key] = value

    def set_all(self, keys: Sequence[Key], values: Sequence[V]) -> None:
        """Gives each key its value."""
        shards = self._shards
        for key, value in zip(keys, values, strict=True):
            shards[key[0]][key] = value

    def pop(self, key: Key) -> V | None:
        """Removes and returns the value, None where there is none."""
        return self._shards[key[0]].pop(key, None)

    def remove_all(self, keys: Iterable[Key]) -> None:
        """Removes keys that are there."""
        shards = self._shards
        for key in keys:
            del shards[key[0]][key]

    def __contains__(self, key: Key) -> bool:
        return key in self._shards[key[0]]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __iter__(self) -> Iterator[Key]:
        for shard in self._shards:
            yield from shard

    def clear(self) -> None:
        for shard in self._shards:
            shard.clear()
