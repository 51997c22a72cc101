"""Which keys were ever here, in bounded memory."""

from collections.abc import Collection

import numpy as np

__all__ = ["Seen"]

_BITS = 1 << 23


class Seen:
    """A bitmap of 1 MiB over hashes: a Bloom filter with one function."""

    def __init__(self) -> None:
        self._bits = bytearray(_BITS // 8)

    def add(self, hashes: Collection[int]) -> None:
        places = np.fromiter(hashes, dtype=np.int64, count=len(hashes)) % _BITS
        bits = np.left_shift(1, places & 7).astype(np.uint8)
        np.bitwise_or.at(np.frombuffer(self._bits, dtype=np.uint8), places >> 3, bits)

    def __contains__(self, key_hash: int) -> bool:
        """Whether it was added; now and then also where it was not."""
        place = key_hash % _BITS
        return bool(self._bits[place >> 3] >> (place & 7) & 1)
