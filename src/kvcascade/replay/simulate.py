"""What would a cache have found? Plain simulations that move no bytes.

The semantics are those of a prefix cache. A request hits the leading chunks of its prompt that are in the cache,
up to the first that is not; after it, all chunks of its prompt are in the cache, and of those the deepest is the
first to be evicted. The hit rate is hits over all chunks of all prompts.

This is the reference beside which the stack is checked, so it shares no code with it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from .caches import CACHES, Cache, Lru, Prompt

__all__ = ["POLICIES", "HitCount", "Lru", "Prompt", "lru", "optimal", "simulate"]


class HitCount(NamedTuple):
    """What one cache found."""

    hits: int
    chunks: int
    """Chunks of all prompts."""

    @property
    def rate(self) -> float:
        return self.hits / self.chunks if self.chunks else 0.0


def simulate(cache: Callable[[int | None], Cache], prompts: Sequence[Prompt], capacity: int | None) -> HitCount:
    """What a cache of this kind would have found. `capacity` in chunks, None for no bound."""
    chunks = cache(capacity)
    hits = 0
    for prompt in prompts:
        hits += chunks.prefix(prompt)
        chunks.admit(prompt)
    return HitCount(hits, sum(map(len, prompts)))


lru = partial(simulate, Lru)


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


POLICIES: dict[str, Callable[[Sequence[Prompt], int | None], HitCount]] = {
    **{name: partial(simulate, cache) for name, cache in CACHES.items()},
    "optimal": optimal,
}
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
