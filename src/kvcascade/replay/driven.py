"""An eviction policy driven by prompts: the class that a stack uses, as a cache that moves no bytes."""

from collections.abc import Callable, Container, Iterator
from itertools import count

from kvcascade.manager.eviction import EvictionPolicy

from .caches import Cache, Prompt

__all__ = ["Driven", "PolicyChunks"]

_FEW = 64


class PolicyChunks:
    """Chunks in the order in which a policy would evict them."""

    def __init__(self, policy: Callable[[int], EvictionPolicy], capacity: int | None) -> None:
        self._policy = policy(capacity or 0)
        self._entries: dict[int, int] = {}
        self._chunks: list[int] = []
        self._free: list[int] = []

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, chunk: int) -> None:
        """One that is not here."""
        if not self._free:
            self._free.append(len(self._chunks))
            self._chunks.append(chunk)
        entry = self._free.pop()
        self._entries[chunk] = entry
        self._chunks[entry] = chunk
        self._policy.insert((entry,), (chunk.to_bytes(8, "big", signed=True),))

    def touch(self, prompt: Prompt, request: int) -> None:
        """The request of this number uses those of these that are here; the head is the last to go."""
        entries = (self._entries.get(chunk) for chunk in reversed(prompt))
        self._policy.touch([entry for entry in entries if entry is not None], request)

    def victims(self, number: int, spare: Container[int] = ()) -> list[int]:
        """The up to so many that should go next, but for `spare`."""
        spared: list[int] = []

        def busy(entry: int) -> bool:
            if self._chunks[entry] not in spare:
                return False
            spared.append(entry)
            return True

        found = self._policy.victims(number, busy)
        self._policy.touch(spared)
        return [self._chunks[entry] for entry in found]

    def coldest(self) -> Iterator[int]:
        """All, the one that should go next first."""
        known, number = 0, _FEW
        while known < len(self):
            yield from self.victims(number)[known:]
            known, number = number, 4 * number

    def evict(self, chunk: int) -> None:
        """One that is here goes."""
        entry = self._entries.pop(chunk)
        self._policy.evict((entry,))
        self._free.append(entry)


class Driven(Cache):
    """A cache that evicts by one of the policies behind `EvictionPolicy`."""

    def __init__(self, policy: Callable[[int], EvictionPolicy], capacity: int | None) -> None:
        super().__init__(capacity)
        self._chunks = PolicyChunks(policy, capacity)
        self._requests = count(1)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def admit(self, prompt: Prompt) -> None:
        for chunk in reversed(prompt):
            if chunk not in self._chunks:
                self._chunks.add(chunk)
        self._chunks.touch(prompt, next(self._requests))
        if self._capacity is not None and len(self) > self._capacity:
            for chunk in self._chunks.victims(len(self) - self._capacity):
                self._chunks.evict(chunk)
