"""What would a whole stack have found? A plain simulation of its tiers and policies that moves no bytes.

It knows chunks and prompts, one request at a time, and nothing of jobs, slots or time: all that is begun has ended
when the next request comes. It is the reference beside which the stack is checked, so it shares no code with it,
but the classes of eviction policies other than LRU, which are checked by themselves.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil, inf
from typing import Literal, NamedTuple

from kvcascade.configs.registry import EVICTION, resolve

from .caches import Prompt
from .driven import PolicyChunks

__all__ = ["StackHits", "TierModel", "simulate_stack"]


class TierModel(NamedTuple):
    """A tier, as far as it matters for what is found. Of the first one size, watermarks and eviction count."""

    name: str
    chunks: int | None = None
    """How many it holds; None where it has no bound."""
    write: Literal["through", "on_evict", "off"] = "through"
    fill: bool = True
    promote_after: float = 1
    """From their how-manieth use on its chunks move up; `inf` for never."""
    admit_after: int = 1
    watermarks: tuple[float, float] = (0.95, 0.90)
    """Shares of the first tier, high and low, between which demotion runs ahead of need, in every tier."""
    eviction: str = "lru"
    soft: tuple[float, float] | None = None
    """Shares of this tier, high and low: above the one it evicts by itself until the other is reached. None where
    one chunk goes for each that comes."""


class StackHits(NamedTuple):
    """What a stack of tiers found."""

    tiers: list[int]
    """Hits of each tier: chunks found in it and in none above it."""
    chunks: int
    """Chunks of all prompts."""
    written: list[int]
    """Chunks that each tier has received."""

    @property
    def rate(self) -> float:
        return sum(self.tiers) / self.chunks if self.chunks else 0.0


def simulate_stack(prompts: Iterable[Prompt], tiers: Sequence[TierModel]) -> StackHits:
    """What each tier would have given to these prompts, one after the other.

    A prompt hits its leading chunks that are in any tier which gives them to the first. Its use refreshes them in
    every tier. Of a prompt that is larger than the first tier the head is kept.

    Args:
        tiers: from the top.
    """
    stack = _Stack(tiers)
    chunks = 0
    for prompt in prompts:
        chunks += len(prompt)
        stack.play(prompt)
    return StackHits(stack.hits, chunks, stack.written)


class _LruChunks:
    """Chunks, the least recently used one first."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, chunk: int) -> None:
        self._chunks[chunk] = None

    def touch(self, prompt: Prompt, request: int) -> None:
        for chunk in reversed(prompt):
            if chunk in self._chunks:
                self._chunks.move_to_end(chunk)

    def victims(self, number: int, spare: Container[int] = ()) -> list[int]:
        return list(islice((chunk for chunk in self._chunks if chunk not in spare), number))

    def coldest(self) -> Iterator[int]:
        return iter(self._chunks)

    def evict(self, chunk: int) -> None:
        del self._chunks[chunk]


class _Tier:
    """The chunks of one tier, in the order of its policy."""

    def __init__(self, model: TierModel, uses: Mapping[int, int]) -> None:
        """`uses`: chunk -> prompts that have used it, and have ended."""
        self.model = model
        self._uses = uses
        self.below: _Tier | None = None
        """The tier that receives what this one evicts."""
        self.missed: set[int] = set()
        """Offered before they were used often enough."""
        self.clean: set[int] = set()
        """Copied to the tier below already."""
        self.written = 0
        high, low = model.soft or (1.0, 1.0)
        self._most, self._left = (max(1, int((model.chunks or 0) * share)) for share in (high, low))
        """Chunks at which it evicts, and how many it leaves."""
        self._chunks = _LruChunks() if model.eviction == "lru" else _policy_chunks(model)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._chunks

    def touch(self, prompt: Prompt, request: int) -> None:
        """The request of this number used these; the head is the last to go."""
        self._chunks.touch(prompt, request)

    def receive(self, chunk: int, spare: Container[int] = ()) -> bool:
        """Takes the chunk as the most recent one. False where one of `spare` would have to go for it."""
        if chunk in self._chunks:
            if self.model.soft is not None:
                self._chunks.touch([chunk], 0)  # it is stored again, by who does not know what is there
            return True
        while self.model.chunks is not None and len(self._chunks) >= self._most:
            victims = self._chunks.victims(max(1, len(self._chunks) - self._left), spare)
            if not victims:
                return False
            for victim in victims:
                self._copy_down(victim)
                self._chunks.evict(victim)
                self.clean.discard(victim)
        self._chunks.add(chunk)
        self.written += 1
        return True

    def run_ahead(self, high: float, low: float) -> None:
        """Copies the coldest down, so that enough of what is here can go at once."""
        if self.below is None or self.model.chunks is None:
            return
        free = self.model.chunks - len(self._chunks)
        if free + len(self.clean) >= ceil(self.model.chunks * (1 - high)):
            return
        for chunk in self._chunks.coldest():
            if free + len(self.clean) >= ceil(self.model.chunks * (1 - low)):
                return
            self._copy_down(chunk)

    def _copy_down(self, chunk: int) -> None:
        if self.below is None or chunk in self.clean:
            return
        if self._uses[chunk] >= self.below.model.admit_after:
            self.below.receive(chunk)
            self.clean.add(chunk)


def _policy_chunks(model: TierModel) -> PolicyChunks:
    return PolicyChunks(resolve(EVICTION, model.eviction), model.chunks)


class _Stack:
    def __init__(self, models: Sequence[TierModel]) -> None:
        self.hits = [0] * len(models)
        self._watermarks = models[0].watermarks if models else (1.0, 1.0)
        self._uses: Counter[int] = Counter()
        self._request = 0
        self._tiers = [_Tier(model, self._uses) for model in models]
        for above, tier in zip(self._tiers, self._tiers[1:], strict=False):
            if tier.model.write == "on_evict":
                above.below = tier

    @property
    def written(self) -> list[int]:
        return [tier.written for tier in self._tiers]

    def play(self, prompt: Prompt) -> None:
        if not self._tiers:
            return
        self._request += 1
        places = self._find(prompt)
        found = prompt[: len(places)]
        for tier in self._tiers:
            tier.touch(found, self._request)
        kept = set(found)
        for chunk, place in zip(found, places, strict=True):
            self.hits[place] += 1
            self._promote(chunk, place, kept)
        self._store(prompt[len(places) :], kept)
        for tier in self._tiers:
            tier.touch(prompt, self._request)
        for tier in self._tiers:
            tier.run_ahead(*self._watermarks)
        self._uses.update(prompt)

    def _find(self, prompt: Prompt) -> list[int]:
        """For each leading chunk the tier that gives it; up to half of the first tier comes from those below."""
        places: list[int] = []
        size = self._tiers[0].model.chunks
        room = inf if size is None else max(1, size // 2)
        for chunk in prompt:
            place = next((place for place, tier in enumerate(self._tiers) if self._gives(tier, chunk)), None)
            room -= place != 0
            if place is None or room < 0:
                break
            places.append(place)
        return places

    def _gives(self, tier: _Tier, chunk: int) -> bool:
        first = tier is self._tiers[0]
        return chunk in tier and (first or self._uses[chunk] + 1 >= tier.model.promote_after)

    def _promote(self, chunk: int, place: int, kept: Container[int]) -> None:
        if place == 0:
            return
        first, *between = self._tiers[:place]
        first.receive(chunk, spare=kept)
        for tier in between:
            if tier.model.fill and tier.model.write != "off":
                self._offer(tier, chunk)
        if first.below is self._tiers[place]:
            first.clean.add(chunk)

    def _store(self, computed: Prompt, kept: set[int]) -> None:
        """What was not found is stored, as long as that does not push out what is kept, its prompt's head."""
        first, *secondary = self._tiers
        through = [tier for tier in secondary if tier.model.write == "through"]
        for chunk in computed:
            new = chunk not in first
            if not first.receive(chunk, spare=kept):
                break
            first.touch([chunk], self._request)
            kept.add(chunk)
            for tier in through if new else ():
                self._offer(tier, chunk)
        for tier in through:
            for chunk in tier.missed.intersection(kept):
                self._offer(tier, chunk)

    def _offer(self, tier: _Tier, chunk: int) -> None:
        if self._uses[chunk] + 1 >= tier.model.admit_after:
            tier.receive(chunk)
            tier.missed.discard(chunk)
        else:
            tier.missed.add(chunk)
