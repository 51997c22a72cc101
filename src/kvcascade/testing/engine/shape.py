"""What engine it is."""

from dataclasses import dataclass

from kvcascade.connector import GroupSpec

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
    blocks_per_chunk: int = 1
    draft_groups: tuple[int, ...] = ()
    """Groups that hold the layers of a draft model."""
    max_tokens: int = 512
    """Of one request, prompt and output."""

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk

    @property
    def groups(self) -> list[GroupSpec]:
        """The groups as a connector is told of them."""
        return [
            GroupSpec(
                self.tokens_per_block, self.blocks_per_chunk, window or None, number in self.draft_groups, number
            )
            for number, window in enumerate(self.windows)
        ]

    @property
    def depth(self) -> int:
        """Steps that may be in flight at a time."""
        return 2 if self.asynchronous else 1
