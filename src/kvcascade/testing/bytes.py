"""Chunks whose bytes follow from their key, so that a crossed, shifted, stale or unwritten one shows."""

import hashlib
import mmap
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from kvcascade.types import Buffer, Key

__all__ = ["UNWRITTEN", "buffer", "bytes_for", "fill", "holds", "key_for"]

UNWRITTEN = 0xAA
"""What `buffer` fills memory with that nobody has written yet."""

_STRIDE = 0x9E3779B97F4A7C15  # odd: the words of one chunk all differ


def key_for(number: int, group: int = 0) -> Key:
    """A key as an engine makes them: a 32-byte hash, then the group's index in 4 bytes."""
    return hashlib.sha256(str(number).encode()).digest() + group.to_bytes(4, "big")


def bytes_for(key: Key, nbytes: int, epoch: str = "") -> bytes:
    """The `nbytes` bytes that belong to `key`, the same in every process.

    Each 8-byte word depends on the key, the `epoch` and the word's place. A shorter chunk is the start of a longer
    one of the same key.
    """
    return bytes(_words(key, nbytes, epoch).data.cast("B")[:nbytes])


def fill(view: Buffer, key: Key, epoch: str = "") -> None:
    """Writes the bytes of `key` into the buffer, at its own length."""
    np.frombuffer(view, np.uint8)[:] = _words(key, len(view), epoch).view(np.uint8)[: len(view)]


def holds(view: Buffer | bytes | bytearray, key: Key, epoch: str = "") -> bool:
    """Whether the buffer holds exactly the bytes of `key`, at its own length. Faster than comparing with `==`,
    which is slow on a memoryview."""
    found = np.frombuffer(view, np.uint8)
    wanted = _words(key, len(found), epoch).view(np.uint8)[: len(found)]
    return bool(np.array_equal(found, wanted))


def buffer(nbytes: int, filler: int = UNWRITTEN) -> Buffer:
    """A writable buffer on a page boundary, as a slot of the host pool is; never written bytes are `filler`."""
    view = memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    view[:] = bytes([filler]) * nbytes
    return view


def _words(key: Key, nbytes: int, epoch: str) -> Any:
    seed = xxhash.xxh3_64_intdigest(key, seed=xxhash.xxh3_64_intdigest(epoch.encode()))
    return _ramp(-(-nbytes // 8)) + np.uint64(seed)


@lru_cache(maxsize=16)
def _ramp(count: int) -> Any:
    ramp = np.arange(count, dtype="<u8") * np.uint64(_STRIDE)
    ramp.flags.writeable = False
    return ramp
