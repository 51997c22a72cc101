"""Three static first-in-first-out queues."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kvcascade.types import Key

from .ghost_keys import GhostKeys
from .linked import LinkedLists
from .once import OncePerRequest

__all__ = ["S3FifoPolicy"]

_SMALL, _MAIN = 0, 1
_SMALL_SHARE = 10
_MOST_USES = 3
_PATIENCE = 512


class S3FifoPolicy:
    """S3-FIFO, of Yang and others (SOSP '23).

    New entries queue in a tenth of the tier. Those used again meanwhile move on to the main queue, the others go,
    and are remembered: one that comes back enters the main queue at once. There an entry has another turn for each
    use, up to three. One further use is enough to move on, for a burst of uses by one request counts once here.

    A search gives up its patience after 512 further turns, so that none stalls an engine's step; the entries
    next in line then go, whatever their uses.
    """

    def __init__(self, capacity: int) -> None:
        self._small = max(1, capacity // _SMALL_SHARE)
        self._ghosts_kept = max(1, capacity - self._small)
        self._order = LinkedLists(2, capacity)
        self._of = [0] * capacity
        self._sizes = [0, 0]
        self._turns = [0] * capacity
        self._keys: list[Key] = [b""] * capacity
        self._uses = OncePerRequest(capacity)
        self._ghosts = GhostKeys(1, capacity)

    def insert(self, entries: Sequence[int], keys: Sequence[Key], uses: Sequence[int] = ()) -> None:
        for entry, key, count in zip(entries, keys, uses or [1] * len(keys), strict=True):
            self._insert(entry, key, count)

    def _insert(self, entry: int, key: Key, uses: int) -> None:
        if entry >= len(self._of):
            more = entry + 1 - len(self._of)
            self._of += [0] * more
            self._turns += [0] * more
            self._keys += [b""] * more
        which = _SMALL if self._ghosts.take(key) is None and uses == 1 else _MAIN
        self._keys[entry] = key
        self._turns[entry] = min(_MOST_USES, max(0, uses - 2))  # the second one has brought it to the main queue
        self._of[entry] = which
        self._sizes[which] += 1
        self._uses.insert(entry)
        self._order.add(entry, which)

    def touch(self, entries: Iterable[int], request: int = 0) -> None:
        for entry in entries:
            if self._uses.again(entry, request):
                self._turns[entry] = min(_MOST_USES, self._turns[entry] + 1)
            self._order.release(entry, self._of[entry])

    def evict(self, entries: Sequence[int]) -> None:
        for entry in entries:
            self._evict(entry)

    def _evict(self, entry: int) -> None:
        self.remove(entry)
        if self._of[entry] == _SMALL:
            self._ghosts.add(self._keys[entry], 0)
            if self._ghosts.sizes[0] > self._ghosts_kept:
                self._ghosts.drop_oldest(0)

    def remove(self, entry: int) -> None:
        self._order.remove(entry)
        self._sizes[self._of[entry]] -= 1

    def victims(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        found: list[int] = []
        small = 0  # of those found
        patience = _PATIENCE
        idle, moved = self._idle(busy, found), False
        while len(found) < count:
            first = _SMALL if self._sizes[_SMALL] - small > self._small else _MAIN
            entry = next(idle[first], -1)
            if entry < 0 and moved:
                idle, moved = self._idle(busy, found), False
                continue
            if entry < 0:
                entry = next(idle[1 - first], -1)
            if entry < 0:
                break
            if self._turns[entry] and patience:
                patience -= 1
                moved = True
                self._another_turn(entry)
            else:
                small += self._of[entry] == _SMALL
                found.append(entry)
        return found

    def _idle(self, busy: Callable[[int], bool], found: list[int]) -> tuple[Iterator[int], Iterator[int]]:
        """The entries of both queues that are neither busy nor found yet, from now on."""
        known = frozenset(found)
        small, main = (
            (entry for entry in self._order.idle(which, busy) if entry not in known) for which in (_SMALL, _MAIN)
        )
        return small, main

    def release(self, entry: int) -> None:
        self._order.release(entry, self._of[entry])

    def _another_turn(self, entry: int) -> None:
        if self._of[entry] == _SMALL:
            self._turns[entry] = 0
            self._of[entry] = _MAIN
            self._sizes[_SMALL] -= 1
            self._sizes[_MAIN] += 1
        else:
            self._turns[entry] -= 1
        self._order.put(entry, _MAIN)
