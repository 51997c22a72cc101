"""Keys of a replay, and the bytes that belong to each: what a load must bring back."""

from hashlib import blake2b, sha256

import numpy as np

from kvcascade.errors import KVCascadeError
from kvcascade.types import Buffer, Key

__all__ = ["Content", "WrongBytesError", "key_of"]

_GROUP = (0).to_bytes(4, "big")


def key_of(hash_id: int) -> Key:
    """The key of a trace's chunk: 32 bytes of hash, as an engine's, then the index of the KV cache group."""
    return sha256(str(hash_id).encode()).digest() + _GROUP


class WrongBytesError(KVCascadeError):
    """A loaded chunk is not what was stored under its key."""


class Content:
    """The bytes of chunks, derived from their keys: a fixed pattern in which no two words are alike, each word
    of it xor-ed with one that the key gives. So a chunk of another key differs in every word, and a chunk that
    was moved, cut or torn differs too. Not thread-safe: one buffer is used for all.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._pattern = np.random.default_rng(seed=512).integers(2**64, size=-(-chunk_bytes // 8), dtype=np.uint64)
        self._words = np.empty_like(self._pattern)
        self._bytes = self._words.view(np.uint8)[:chunk_bytes]

    def write(self, key: Key, slot: Buffer) -> None:
        """Fills the slot with the chunk of the key."""
        self._make(key)
        np.frombuffer(slot, np.uint8)[:] = self._bytes

    def check(self, key: Key, slot: Buffer) -> None:
        """Compares every byte.

        Raises:
            WrongBytesError: one differs.
        """
        self._make(key)
        found = np.frombuffer(slot, np.uint8)
        if not np.array_equal(found, self._bytes):
            raise WrongBytesError(f"chunk {key.hex()}: {_difference(found, self._bytes)}")

    def _make(self, key: Key) -> None:
        word = int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
        np.bitwise_xor(self._pattern, np.uint64(word), out=self._words)


def _difference(
    found: "np.ndarray[tuple[int], np.dtype[np.uint8]]", wanted: "np.ndarray[tuple[int], np.dtype[np.uint8]]"
) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} bytes instead of {len(wanted)}"
    wrong = np.flatnonzero(found != wanted)
    first = int(wrong[0])
    return (
        f"{len(wrong):,} of {len(wanted):,} bytes are wrong, the first at offset {first}: "
        f"expected {wanted[first : first + 8].tobytes().hex()}, found {found[first : first + 8].tobytes().hex()}"
    )
