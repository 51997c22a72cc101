"""KV cache groups: layers that share one block table."""

from dataclasses import dataclass

from kvcascade.errors import ConfigError

__all__ = ["GroupSpec"]


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group of the engine.

    Raises:
        ConfigError: a number is out of range.
    """

    tokens_per_block: int
    blocks_per_chunk: int = 1
    window: int | None = None
    """Sliding window in tokens: a token attends to itself and the `window - 1` before it. None: to all (full
    attention). State that depends on the last block only is a window of 2."""
    draft: bool = False
    """The layers of a draft model (EAGLE, MTP): what they hold for the newest tokens may be written again."""
    index: int = 0
    """The engine's number of the group: its place in block tables, and the last part of its keys."""

    def __post_init__(self) -> None:
        smallest = {"tokens_per_block": 1, "blocks_per_chunk": 1, "index": 0, "window": 2}
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"groups[{self.index}].{name}: {value!r}; an integer of at least {least}")

    @property
    def tokens_per_chunk(self) -> int:
        return self.tokens_per_block * self.blocks_per_chunk
