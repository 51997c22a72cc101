"""What the chunks of a replay hold, and what a load must bring back: bytes that follow from the key."""

import numpy as np

from kvcascade.errors import KVCascadeError
from kvcascade.testing.bytes import bytes_for, fill, holds, key_for
from kvcascade.types import Buffer, Key

__all__ = ["Content", "WrongBytesError", "key_of"]

key_of = key_for
"""The key of a trace's chunk, from its hash id."""


class WrongBytesError(KVCascadeError):
    """A loaded chunk is not what was stored under its key."""


class Content:
    """Writes chunks, and compares them."""

    def write(self, key: Key, slot: Buffer) -> None:
        """Fills the slot with the chunk of the key."""
        fill(slot, key)

    def check(self, key: Key, slot: Buffer) -> None:
        """Compares every byte.

        Raises:
            WrongBytesError: one differs.
        """
        if not holds(slot, key):
            raise WrongBytesError(f"chunk {key.hex()}: {_difference(key, slot)}")


def _difference(key: Key, slot: Buffer) -> str:
    found, wanted = np.frombuffer(slot, np.uint8), np.frombuffer(bytes_for(key, len(slot)), np.uint8)
    wrong = np.flatnonzero(found != wanted)
    first = int(wrong[0])
    return (
        f"{len(wrong):,} of {len(wanted):,} bytes are wrong, the first at offset {first}: "
        f"expected {wanted[first : first + 8].tobytes().hex()}, found {found[first : first + 8].tobytes().hex()}"
    )
