"""The model: its tokens and its KV are functions of all tokens before, so that anything else shows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

__all__ = ["NO_WORD", "UNSETTLED", "Model", "certain_bits", "next_hash", "prefix_hashes", "settled"]

NO_WORD = 0xAAAA_AAAA_AAAA_AAAA
"""What a token's place holds that was not computed, or for a draft that was rejected."""

UNSETTLED = 0
"""In place of a prefix: the token here is not known, or was a draft that was rejected."""

_VOCABULARY = 1 << 31
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SUCCESSOR = np.uint64(0xFFFF)
"""The bits of a draft model's word that depend on the token after its own."""


def prefix_hashes(tokens: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """For each token a hash of it and all before it; `known` are those of its first tokens."""
    hashes = list(known)
    for token in tokens[len(hashes) :]:
        hashes.append(next_hash(hashes, token))
    return hashes


def next_hash(hashes: Sequence[int], token: int) -> int:
    """The hash of a token after those of these hashes."""
    return xxhash.xxh3_64_intdigest(token.to_bytes(4, "big"), seed=hashes[-1] if hashes else 0)


def certain_bits(start: int, count: int, block: int, draft: bool) -> Any:
    """Which bits of the words of `count` tokens, from `start` on, are decided by the tokens up to their last.

    Of a draft model's word for the last token of a block those that depend on the next token are not: blocks are
    known by their own tokens, and shared by requests that go on differently.
    """
    bits = np.full(count, ~np.uint64(0))
    if draft:
        last = (np.arange(start, start + count) + 1) % block == 0
        last[-1:] = True
        bits[last] = ~_SUCCESSOR
    return bits


def settled(words: Any) -> Any:
    """Of a draft model's words: whether the token after was known when they were computed."""
    return (words & _SUCCESSOR) != 0


class Model:
    """What is computed, by weights that may change.

    Attributes:
        weights: which weights these are. With others the same tokens have other KV, and the same successors.
    """

    def __init__(self) -> None:
        self.weights = 0

    def next_token(self, prefix: int) -> int:
        """The token after those of this hash."""
        return prefix % _VOCABULARY

    def words(
        self,
        prefixes: Sequence[int],
        rank: int,
        group: int,
        layer: int,
        weights: int | None = None,
        after: int | None = None,
    ) -> Any:
        """The 8 bytes that each token has in one layer, as an array of integers.

        Args:
            after: in a draft model's layer, whose words depend on the next token too: the prefix of the token
                after the last, or `UNSETTLED`.
        """
        weights = self.weights if weights is None else weights
        salt = xxhash.xxh3_64_intdigest(f"{weights} {rank} {group} {layer}".encode())
        words = (np.array(prefixes, np.uint64) ^ np.uint64(salt)) * _MIX
        if after is None:
            return words
        successors = np.array([*prefixes[1:], after], np.uint64)
        return words & ~_SUCCESSOR | np.where(successors, successors & _SUCCESSOR | np.uint64(1), np.uint64(0))
