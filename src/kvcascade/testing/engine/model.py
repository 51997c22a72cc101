"""The model: its tokens and its KV are functions of all tokens before, so that anything else shows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

__all__ = ["NO_WORD", "Model", "next_hash", "prefix_hashes"]

NO_WORD = 0xAAAA_AAAA_AAAA_AAAA
"""What a token's place holds that was not computed, or for a draft that was rejected."""

_VOCABULARY = 1 << 31
_MIX = np.uint64(0x9E3779B97F4A7C15)


def prefix_hashes(tokens: Sequence[int], known: Sequence[int] = ()) -> list[int]:
    """For each token a hash of it and all before it; `known` are those of its first tokens."""
    hashes = list(known)
    for token in tokens[len(hashes) :]:
        hashes.append(next_hash(hashes, token))
    return hashes


def next_hash(hashes: Sequence[int], token: int) -> int:
    """The hash of a token after those of these hashes."""
    return xxhash.xxh3_64_intdigest(token.to_bytes(4, "big"), seed=hashes[-1] if hashes else 0)


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

    def words(self, prefixes: Sequence[int], rank: int, group: int, layer: int, weights: int | None = None) -> Any:
        """The 8 bytes that each token has in one layer, as an array of integers."""
        weights = self.weights if weights is None else weights
        salt = xxhash.xxh3_64_intdigest(f"{weights} {rank} {group} {layer}".encode())
        return (np.array(prefixes, np.uint64) ^ np.uint64(salt)) * _MIX
