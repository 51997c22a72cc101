"""Caches that move no bytes: which chunks they would hold. Plain ones, that share no code with the stack."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

__all__ = ["CACHES", "Arc", "Cache", "Lru", "Prompt", "S3Fifo"]

Prompt = Sequence[int]
"""The ids of a prompt's chunks, head first. Equal ids are equal prefixes."""


class Cache:
    """The chunks of a cache. `capacity` in chunks, None for no bound."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity

    def __contains__(self, chunk: int) -> bool:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def use(self, chunk: int) -> None:
        """One more prompt uses this chunk, which is here from now on."""
        raise NotImplementedError

    def evict(self) -> int:
        """Drops the chunk that should go next."""
        raise NotImplementedError

    def prefix(self, prompt: Prompt) -> int:
        """How many leading chunks are here."""
        for place, chunk in enumerate(prompt):
            if chunk not in self:
                return place
        return len(prompt)

    def admit(self, prompt: Prompt) -> None:
        """Takes all chunks of the prompt as used now, the head last; then evicts what is too much."""
        for chunk in reversed(prompt):
            self.use(chunk)
        while self._capacity is not None and len(self) > self._capacity:
            self.evict()


class Lru(Cache):
    """Evicts the least recently used chunk."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def use(self, chunk: int) -> None:
        self._chunks[chunk] = None
        self._chunks.move_to_end(chunk)

    def evict(self) -> int:
        return self._chunks.popitem(last=False)[0]


class Arc(Cache):
    """ARC, of Megiddo and Modha (FAST '03): what was used once, what was used again, and the ghosts of both."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self._recent: OrderedDict[int, None] = OrderedDict()
        self._frequent: OrderedDict[int, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[int, None] = OrderedDict()
        self._target = 0.0

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._recent or chunk in self._frequent

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def use(self, chunk: int) -> None:
        for known in (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts):
            if chunk in known:
                self._adapt(known)
                del known[chunk]
                self._frequent[chunk] = None
                return
        self._recent[chunk] = None

    def _adapt(self, known: OrderedDict[int, None]) -> None:
        recent, frequent = len(self._recent_ghosts), len(self._frequent_ghosts)
        if known is self._recent_ghosts:
            self._target = min(self._capacity or 0, self._target + max(1.0, frequent / recent))
        elif known is self._frequent_ghosts:
            self._target = max(0.0, self._target - max(1.0, recent / frequent))

    def evict(self) -> int:
        chunks, ghosts = self._frequent, self._frequent_ghosts
        if self._recent and (len(self._recent) > self._target or not self._frequent):
            chunks, ghosts = self._recent, self._recent_ghosts
        chunk = chunks.popitem(last=False)[0]
        ghosts[chunk] = None
        self._forget(self._capacity or 0)
        return chunk

    def _forget(self, capacity: int) -> None:
        if self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > capacity:
            self._recent_ghosts.popitem(last=False)
        ghosts = self._frequent_ghosts or self._recent_ghosts
        if ghosts and len(self) + len(self._recent_ghosts) + len(self._frequent_ghosts) > 2 * capacity:
            ghosts.popitem(last=False)


class S3Fifo(Cache):
    """S3-FIFO, of Yang and others (SOSP '23): a small queue, the main one, and the ghosts of the small one. One
    further use moves a chunk from the small queue to the main one."""

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[int, int] = OrderedDict()  # chunk -> further uses, at most 3
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._small_size = max(1, (capacity or 0) // 10)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._small or chunk in self._main

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def use(self, chunk: int) -> None:
        for queue in (self._small, self._main):
            if chunk in queue:
                queue[chunk] = min(3, queue[chunk] + 1)
                return
        if chunk in self._ghosts:
            del self._ghosts[chunk]
            self._main[chunk] = 0
        else:
            self._small[chunk] = 0

    def evict(self) -> int:
        while self._small and (len(self._small) > self._small_size or not self._main):
            chunk, uses = self._small.popitem(last=False)
            if not uses:
                self._remember(chunk)
                return chunk
            self._main[chunk] = 0
        chunk, uses = self._main.popitem(last=False)
        while uses:
            self._main[chunk] = uses - 1
            chunk, uses = self._main.popitem(last=False)
        return chunk

    def _remember(self, chunk: int) -> None:
        self._ghosts[chunk] = None
        if len(self._ghosts) > max(1, (self._capacity or 0) - self._small_size):
            self._ghosts.popitem(last=False)


CACHES: dict[str, Callable[[int | None], Cache]] = {"lru": Lru, "arc": Arc, "s3fifo": S3Fifo}
"""What a tier holds, by the name of its eviction policy."""
