"""The engine's copies between its device and primary that are under way."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcascade.types import Key

from .requests import Request

__all__ = ["Copies", "Ended"]


class Ended(NamedTuple):
    """Copies of one request that have ended: chunk `keys[i]` in slot `slots[i]`."""

    request: Request
    keys: list[Key]
    slots: list[int]


class Copies:
    """The copies of one direction, by request. A request may copy a chunk twice at a time, and an earlier request
    of the same id may still be at it. Used by the scheduler thread only."""

    def __init__(self) -> None:
        self._under_way: dict[Request, dict[Key, int]] = {}
        """Request -> key -> slot."""
        self._of_id: dict[str, list[Request]] = {}
        """Request id -> the requests of that id, the earliest first."""
        self._again: Counter[tuple[Request, Key]] = Counter()
        """How many more copies of a chunk a request has under way, beside the first."""

    def begin(self, request: Request, keys: Sequence[Key], slots: Sequence[int]) -> None:
        if not keys:
            return
        copies = dict(zip(keys, slots, strict=True))
        under_way = self._under_way.get(request)
        if under_way is None:
            self._of_id.setdefault(request.id, []).append(request)
            under_way = self._under_way[request] = {}
            if len(copies) == len(keys):
                self._under_way[request] = copies
                return
        if len(copies) < len(keys) or not copies.keys().isdisjoint(under_way):
            known = set(under_way)
            for key in keys:
                if key in known:
                    self._again[request, key] += 1
                known.add(key)
        under_way |= copies

    def end(self, req_id: str, keys: Sequence[Key]) -> tuple[list[Ended], list[Key]]:
        """Copies of these chunks have ended, for a request of this id; where there are several, for the earliest
        that copies the chunk. Returns what has ended, by request, and the keys that nobody of the id copies."""
        ended = []
        for request in self._of_id.get(req_id, ())[:]:
            slots = self._take(request, keys)
            if -1 not in slots:
                ended.append(Ended(request, list(keys), slots))
                return ended, []
            pairs = list(zip(keys, slots, strict=True))
            there = [(key, slot) for key, slot in pairs if slot >= 0]
            ended.append(Ended(request, [key for key, _ in there], [slot for _, slot in there]))
            keys = [key for key, slot in pairs if slot < 0]
        return ended, list(keys)

    def clear(self) -> None:
        """None is of interest any more."""
        self._under_way.clear()
        self._of_id.clear()
        self._again.clear()

    def __len__(self) -> int:
        return sum(map(len, self._under_way.values())) + self._again.total()

    def __iter__(self) -> Iterator[tuple[Key, str]]:
        """The chunk and the request's id of each copy."""
        for request, under_way in self._under_way.items():
            for key in under_way:
                yield from [(key, request.id)] * (1 + self._again[request, key])

    def _take(self, request: Request, keys: Sequence[Key]) -> list[int]:
        """The slots of these copies of the request, which are under way no longer; -1 for one that was not."""
        under_way = self._under_way[request]
        if self._again:
            slots = [self._take_one(request, key) for key in keys]
        elif len(keys) == len(under_way) and keys == list(under_way):  # nearly always: all of them, in order
            slots = list(under_way.values())
            under_way.clear()
        else:
            slots = [under_way.pop(key, -1) for key in keys]
        if not under_way:
            del self._under_way[request]
            others = self._of_id[request.id]
            others.remove(request)
            if not others:
                del self._of_id[request.id]
        return slots

    def _take_one(self, request: Request, key: Key) -> int:
        under_way = self._under_way[request]
        if not self._again[request, key]:
            return under_way.pop(key, -1)
        self._again[request, key] -= 1
        if not self._again[request, key]:
            del self._again[request, key]
        return under_way[key]
