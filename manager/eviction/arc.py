"""Adaptive replacement cache."""

from collections.abc import Callable, Iterable, Sequence

from kvcascade.types import Key

from .ghost_keys import GhostKeys
from .linked import LinkedLists
from .once import OncePerRequest

__all__ = ["ArcPolicy"]

_RECENT, _FREQUENT = 0, 1


class ArcPolicy:
    """ARC, of Megiddo and Modha (FAST '03).

    Entries used once and entries used again are two lists, each with as many ghosts. The recent one has a target
    size: a ghost of it that comes back raises the target, one of the others lowers it. A victim is the coldest of
    the recent ones while they are more than the target, else of the frequent ones; where all of one list are busy
    it is one of the other.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._order = LinkedLists(2, capacity)
        self._of = [0] * capacity
        self._sizes = [0, 0]
        self._keys: list[Key] = [b""] * capacity
        self._uses = OncePerRequest(capacity)
        self._ghosts = GhostKeys(2, capacity)
        self._target = 0.0

    def insert(self, entries: Sequence[int], keys: Sequence[Key], uses: Sequence[int] = ()) -> None:
        for entry, key, count in zip(entries, keys, uses or [1] * len(keys), strict=True):
            self._insert(entry, key, count)

    def _insert(self, entry: int, key: Key, uses: int) -> None:
        if entry >= len(self._of):
            self._of += [0] * (entry + 1 - len(self._of))
            self._keys += [b""] * (entry + 1 - len(self._keys))
        recent, frequent = self._ghosts.sizes
        ghost = self._ghosts.take(key)
        if ghost == _RECENT:
            self._target = min(self._capacity, self._target + max(1.0, frequent / recent))
        elif ghost == _FREQUENT:
            self._target = max(0.0, self._target - max(1.0, recent / frequent))
        which = _RECENT if ghost is None and uses == 1 else _FREQUENT
        self._keys[entry] = key
        self._of[entry] = which
        self._sizes[which] += 1
        self._uses.insert(entry)
        self._order.add(entry, which)

    def touch(self, entries: Iterable[int], request: int = 0) -> None:
        for entry in entries:
            if self._uses.again(entry, request) and self._of[entry] == _RECENT:
                self._sizes[_RECENT] -= 1
                self._sizes[_FREQUENT] += 1
                self._of[entry] = _FREQUENT
            self._order.put(entry, self._of[entry])

    def evict(self, entries: Sequence[int]) -> None:
        for entry in entries:
            self._evict(entry)

    def _evict(self, entry: int) -> None:
        self.remove(entry)
        self._ghosts.add(self._keys[entry], self._of[entry])
        ghosts = self._ghosts.sizes
        if ghosts[_RECENT] and self._sizes[_RECENT] + ghosts[_RECENT] > self._capacity:
            self._ghosts.drop_oldest(_RECENT)
        if any(ghosts) and sum(self._sizes) + sum(ghosts) > 2 * self._capacity:
            self._ghosts.drop_oldest(_FREQUENT if ghosts[_FREQUENT] else _RECENT)

    def remove(self, entry: int) -> None:
        self._order.remove(entry)
        self._sizes[self._of[entry]] -= 1

    def victims(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        idle = self._order.idle(_RECENT, busy), self._order.idle(_FREQUENT, busy)
        surplus = self._sizes[_RECENT] - self._target
        found: list[int] = []
        while len(found) < count:
            first = _RECENT if surplus > 0 else _FREQUENT
            entry = next(idle[first], -1)
            if entry < 0:
                entry = next(idle[1 - first], -1)
            if entry < 0:
                break
            surplus -= self._of[entry] == _RECENT
            found.append(entry)
        return found

    def release(self, entry: int) -> None:
        self._order.release(entry, self._of[entry])
