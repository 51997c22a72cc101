"""Least recently used."""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from kvcascade.types import Key

__all__ = ["LruPolicy"]

_GONE, _HERE, _PASSED, _RETURNED = range(4)


class LruPolicy:
    """The entry that was not used for the longest time goes next; how often it was used does not matter.

    Every entry there can be stands in one `OrderedDict`, from the start and for good, for what that costs is to
    insert and to remove. A search moves out of its way whoever it meets that is gone or busy. Busy ones come back
    before all others, in the order in which they were met.
    """

    def __init__(self, capacity: int) -> None:
        self._order: OrderedDict[int, None] = OrderedDict.fromkeys(range(capacity))
        """The entries, the coldest first; only those that are `_HERE` count."""
        self._states = bytearray(capacity)
        self._here = 0
        """How many are `_HERE`."""
        self._passed: dict[int, int] = {}
        """An entry that was passed over -> how many were before it."""
        self._returned: list[tuple[int, int]] = []
        """That number, and the entry, of those that came back, in order; of others, that have left it, too."""
        self._numbers = count()

    def insert(self, entries: Sequence[int], keys: Sequence[Key], uses: Sequence[int] = ()) -> None:
        if entries and max(entries) >= len(self._states):
            self._grow(max(entries) + 1)
        states, to_end = self._states, self._order.move_to_end
        for entry in entries:
            states[entry] = _HERE
            to_end(entry)
        self._here += len(entries)

    def touch(self, entries: Iterable[int], request: int = 0) -> None:
        to_end = self._order.move_to_end
        if not self._passed:
            for entry in entries:
                to_end(entry)
            return
        for entry in entries:
            if self._passed.pop(entry, None) is not None:
                self._states[entry] = _HERE
                self._here += 1
            to_end(entry)

    def evict(self, entries: Sequence[int]) -> None:
        states, passed = self._states, self._passed
        for entry in entries:
            if states[entry] == _HERE:
                self._here -= 1
            elif passed:
                passed.pop(entry, None)
            states[entry] = _GONE

    def remove(self, entry: int) -> None:
        self.evict((entry,))

    def victims(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        found = self._returned_idle(count, busy) if self._returned else []
        wanted, left = count - len(found), self._here
        states, aside = self._states, []
        for entry in self._order:
            if not wanted or not left:
                break
            if states[entry] == _HERE:
                left -= 1
                if not busy(entry):
                    found.append(entry)
                    wanted -= 1
                    continue
                self._pass(entry)
            aside.append(entry)
        for entry in aside:
            self._order.move_to_end(entry)
        return found

    def release(self, entry: int) -> None:
        if entry in self._passed and self._states[entry] == _PASSED:
            self._states[entry] = _RETURNED
            insort(self._returned, (self._passed[entry], entry))

    def _pass(self, entry: int) -> None:
        self._states[entry] = _PASSED
        self._here -= 1
        self._passed[entry] = next(self._numbers)

    def _returned_idle(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        """The up to `count` first ones of those that came back; those that are busy again leave."""
        found: list[int] = []
        met = 0
        while met < len(self._returned) and len(found) < count:
            number, entry = self._returned[met]
            met += 1
            if self._states[entry] != _RETURNED or self._passed[entry] != number:
                continue
            if busy(entry):
                self._states[entry] = _PASSED
            else:
                found.append(entry)
        self._returned[:met] = [(self._passed[entry], entry) for entry in found]
        return found

    def _grow(self, entries: int) -> None:
        more = range(len(self._states), entries)
        self._order.update(dict.fromkeys(more))
        self._states += bytes(len(more))
