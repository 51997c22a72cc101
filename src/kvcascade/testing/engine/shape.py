"""What engine it is."""

from dataclasses import dataclass

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
    max_tokens: int = 512
    """Of one request, prompt and output."""

    @property
    def depth(self) -> int:
        """Steps that may be in flight at a time."""
        return 2 if self.asynchronous else 1
