"""Reading what lies in a file, whatever state it is in: for looking at chunks from outside."""

import errno
import mmap
import os

from kvcascade.types import Buffer

from .blocks import DIRECT, MAX_BLOCK, read_at

__all__ = ["read_raw"]


def read_raw(path: str, offset: int, nbytes: int) -> tuple[Buffer, os.stat_result]:
    """`nbytes` from `offset` on (fewer where the file ends before), and the facts of the file that they are of.
    Past the page cache where that works: what counts is what the medium has. `offset` is in whole blocks.

    Raises:
        OSError: it can't be read, or is a link.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    if DIRECT:
        try:
            return _read(path, flags | DIRECT, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
    return _read(path, flags, offset, nbytes)


def _read(path: str, flags: int, offset: int, nbytes: int) -> tuple[Buffer, os.stat_result]:
    memory = memoryview(mmap.mmap(-1, max(1, -(-nbytes // MAX_BLOCK)) * MAX_BLOCK))
    fd = os.open(path, flags)
    try:
        info = os.fstat(fd)
        there = read_at(fd, [memory], offset)
    finally:
        os.close(fd)
    return memory[: min(there, nbytes)], info
