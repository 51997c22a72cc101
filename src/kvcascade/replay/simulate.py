"""What would a cache have found? Plain simulations that move no bytes.

The semantics are those of a prefix cache. A request hits the leading chunks of its prompt that are in the cache,
up to the first that is not; after it, all chunks of its prompt are in the cache, and of those the deepest is the
first to be evicted. The hit rate is hits over all chunks of all prompts.

This is the reference beside which the stack is checked, so it shares no code with it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

__all__ = ["POLICIES", "HitCount", "Lru", "Prompt", "lru", "optimal"]

Prompt = Sequence[int]
"""The ids of a prompt's chunks, head first. Equal ids are equal prefixes."""


class HitCount(NamedTuple):
    """What one cache found."""

    hits: int
    chunks: int
    """Chunks of all prompts."""

    @property
    def rate(self) -> float:
        return self.hits / self.chunks if self.chunks else 0.0


class Lru:
    """The chunks of a least-recently-used cache. `capacity` in chunks, None for no bound."""

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def prefix(self, prompt: Prompt) -> int:
        """How many leading chunks are here."""
        for place, chunk in enumerate(prompt):
            if chunk not in self._chunks:
                return place
        return len(prompt)

    def admit(self, prompt: Prompt) -> None:
        """Takes all chunks of the prompt as used now, the head last; then evicts what is too much."""
        for chunk in reversed(prompt):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while self._capacity is not None and len(self._chunks) > self._capacity:
            self._chunks.popitem(last=False)


def lru(prompts: Sequence[Prompt], capacity: int | None) -> HitCount:
    """Evicts the least recently used chunk."""
    cache = Lru(capacity)
    hits = 0
    for prompt in prompts:
        hits += cache.prefix(prompt)
        cache.admit(prompt)
    return HitCount(hits, sum(map(len, prompts)))


def optimal(prompts: Sequence[Prompt], capacity: int | None) -> HitCount:
    """Knows the future: evicts the chunk whose next use is farthest, and keeps none that is not used again.
    What a prompt brings competes at once with what is there, also where the prompt is larger than the cache."""
    never = len(prompts)
    next_use: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []  # a heap of (-next use, -depth, chunk); stale where next_use differs
    hits = 0
    for prompt, uses in zip(prompts, _uses_after(prompts), strict=True):
        hits += _leading(prompt, next_use)
        for depth, (chunk, use) in enumerate(zip(prompt, uses, strict=True)):
            next_use[chunk] = use
            heappush(farthest, (-use, -depth, chunk))
        while farthest and (-farthest[0][0] == never or (capacity is not None and len(next_use) > capacity)):
            use, _, chunk = heappop(farthest)
            if next_use.get(chunk) == -use:
                del next_use[chunk]
    return HitCount(hits, sum(map(len, prompts)))


POLICIES: dict[str, Callable[[Sequence[Prompt], int | None], HitCount]] = {"lru": lru, "optimal": optimal}
"""The simulations of one tier, by name."""


def _uses_after(prompts: Sequence[Prompt]) -> list[list[int]]:
    """For each chunk of each prompt the number of the next prompt that uses it, len(prompts) where none does."""
    coming: dict[int, int] = {}
    uses = []
    for number in range(len(prompts) - 1, -1, -1):
        uses.append([coming.get(chunk, len(prompts)) for chunk in prompts[number]])
        coming.update(dict.fromkeys(prompts[number], number))
    return uses[::-1]


def _leading(prompt: Prompt, cached: dict[int, int]) -> int:
    for place, chunk in enumerate(prompt):
        if chunk not in cached:
            return place
    return len(prompt)
