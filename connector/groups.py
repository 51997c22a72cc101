"""KV cache groups: layers that share one block table."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvcascade.errors import ConfigError

__all__ = ["GroupSpec", "check_groups"]


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


def check_groups(groups: Sequence[GroupSpec], tokens_per_hash: int | None = None) -> int:
    """Tokens of a hash: as given, else those of the smallest block.

    Raises:
        ConfigError: groups that can't be together, or whose chunks do not end where hashes do.
    """
    indexes = [group.index for group in groups]
    if not groups or len(set(indexes)) < len(indexes):
        raise ConfigError(f"groups: indexes {indexes}; at least one group, each with an index of its own")
    size = min(group.tokens_per_block for group in groups) if tokens_per_hash is None else tokens_per_hash
    for group in groups:
        if size < 1 or group.tokens_per_chunk % size:
            raise ConfigError(
                f"tokens_per_hash: {size}; the {group.tokens_per_chunk} tokens of a chunk of group "
                f"{group.index} must be a multiple of it"
            )
    return size
