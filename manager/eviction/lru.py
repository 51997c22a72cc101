"""Least recently used."""

from collections.abc import Callable, Iterable
from itertools import islice

from kvcascade.types import Key

from .linked import LinkedLists

__all__ = ["LruPolicy"]


class LruPolicy:
    """The entry that was not used for the longest time goes next; how often it was used does not matter."""

    def __init__(self, capacity: int) -> None:
        self._order = LinkedLists(1, capacity)

    def insert(self, entry: int, key: Key, uses: int = 1) -> None:
        self._order.put(entry, 0)

    def touch(self, entries: Iterable[int], request: int = 0) -> None:
        for entry in entries:
            self._order.put(entry, 0)

    def evict(self, entry: int) -> None:
        self._order.remove(entry)

    def remove(self, entry: int) -> None:
        self._order.remove(entry)

    def victims(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        return list(islice(self._order.idle(0, busy), count))

    def release(self, entry: int) -> None:
        self._order.release(entry, 0)
