"""The host pool: the memory of the primary tier, in slots of one chunk each. Not a `Tier`."""

import ctypes
import errno
import logging
import mmap
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Literal, Self, cast

from kvcascade.configs.schema import PrimarySettings
from kvcascade.configs.units import format_size
from kvcascade.errors import ClosedError, ConfigError, ProtocolError
from kvcascade.types import Buffer

from .available import available_memory
from .base import Probe
from .copymarks import CopyMarks

__all__ = ["FEWEST_CHUNKS", "HostPool", "HostSettings", "slots_for", "too_small"]

FEWEST_CHUNKS = 4
"""With fewer slots there is no half of primary to promote into while the other is stored to."""

_log = logging.getLogger(__name__)

_ALIGNMENT = 4096
_HEADER = struct.Struct("<8sIIQQQQ")  # magic, version, owner's pid, slots, bytes of a slot, stride, ranks
_HEADER_BYTES = _ALIGNMENT
_MAGIC = b"KVCSPOOL"
_VERSION = 2

_POPULATE_WRITE = 23  # madvise's MADV_POPULATE_WRITE, Linux 5.14
_PIECE = 64 << 20
_LOG_ABOVE = 4 << 30


class HostSettings(PrimarySettings):
    """Host memory, per engine: all its ranks together."""

    type: Literal["host"] = "host"

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        """Whether the memory is there now, and how many chunks of `chunk_bytes` it would hold."""
        probe = Probe(facts=[("memory needed", format_size(self.capacity))])
        available = available_memory()
        if available:
            probe.facts.append(("memory available", f"{format_size(available.bytes)} ({available.bound})"))
        problem = _shortage(self.capacity)
        if problem:
            probe.problems.append(f"capacity: {problem}")
        if chunk_bytes:
            probe.chunks = slots_for(self.capacity, chunk_bytes)
            if probe.chunks < FEWEST_CHUNKS:
                probe.problems.append(f"capacity: {too_small(self.capacity, chunk_bytes)}")
        return probe


def too_small(capacity: int, chunk_bytes: int) -> str:
    """Says in words that a capacity holds fewer than the fewest chunks that are of use."""
    return (
        f"{format_size(capacity)} holds {slots_for(capacity, chunk_bytes)} chunks of {format_size(chunk_bytes)}; "
        f"at least {FEWEST_CHUNKS} are needed"
    )


def slots_for(capacity: int, slot_bytes: int) -> int:
    """How many slots of `slot_bytes` a pool of `capacity` bytes holds, everything included; 0 where none fits."""
    return max(0, capacity - _HEADER_BYTES) // _stride(slot_bytes)


class HostPool:
    """One page-aligned mapping of `slots` slots of `slot_bytes` bytes, each at a multiple of 4096 bytes.

    On Linux it is a memfd: it has no name anywhere, so that a killed process leaves nothing behind, the size of
    /dev/shm does not bind it, and `fd` can be handed to another process. A header page in front of the slots says
    what it is. All pages are there when the constructor returns; slots hold zeros. Behind the slots lie the
    `marks` of the engine's workers.

    Args:
        slots: how many; `slots_for` says how many a capacity holds.
        slot_bytes: of one slot.
        ranks: workers that mark the ends of their copies.
        key: the setting that the size comes from, for messages.
        name: shows up in /proc/PID/maps.

    Raises:
        ConfigError: there is not that much memory; names what was asked, what there is, and `key`.

    Thread-safe. Slots are plain memory: who may write to which one is the caller's business.
    """

    def __init__(
        self, slots: int, slot_bytes: int, key: str = "tiers[0].capacity", name: str = "host", ranks: int = 0
    ) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ConfigError(f"{key}: holds not one chunk of {format_size(slot_bytes)}; give more")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.ranks = ranks
        self._stride = _stride(slot_bytes)
        self.nbytes = self._marks_at + CopyMarks.nbytes(ranks, slots)
        """Bytes of the whole mapping: what it really takes."""
        self._closed = False
        self._marks: CopyMarks | None = None
        problem = _shortage(self.nbytes)
        if problem:
            raise ConfigError(f"{key}: {problem}")
        with ExitStack() as undo:
            try:
                self._fd = _memory_file(name)
                undo.callback(self._close_fd)
                if self._fd is not None:
                    os.ftruncate(self._fd, self.nbytes)
                self._view = memoryview(mmap.mmap(-1 if self._fd is None else self._fd, self.nbytes))
                undo.callback(self._unmap)
                _populate(self._view, self.nbytes)
            except (OSError, OverflowError) as error:
                raise ConfigError(f"{key}: {format_size(self.nbytes)} can't be mapped: {error}") from error
            _HEADER.pack_into(self._view, 0, _MAGIC, _VERSION, os.getpid(), slots, slot_bytes, self._stride, ranks)
            undo.pop_all()

    @classmethod
    def attach(cls, fd: int) -> Self:
        """The pool of another process, mapped here too. `fd` is its memfd, handed over; it may be closed later.

        Raises:
            ConfigError: that is no pool, or one of another version.
        """
        pool = cls.__new__(cls)
        try:
            magic, version, _, pool.slots, pool.slot_bytes, pool._stride, pool.ranks = _HEADER.unpack(
                os.pread(fd, _HEADER.size, 0)
            )
            if (magic, version) != (_MAGIC, _VERSION):
                raise ValueError(f"no pool of version {_VERSION} is in it")
            pool.nbytes = pool._marks_at + CopyMarks.nbytes(pool.ranks, pool.slots)
            pool._view = memoryview(mmap.mmap(fd, pool.nbytes))
        except (OSError, ValueError, struct.error) as error:
            raise ConfigError(f"host pool of file descriptor {fd}: {error}") from error
        pool._fd = os.dup(fd)
        pool._closed = False
        pool._marks = None
        return pool

    @property
    def fd(self) -> int | None:
        """The memfd, open as long as the pool is; None where the system has none (macOS)."""
        self._check_open()
        return self._fd

    def slot(self, index: int) -> Buffer:
        """The bytes of a slot, writable, without a copy; exactly `slot_bytes` long."""
        if not 0 <= index < self.slots:
            raise ProtocolError(f"slot {index} of a pool with slots 0 to {self.slots - 1}")
        start = _HEADER_BYTES + index * self._stride
        try:
            return self._view[start : start + self.slot_bytes]
        except ValueError:
            raise ClosedError("the host pool is closed") from None

    @property
    def marks(self) -> CopyMarks:
        """Which copies the workers have ended, for every process that has the pool. It ends with the pool."""
        self._check_open()
        if self._marks is None:
            self._marks = CopyMarks(self._view[self._marks_at : self.nbytes], self.ranks, self.slots)
        return self._marks

    @property
    def _marks_at(self) -> int:
        return _HEADER_BYTES + self.slots * self._stride

    def close(self) -> None:
        """Ends the pool: no slot is given out any more. Slots that are still held stay valid; the memory goes back
        with the last of them. A second call does nothing."""
        if not self._closed:
            self._closed = True
            if self._marks is not None:
                self._marks.close()
            self._unmap()
            self._close_fd()

    def _unmap(self) -> None:
        mapping = cast(mmap.mmap, self._view.obj)
        self._view.release()
        with suppress(BufferError):  # slots are held; the mapping ends with them
            mapping.close()

    def _close_fd(self) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the host pool is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stride(slot_bytes: int) -> int:
    return -(-slot_bytes // _ALIGNMENT) * _ALIGNMENT


def _shortage(nbytes: int) -> str:
    """What is wrong with taking that much memory, in words; "" where nothing is."""
    available = available_memory()
    if available is None or nbytes <= available.bytes:
        return ""
    asked = f"{format_size(nbytes)} ({nbytes} bytes) asked"
    there = f"{format_size(available.bytes)} ({available.bytes} bytes) available"
    return f"{asked}, {there}: {available.bound}; give less"


def _memory_file(name: str) -> int | None:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"kvcascade-{name}", os.MFD_CLOEXEC)
    return None


def _populate(view: memoryview, nbytes: int) -> None:
    """Makes all pages present, so that no store waits for the kernel. ctypes releases the interpreter lock."""
    anchor = ctypes.c_char.from_buffer(view)
    address = ctypes.addressof(anchor)
    populate = _populator()
    starts = range(0, nbytes, _PIECE)
    loud = nbytes >= _LOG_ABOVE
    if loud:
        _log.info("taking %s of host memory", format_size(nbytes))
    try:
        with ThreadPoolExecutor(2, "kvcascade-prefault") as threads:
            done = threads.map(lambda start: populate(address + start, min(_PIECE, nbytes - start)), starts)
            for count, _ in enumerate(done, 1):
                if loud and count * 10 // len(starts) > (count - 1) * 10 // len(starts):
                    _log.info("host memory: %d %% of %s", count * 100 // len(starts), format_size(nbytes))
    finally:
        del anchor


def _populator() -> Callable[[int, int], None]:
    """Makes (address, length) present: by madvise, or by writing where the kernel is too old for that."""
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return _touch
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def populate(address: int, length: int) -> None:
        if madvise(address, length, _POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
        _touch(address, length)

    return populate


def _touch(address: int, length: int) -> None:
    ctypes.memset(address, 0, length)
