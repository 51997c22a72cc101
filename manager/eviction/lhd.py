"""Least hit density."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from kvcascade.types import Key

from .ghost_notes import GhostNotes
from .linked import LinkedLists
from .once import OncePerRequest
from .reuse import ReuseModel

__all__ = ["LhdPolicy"]

_CLASSES = 2
"""Used once, and used again."""
_AGES = 256
_LISTS_A_CLASS = _AGES + 1
_TICKS_A_CAPACITY = 32
_SHORTEST_TICK = 64
_TICKS_A_FIT = 4
_GHOSTS_A_CAPACITY = 8
_MOST_GHOSTS = 1 << 18


class LhdPolicy:
    """Keeps the chunks that bring most hits for the room and the time that they take.

    After LHD, of Beckmann, Chen and Cidon (NSDI '18): a policy that learns how soon chunks come back, and evicts
    those of the least expected hits per chunk and tick. Here the expectation is the Gittins index, the best over
    all times to give the chunk up, of rates that ghosts help to learn (`ReuseModel`), and nothing is sampled:
    chunks of the same class and tick of last use share a list and a rank, so a victim is the coldest of the first
    list. It tells an agent that pauses between two turns from a prompt that never comes back: it may evict the
    newest chunks rather than those about to be used again.

    Hit rates of one tier, in the traces that come along, beside the best of LRU, ARC and S3-FIFO:

        capacity        1 %     2 %     5 %     10 %    20 %    40 %
        conversation    0.1069  0.1511  0.2189  0.2922  0.3459  0.3595
          best other    0.0755  0.1083  0.2100  0.2843  0.3453  0.3604
        synthetic       0.0509  0.0818  0.1683  0.2774  0.4224  0.5731
          best other    0.0434  0.0815  0.1614  0.2689  0.4036  0.5747

    It takes the more time to learn the larger the tier is; until then it is between LRU and LFU. What it has
    learned ends with the process: after a restart it knows which chunks were used again, and learns the rates
    anew. A tick is a 32nd of the capacity in uses, at least 64. A prompt should not be torn apart, so ticks pass
    between calls only, and a request's last touch gives all its chunks the same tick.
    """

    def __init__(self, capacity: int) -> None:
        self._tick_uses = max(_SHORTEST_TICK, capacity // _TICKS_A_CAPACITY)
        self._uses_left = self._tick_uses
        self._now = 0
        self._order = LinkedLists(_CLASSES * _LISTS_A_CLASS, capacity)
        self._once = OncePerRequest(capacity)
        self._ghosts = GhostNotes(max(1, min(_GHOSTS_A_CAPACITY * capacity, _MOST_GHOSTS)))
        self._model = ReuseModel(_AGES)
        self._keys: list[Key] = [b""] * capacity
        self._class = [0] * capacity
        self._used = [0] * capacity
        """Entry -> the tick of its last use."""
        self._known = [0] * (_CLASSES * _LISTS_A_CLASS)
        """List -> its chunks, with those that would be in it had they not been evicted."""
        self._densities = self._model.densities()
        self._ranked: list[int] = []
        """The lists, the one to evict from first."""
        self._rank = [0] * (_CLASSES * _LISTS_A_CLASS)
        self._first = 0
        """No list of a lower rank has an entry."""
        self._rank_lists()

    def insert(self, entries: Sequence[int], keys: Sequence[Key], uses: Sequence[int] = ()) -> None:
        for entry, key, count in zip(entries, keys, uses or [1] * len(keys), strict=True):
            self._insert(entry, key, count)

    def _insert(self, entry: int, key: Key, uses: int) -> None:
        if entry >= len(self._keys):
            more = entry + 1 - len(self._keys)
            self._keys += [b""] * more
            self._class += [0] * more
            self._used += [0] * more
        self._keys[entry] = key
        self._once.insert(entry)
        note = self._ghosts.take(key)
        if note is not None:
            self._came_back(note % _CLASSES, note // _CLASSES)
        self._count_use(entry, again=note is not None or uses > 1)

    def touch(self, entries: Iterable[int], request: int = 0) -> None:
        for entry in entries:
            if self._once.again(entry, request):
                self._came_back(self._class[entry], self._used[entry])
                self._count_use(entry, again=True)
            elif request and self._used[entry] != self._now:
                self._known[self._list(self._class[entry], self._used[entry])] -= 1
                self._refresh(entry)
            else:
                self._put(entry)
        if self._uses_left <= 0:
            self._tick()

    def evict(self, entries: Sequence[int]) -> None:
        for entry in entries:
            self._evict(entry)

    def _evict(self, entry: int) -> None:
        self._order.remove(entry)
        forgotten = self._ghosts.add(self._keys[entry], self._used[entry] * _CLASSES + self._class[entry])
        if forgotten is not None:
            self._known[self._list(forgotten % _CLASSES, forgotten // _CLASSES)] -= 1

    def remove(self, entry: int) -> None:
        self._order.remove(entry)
        self._known[self._list(self._class[entry], self._used[entry])] -= 1

    def victims(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        if self._uses_left <= 0:
            self._tick()
        found: list[int] = []
        for rank in range(self._first, len(self._ranked)):
            which = self._ranked[rank]
            if rank == self._first and self._order.coldest(which) < 0:
                self._first += 1
                continue
            found += islice(self._order.idle(which, busy), count - len(found))
            if len(found) == count:
                break
        return found

    def release(self, entry: int) -> None:
        which = self._list(self._class[entry], self._used[entry])
        self._order.release(entry, which)
        self._first = min(self._first, self._rank[which])

    def _count_use(self, entry: int, again: bool) -> None:
        self._class[entry] = int(again)
        self._uses_left -= 1
        self._refresh(entry)

    def _refresh(self, entry: int) -> None:
        self._used[entry] = self._now
        self._known[self._put(entry)] += 1

    def _put(self, entry: int) -> int:
        """To the hot end of the list where the entry belongs, which is returned."""
        which = self._list(self._class[entry], self._used[entry])
        self._order.put(entry, which)
        self._first = min(self._first, self._rank[which])
        return which

    def _came_back(self, again: int, used: int) -> None:
        self._model.came_back(again, min(_AGES, self._now - used))
        self._known[self._list(again, used)] -= 1

    def _list(self, again: int, used: int) -> int:
        """The list of this class and tick: its turn in a ring of ticks, or the one of all that is older."""
        return again * _LISTS_A_CLASS + (used % _AGES if self._now - used < _AGES else _AGES)

    # Time

    def _tick(self) -> None:
        self._model.tick([self._known_by_age(first) for first in (0, _LISTS_A_CLASS)])
        self._now += 1
        self._uses_left = self._tick_uses
        for first in (0, _LISTS_A_CLASS):
            old, oldest = first + _AGES, first + self._now % _AGES
            self._order.append(old, oldest)
            self._known[old] += self._known[oldest]
            self._known[oldest] = 0
        if self._now % _TICKS_A_FIT == 0:
            self._densities = self._model.densities()
        self._rank_lists()

    def _known_by_age(self, first: int) -> list[int]:
        """The chunks of the class whose lists begin at `first`, from the youngest; the old ones are one number."""
        ring = self._known[first : first + _AGES]
        split = self._now % _AGES + 1
        return [*reversed(ring[:split]), *reversed(ring[split:]), self._known[first + _AGES]]

    def _rank_lists(self) -> None:
        oldest_first = np.argsort(self._densities[:, ::-1], axis=None, kind="stable")
        again, younger = np.divmod(oldest_first, _LISTS_A_CLASS)
        turn = np.where(younger == 0, _AGES, (self._now + younger) % _AGES)
        ranked = again * _LISTS_A_CLASS + turn
        ranks = np.empty_like(ranked)
        ranks[ranked] = np.arange(len(ranked))
        self._ranked, self._rank = ranked.tolist(), ranks.tolist()
        self._first = 0
