"""What one transfer of a request consists of: which chunks, and which of their blocks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcascade.errors import ProtocolError
from kvcascade.types import Key, StoreOffer

from .coverage import first_needed_block, needed_chunks
from .groups import GroupSpec
from .protocols import NO_BLOCK, Block, Blocks
from .requests import GroupState, RequestState
from .transfers import ChunkCopy

__all__ = ["LoadPlan", "StorePlan", "plan_load", "plan_store"]


class _Place(NamedTuple):
    """A chunk of a request."""

    group: int
    chunk: int


@dataclass(slots=True)
class StorePlan:
    """What can be stored of a request after a step."""

    ends: list[int]
    """For each group, the chunk that its cursor moves to if everything is granted."""
    wanted: dict[Key, _Place] = field(default_factory=dict)
    """Chunks to offer, the head of the prompt first."""

    def copies(self, offer: StoreOffer, groups: Sequence[GroupState]) -> list[ChunkCopy]:
        """The copies of what was granted, in the order of `offer.keys`."""
        return [
            self._copy(self.wanted[key], slot, groups) for key, slot in zip(offer.keys, offer.slots, strict=True)
        ]

    def stop_at(self, refused: Sequence[Key]) -> None:
        """These were not granted: no cursor passes them."""
        for key in refused:
            group, chunk = self.wanted[key]
            self.ends[group] = min(self.ends[group], chunk)

    def _copy(self, place: _Place, slot: int, groups: Sequence[GroupState]) -> ChunkCopy:
        group = groups[place.group]
        size = group.spec.blocks_per_chunk
        return ChunkCopy(place.group, slot, 0, tuple(group.blocks[place.chunk * size : (place.chunk + 1) * size]))


def plan_store(
    state: RequestState,
    scheduled: int,
    unit: int,
    voided: Callable[[Key], bool],
    distrusted: AbstractSet[int] = frozenset(),
) -> StorePlan:
    """What of a request can be stored after this step, in which `scheduled` tokens of it are computed.

    Of a sliding window only what a hit reads is wanted, and only where the blocks for that are still its own.
    `voided`: keys that can't be stored yet, and are offered later; `distrusted`: blocks that may hold anything:
    what was computed from one is as wrong, so nothing of such a request is stored.
    """
    if distrusted and not distrusted.isdisjoint(block for group in state.groups for block in group.blocks):
        return StorePlan([group.cursor for group in state.groups])
    plan = StorePlan(state.storable(scheduled))
    places = []
    for number, group in enumerate(state.groups):
        for chunk in range(group.cursor, plan.ends[number]):
            if voided(group.keys[chunk]):
                plan.ends[number] = chunk
                break
            if _worth_storing(group, chunk, unit):
                places.append(((chunk + 1) * group.spec.tokens_per_chunk, _Place(number, chunk)))
    for _, place in sorted(places):
        plan.wanted[state.groups[place.group].keys[place.chunk]] = place
    return plan


def _worth_storing(group: GroupState, chunk: int, unit: int) -> bool:
    first, size = first_needed_block(group.spec, chunk, unit), group.spec.blocks_per_chunk
    return first < size and NO_BLOCK not in group.blocks[chunk * size + first : (chunk + 1) * size]


@dataclass(slots=True)
class LoadPlan:
    """What is loaded for a request."""

    tokens: int
    """Where the loaded prefix ends."""
    places: list[_Place] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    blocks: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """For each chunk the place of its first block that is loaded, and the blocks from there."""
    lost: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Groups, and blocks of theirs that were to be loaded and will not be."""

    def given_up(self) -> "LoadPlan":
        """The same, with nothing loaded."""
        lost = [(place.group, ids) for place, (_, ids) in zip(self.places, self.blocks, strict=True)]
        return LoadPlan(self.tokens, lost=lost)

    def copies(self, slots: Sequence[int]) -> list[ChunkCopy]:
        return [
            ChunkCopy(place.group, slot, first, blocks)
            for place, slot, (first, blocks) in zip(self.places, slots, self.blocks, strict=True)
        ]

    def ranges(self, groups: Sequence[GroupState]) -> list[tuple[int, int, Key]]:
        """For each chunk its first token, the token after its last one, and its key."""
        sizes = [groups[place.group].spec.tokens_per_chunk for place in self.places]
        return [
            (place.chunk * size, (place.chunk + 1) * size, key)
            for place, size, key in zip(self.places, sizes, self.keys, strict=True)
        ]

    def failed_at(self, failed: Iterable[int], groups: Sequence[GroupState]) -> int:
        """The first token that was to be loaded, if these chunks were not; the end of the load where all were."""
        first = self.tokens
        for number in failed:
            spec, place = groups[self.places[number].group].spec, self.places[number]
            first_block = place.chunk * spec.blocks_per_chunk + self.blocks[number][0]
            first = min(first, first_block * spec.tokens_per_block)
        return first


def plan_load(state: RequestState, blocks: Blocks, tokens: int) -> LoadPlan:
    """The chunks between the engine's own `state.local` tokens and token `tokens`, in the blocks allocated for
    them.

    Raises:
        ProtocolError: fewer blocks were allocated than that takes, or one that can't be filled.
    """
    plan = LoadPlan(tokens)
    for number, group in enumerate(state.groups):
        own = _allocated(state, group.spec, blocks, tokens)
        for chunk, first, ids in _to_fill(state, group.spec, own, tokens):
            plan.places.append(_Place(number, chunk))
            plan.keys.append(group.keys[chunk])
            plan.blocks.append((first, ids))
    return plan


def _allocated(state: RequestState, spec: GroupSpec, blocks: Blocks, tokens: int) -> Sequence[Block]:
    needed = -(-tokens // spec.tokens_per_block)
    own = blocks.blocks[spec.index] if spec.index < len(blocks.blocks) else ()
    if any(block.block_id == NO_BLOCK and not block.is_null for block in own):
        raise ProtocolError(
            f"update_state_after_alloc: request {state.id!r} was given block {NO_BLOCK} in group {spec.index}; "
            f"that is the id of the block that holds nothing, and is never copied"
        )
    if len(own) < needed:
        raise ProtocolError(
            f"update_state_after_alloc: request {state.id!r} has {len(own)} blocks in group {spec.index}; "
            f"{tokens} tokens take {needed}"
        )
    return own[:needed]


def _to_fill(
    state: RequestState, spec: GroupSpec, own: Sequence[Block], tokens: int
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Chunk, place in it of its first block after the engine's own, and the blocks from there; those that have
    their content already, or that the window has passed, are `NO_BLOCK`."""
    size = spec.blocks_per_chunk
    start = -(-state.local // spec.tokens_per_block)
    for chunk in needed_chunks(spec, state.local, tokens):
        begin, end = max(start, chunk * size), min(len(own), (chunk + 1) * size)
        ids = tuple(
            NO_BLOCK if block.is_null or block.block_hash is not None else block.block_id
            for block in own[begin:end]
        )
        if any(ids):
            yield chunk, begin - chunk * size, ids
