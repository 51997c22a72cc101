"""Least recently used."""

from collections.abc import Callable, Iterable

from kvcascade.types import Key

__all__ = ["LruPolicy"]

_ABSENT = -1
_PARKED = -2


class LruPolicy:
    """A doubly linked list in two int lists, from the coldest to the hottest entry, closed by a sentinel.

    A busy entry that is met at the cold end is parked outside the list, so that it costs nothing until it is
    released. It then goes back to the cold end, among the others that came back, by the stamp of its last use: all
    that stayed in the list are hotter than it.
    """

    def __init__(self, capacity: int) -> None:
        # Place 0 is the sentinel; entry e stands at place e + 1. _next[0] is the coldest, _prev[0] the hottest.
        self._prev = [0] + [_ABSENT] * capacity
        self._next = [0] + [_ABSENT] * capacity
        self._stamp = [0] * (capacity + 1)
        self._clock = 0

    def insert(self, entry: int, key: Key) -> None:
        place = entry + 1
        if place >= len(self._next):
            self._grow(place + 1)
        self._link(place, before=0)

    def touch(self, entries: Iterable[int]) -> None:
        for entry in entries:
            place = entry + 1
            if self._next[place] >= 0:
                self._unlink(place)
            self._link(place, before=0)

    def remove(self, entry: int) -> None:
        place = entry + 1
        if self._next[place] >= 0:
            self._unlink(place)
        self._next[place] = _ABSENT

    def victims(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        found: list[int] = []
        place = self._next[0]
        while place and len(found) < count:
            following = self._next[place]
            if busy(place - 1):
                self._unlink(place)
                self._next[place] = _PARKED
            else:
                found.append(place - 1)
            place = following
        return found

    def release(self, entry: int) -> None:
        place = entry + 1
        if self._next[place] != _PARKED:
            return
        stamp = self._stamp[place]
        following = self._next[0]
        while following and self._stamp[following] < stamp:
            following = self._next[following]
        self._link(place, before=following, stamp=stamp)

    def _link(self, place: int, before: int, stamp: int | None = None) -> None:
        previous = self._prev[before]
        self._prev[place], self._next[place] = previous, before
        self._next[previous] = self._prev[before] = place
        if stamp is None:
            self._clock += 1
            stamp = self._clock
        self._stamp[place] = stamp

    def _unlink(self, place: int) -> None:
        previous, following = self._prev[place], self._next[place]
        self._next[previous], self._prev[following] = following, previous

    def _grow(self, places: int) -> None:
        more = max(places, 2 * len(self._next)) - len(self._next)
        self._prev += [_ABSENT] * more
        self._next += [_ABSENT] * more
        self._stamp += [0] * more
