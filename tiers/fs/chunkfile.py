"""One chunk in one file: filled under a temporary name, committed by renaming it, read with proof."""

import errno
import os
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from kvcascade.tiers.blocks import DIRECT, Frames, Scratch, read_at, write_at
from kvcascade.tiers.envelope import Envelope, Flaw, checksum, flaw_of, pack, parse
from kvcascade.tiers.files import sync_folder
from kvcascade.types import Buffer, Key

from .layout import BLOCK, GONE, Access, footprint

__all__ = ["ChunkFiles", "Found", "Verdict", "direct_works", "facts", "is_there", "same_file"]

COMMITS = 3
"""Tries to rename into a folder that may be removed, being empty, at the same time."""


class Verdict(Enum):
    """What a file turned out to be."""

    RIGHT = auto()
    ABSENT = auto()
    UNKNOWN = auto()
    """Of a newer format: to be left alone."""
    WRONG = auto()


class Found(NamedTuple):
    """What was read."""

    verdict: Verdict
    info: os.stat_result | None = None
    """Of the file that was read, where there was one."""
    written: float = 0.0
    """Unix time of the write."""


class ChunkFiles:
    """How chunks' files are written and read. Thread-safe; all calls raise OSError where the medium fails."""

    def __init__(self, direct: bool, durability: str, access: Access) -> None:
        self._flags = os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | (DIRECT if direct else 0)
        self._direct = direct
        self._durability = durability
        self._access = access
        self._scratch = Scratch()

    def fill(self, temporary: str, envelope: Envelope, payload: Buffer) -> None:
        """Writes a new file. Closing it is a part of that: a network file system may only then say that there is
        no room."""
        fd = self._access.create(temporary, self._flags)
        try:
            with Frames(self._scratch, [payload], BLOCK, self._direct) as (frame,):
                frame.header[:] = pack(envelope, BLOCK)
                frame.before_write()
                write_at(fd, frame.views, 0)
            if self._durability != "none":
                os.fsync(fd)
        finally:
            os.close(fd)

    def commit(self, temporary: str, path: str, nbytes: int) -> None:
        """Makes the file findable, with all of its bytes. Where the rename is answered with "no such file", it may
        still have been done (NFS repeats what it got no answer to): then the chunk is there."""
        for attempt in range(COMMITS):
            try:
                os.rename(temporary, path)  # noqa: PTH104 - strings: batches are thousands of paths
                break
            except OSError as error:
                if error.errno not in GONE:
                    raise
                if is_there(path, nbytes):
                    break
                if attempt == COMMITS - 1 or not Path(temporary).exists():
                    raise
                self._access.make_folder(Path(path).parent)
        if self._durability == "fsync":
            sync_folder(Path(path).parent)

    def read(self, path: str, payload: Buffer, stamp: bytes, key: Key) -> Found:
        """Reads the chunk into `payload`, and whether it is the right one."""
        try:
            fd = os.open(path, self._flags | os.O_RDONLY)
        except OSError as error:
            if error.errno in GONE:
                return Found(Verdict.ABSENT)
            raise
        try:
            return self._read(fd, payload, stamp, key)
        except OSError as error:
            if error.errno == errno.ESTALE:
                return Found(Verdict.ABSENT)
            raise
        finally:
            os.close(fd)

    def _read(self, fd: int, payload: Buffer, stamp: bytes, key: Key) -> Found:
        info = os.fstat(fd)
        if info.st_size != footprint(len(payload)):
            return Found(Verdict.WRONG, info)
        with Frames(self._scratch, [payload], BLOCK, self._direct) as (frame,):
            if read_at(fd, frame.views, 0) < info.st_size:
                return Found(Verdict.WRONG, info)
            frame.after_read()
            flaw = flaw_of(frame.header, payload, stamp, key)
            if flaw is not None:
                return Found(Verdict.UNKNOWN if flaw is Flaw.NEWER_FORMAT else Verdict.WRONG, info)
            envelope = parse(frame.header)
        return Found(Verdict.RIGHT, info, envelope.written if isinstance(envelope, Envelope) else 0.0)


def is_there(path: str, nbytes: int) -> bool:
    """Whether a whole chunk of `nbytes` payload bytes seems to lie at `path`.

    Raises:
        OSError: the medium can't say.
    """
    info = facts(path)
    return info is not None and info.st_size == footprint(nbytes)


def facts(path: str) -> os.stat_result | None:
    """None where there is no such file.

    Raises:
        OSError: the medium can't say.
    """
    try:
        return os.lstat(path)  # a string: batches are thousands of paths
    except OSError as error:
        if error.errno in (*GONE, errno.ENOTDIR):
            return None
        raise


def same_file(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether nobody has replaced the file between two looks at it. An inode alone is soon used again."""
    return os.path.samestat(one, other) and (one.st_mtime_ns, one.st_ctime_ns) == (
        other.st_mtime_ns,
        other.st_ctime_ns,
    )


def direct_works(temporary: str) -> bool:
    """Whether files can be written and read past the page cache where `temporary` lies, tried with a file there.

    Raises:
        OSError: not even other files can be written there.
    """
    if DIRECT:
        try:
            _try(ChunkFiles(True, "none", Access()), temporary)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        else:
            return True
    _try(ChunkFiles(False, "none", Access()), temporary)
    return False


def _try(files: ChunkFiles, temporary: str) -> None:
    key, payload = b"trial", memoryview(bytearray(BLOCK))
    try:
        files.fill(temporary, Envelope(bytes(16), key, BLOCK, 0.0, 0, checksum(payload)), payload)
        files.read(temporary, payload, bytes(16), key)
    finally:
        Path(temporary).unlink(missing_ok=True)
