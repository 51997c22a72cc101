"""Ordered lists of entries, which all policies are made of."""

from collections.abc import Callable, Iterable, Iterator

__all__ = ["LinkedLists"]

_ABSENT = -1
_PARKED = -2


class LinkedLists:
    """Doubly linked lists in three int lists, each from its coldest to its hottest entry, closed by a sentinel.

    An entry is in at most one list. A busy entry that is met at a cold end is parked outside, so that it costs
    nothing until it is released. It then goes back to the cold end, among the others that came back, by the stamp
    of when it was put: all that stayed are hotter than it.
    """

    def __init__(self, lists: int, capacity: int) -> None:
        # The sentinel of list l stands at place l, entry e at place e + lists. _next[l] is the coldest of l.
        self._lists = lists
        self._prev = [*range(lists), *[_ABSENT] * capacity]
        self._next = self._prev.copy()
        self._stamps = [0] * len(self._prev)
        self._clock = 0
        self._returned: dict[int, int] = {}
        """List -> the place that came back last and is still there: the next one often belongs beside it."""
        self._returned_to: dict[int, int] = {}
        """The same the other way round."""

    def __contains__(self, entry: int) -> bool:
        """Whether the entry is in some list and not parked."""
        place = entry + self._lists
        return place < len(self._next) and self._next[place] >= 0

    def add(self, entry: int, which: int) -> None:
        """An entry that is nowhere to the hot end of this list."""
        prev, following = self._prev, self._next
        place = entry + self._lists
        if place >= len(following):
            self._grow(place + 1 - len(following))
        before = prev[which]
        prev[place], following[place] = before, which
        following[before] = prev[which] = place
        self._clock = self._stamps[place] = self._clock + 1

    def put(self, entry: int, which: int) -> None:
        """To the hot end of this list, from wherever it is."""
        self.put_all((entry,), which)

    def put_all(self, entries: Iterable[int], which: int) -> None:
        """As `put`, of several entries; the last one is the hottest."""
        prev, following, stamps = self._prev, self._next, self._stamps
        lists, clock, returned_to = self._lists, self._clock, self._returned_to
        for entry in entries:
            place = entry + lists
            if place >= len(following):
                self._grow(place + 1 - len(following))
            after = following[place]
            if after >= 0:
                if place in returned_to:
                    self._forget(returned_to[place])
                before = prev[place]
                prev[after], following[before] = before, after
            before = prev[which]
            prev[place], following[place] = before, which
            following[before] = prev[which] = place
            clock += 1
            stamps[place] = clock
        self._clock = clock

    def remove(self, entry: int) -> None:
        """Out of its list, and out of the parked ones."""
        prev, following = self._prev, self._next
        place = entry + self._lists
        after = following[place]
        if after >= 0:
            if place in self._returned_to:
                self._forget(self._returned_to[place])
            before = prev[place]
            prev[after], following[before] = before, after
        following[place] = _ABSENT

    def coldest(self, which: int) -> int:
        """The entry at the cold end, -1 for none."""
        place = self._next[which]
        return place - self._lists if place != which else -1

    def idle(self, which: int, busy: Callable[[int], bool]) -> Iterator[int]:
        """The entries of a list that are not busy, from its cold end; parks the busy ones on the way. The last one
        given may be put elsewhere meanwhile, or to the hot end, where it is met again."""
        prev, following, lists = self._prev, self._next, self._lists
        place = following[which]
        while place != which:
            if busy(place - lists):
                after = following[place]
                self._unlink(place)
                following[place] = _PARKED
                place = after
                continue
            before = prev[place]
            yield place - lists
            stayed = following[before] == place
            place = following[place if stayed else before]

    def release(self, entry: int, which: int) -> None:
        """Back into this list, where it was parked. Nothing where it was not."""
        place = entry + self._lists
        if place >= len(self._next) or self._next[place] != _PARKED:
            return
        stamps, stamp = self._stamps, self._stamps[place]
        after = self._returned.get(which, self._next[which])
        while after != which and stamps[after] < stamp:
            after = self._next[after]
        before = self._prev[after]
        while before != which and stamps[before] > stamp:
            before = self._prev[before]
        after = self._next[before]
        self._prev[place], self._next[place] = before, after
        self._next[before] = self._prev[after] = place
        self._forget(which)
        self._returned[which], self._returned_to[place] = place, which

    def append(self, which: int, source: int) -> None:
        """All entries of `source` to the hot end of this list."""
        first, last = self._next[source], self._prev[source]
        if first == source:
            return
        before = self._prev[which]
        self._next[before], self._prev[first] = first, before
        self._next[last], self._prev[which] = which, last
        self._next[source] = self._prev[source] = source
        self._forget(source)

    def _unlink(self, place: int) -> None:
        if place in self._returned_to:
            self._forget(self._returned_to[place])
        before, after = self._prev[place], self._next[place]
        self._next[before], self._prev[after] = after, before

    def _forget(self, which: int) -> None:
        place = self._returned.pop(which, None)
        if place is not None:
            del self._returned_to[place]

    def _grow(self, places: int) -> None:
        self._prev += [_ABSENT] * places
        self._next += [_ABSENT] * places
        self._stamps += [0] * places
