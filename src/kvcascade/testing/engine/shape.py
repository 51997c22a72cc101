"""What engine it is."""

from dataclasses import dataclass
from itertools import chain, repeat

from kvcascade.connector import GroupSpec
from kvcascade.types import Key

from .requests import SimRequest

__all__ = ["EngineShape"]


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The sizes of a simulated engine."""

    tokens_per_block: int = 4
    blocks: int = 33
    """Of the device's pool, shared by all groups; block 0 is the null block."""
    windows: tuple[int, ...] = (0,)
    """A KV cache group each: tokens of its sliding window, 0 for full attention."""
    seqs: int = 4
    """Requests that run at a time."""
    budget: int = 64
    """Tokens that are scheduled in one step."""
    drafts: int = 0
    """Tokens that are drafted for each decoding request and step."""
    asynchronous: bool = False
    """Whether a step is planned before the results of the one before it are in."""
    ranks: int = 1
    """Tensor-parallel workers, each with a part of every block."""
    layers: int = 2
    blocks_per_chunk: tuple[int, ...] = ()
    """Of each group's chunks; 1 where it is not said."""
    draft_groups: tuple[int, ...] = ()
    """Groups that hold the layers of a draft model."""
    max_tokens: int = 512
    """Of one request, prompt and output."""

    @property
    def groups(self) -> list[GroupSpec]:
        """The groups as a connector is told of them."""
        return [
            GroupSpec(self.tokens_per_block, blocks, window or None, number in self.draft_groups, number)
            for number, (window, blocks) in enumerate(
                zip(self.windows, chain(self.blocks_per_chunk, repeat(1)), strict=False)
            )
        ]

    @staticmethod
    def keys(request: SimRequest, group: GroupSpec) -> list[Key]:
        """The keys of a request's chunks in this group, as far as their hashes are known."""
        suffix = group.index.to_bytes(4, "big")
        return [
            last + suffix for last in request.block_hashes[group.blocks_per_chunk - 1 :: group.blocks_per_chunk]
        ]

    @property
    def depth(self) -> int:
        """Steps that may be in flight at a time."""
        return 2 if self.asynchronous else 1
