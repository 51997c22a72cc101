"""Reading and writing whole blocks past the page cache: alignment, vectored calls, short transfers."""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcascade.types import Buffer

__all__ = [
    "Frame",
    "Frames",
    "Scratch",
    "address",
    "allocate",
    "block_size",
    "direct_works",
    "open_blocks",
    "read_at",
    "sync_data",
    "write_at",
]

MIN_BLOCK, MAX_BLOCK = 512, 4096
DIRECT = getattr(os, "O_DIRECT", 0)
MAX_VIEWS = min(os.sysconf("SC_IOV_MAX"), 1024)
MAX_CALL_BYTES = 256 << 20


def block_size(path: Path) -> int:
    """The unit of direct I/O on the file system of `path`: the device's logical block, or the file system's own
    block where that is larger (writes below it are slow), in 512..4096."""
    wanted = max(_logical_block(path), os.statvfs(path).f_bsize)
    return max(MIN_BLOCK, min(MAX_BLOCK, 1 << (wanted - 1).bit_length()))


def _logical_block(path: Path) -> int:
    device = path.stat().st_dev
    here = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for queue in (here / "queue", here / ".." / "queue"):
        with contextlib.suppress(OSError, ValueError):
            return int((queue / "logical_block_size").read_text())
    return MAX_BLOCK


def direct_works(folder: Path, block: int) -> bool:
    """Whether a block can be written and read past the page cache in `folder`, tried on a file without a name."""
    if not DIRECT:
        return False
    scratch = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        with _nameless(folder) as fd:
            return os.pwrite(fd, memoryview(scratch)[:block], 0) == os.preadv(fd, [memoryview(scratch)[:block]], 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        raise


@contextlib.contextmanager
def _nameless(folder: Path) -> Iterator[int]:
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | DIRECT, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
        raise OSError(errno.EOPNOTSUPP, "files without a name are not supported", str(folder)) from error
    try:
        yield fd
    finally:
        os.close(fd)


def open_blocks(path: Path, direct: bool, create: bool = False) -> int:
    """A file descriptor for reading and writing, created only where there is no such file."""
    flags = os.O_RDWR | os.O_CLOEXEC | (DIRECT if direct else 0)
    return os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)


def allocate(fd: int, nbytes: int) -> None:
    """Makes the file `nbytes` long, with the space for them taken from the file system now, where it can."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        os.ftruncate(fd, nbytes)


def address(view: Buffer) -> int:
    """Where in memory the first byte stands."""
    if not len(view):
        return 0
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    import numpy as np  # takes ten times as long, and takes this one, too

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


class Scratch:
    """Page-aligned memory for headers and for what can't be transferred in place. Thread-safe."""

    USUAL_BYTES = 512 << 10
    KEPT = 16

    def __init__(self) -> None:
        self._kept: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview:
        """`nbytes` of it, with undefined content, until it is given back."""
        if nbytes > self.USUAL_BYTES:
            return memoryview(mmap.mmap(-1, nbytes))
        try:
            return self._kept.pop()
        except IndexError:
            return memoryview(mmap.mmap(-1, self.USUAL_BYTES))

    def give_back(self, memory: memoryview) -> None:
        """Nobody uses it any more."""
        if len(memory) == self.USUAL_BYTES and len(self._kept) < self.KEPT:
            self._kept.append(memory)


@dataclass(slots=True)
class Frame:
    """One chunk as it is transferred: header block, then the payload in place as far as alignment allows, then
    the rest of it through scratch memory."""

    header: memoryview
    payload: Buffer
    in_place: int
    """Payload bytes that are transferred in place; the others take the detour."""
    detour: memoryview
    """Whole blocks of scratch memory."""

    @property
    def views(self) -> list[Buffer]:
        if self.in_place == len(self.payload):
            return [self.header, self.payload]
        views = [self.header, self.payload[: self.in_place], self.detour]
        return [view for view in views if len(view)]

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.in_place + len(self.detour)

    def before_write(self) -> None:
        rest = len(self.payload) - self.in_place
        self.detour[:rest] = self.payload[self.in_place :]
        self.detour[rest:] = bytes(len(self.detour) - rest)

    def after_read(self) -> None:
        rest = len(self.payload) - self.in_place
        if rest:
            self.payload[self.in_place :] = self.detour[:rest]


class Frames:
    """A context: a frame for each payload, for as long as it lasts."""

    def __init__(self, scratch: Scratch, payloads: Sequence[Buffer], block: int, direct: bool) -> None:
        self._scratch = scratch
        self._block = block
        in_place = [_in_place(payload, block, direct) for payload in payloads]
        rests = [len(payload) - there for payload, there in zip(payloads, in_place, strict=True)]
        detours = [-(-rest // block) * block for rest in rests] if any(rests) else rests
        self._parts = list(zip(payloads, in_place, detours, strict=True))
        self._memory = scratch.take(len(payloads) * block + sum(detours))

    def __enter__(self) -> list[Frame]:
        memory, start = self._memory, 0
        frames = []
        for payload, there, detour in self._parts:
            middle = start + self._block
            end = middle + detour
            frames.append(Frame(memory[start:middle], payload, there, memory[middle:end]))
            start = end
        return frames

    def __exit__(self, *raised: object) -> None:
        self._scratch.give_back(self._memory)


def _in_place(payload: Buffer, block: int, direct: bool) -> int:
    if direct and address(payload) % block:
        return 0
    return len(payload) - len(payload) % block


def read_at(fd: int, views: Sequence[Buffer], offset: int) -> int:
    """Fills `views` from `offset` on; returns the bytes read, fewer only at the end of the file.

    Raises:
        OSError: the medium failed.
    """
    return _transfer(os.preadv, fd, views, offset)


def write_at(fd: int, views: Sequence[Buffer], offset: int) -> None:
    """Writes all of `views` at `offset`.

    Raises:
        OSError: the medium failed.
    """
    wanted = sum(map(len, views))
    if _transfer(os.pwritev, fd, views, offset) != wanted:
        raise OSError(errno.EIO, "the medium took only a part of the bytes")


def sync_data(fd: int) -> None:
    """Makes what was written to the file durable.

    Raises:
        OSError: the medium failed.
    """
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def _transfer(
    call: Callable[[int, Sequence[Buffer], int], int], fd: int, views: Sequence[Buffer], offset: int
) -> int:
    done = 0
    left = list(views)
    while left:
        moved = call(fd, left, offset + done)
        if moved <= 0:
            break
        done += moved
        left = _after(left, moved)
    return done


def _after(views: list[Buffer], moved: int) -> list[Buffer]:
    """What is left of `views` after `moved` bytes."""
    for place, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[place + 1 :]]
        moved -= len(view)
    return []
