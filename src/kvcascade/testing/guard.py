"""Proof that a thread does no I/O: the scheduler's, on whose time every request of the engine waits."""

import functools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from kvcascade.types import Buffer, Key

from .wrappers import Answer, TierWrapper

__all__ = ["GuardTier", "IOViolation", "forbid_io"]

# What Python announces to audit hooks. Reads and writes are not announced, hence the patches below.
_EVENTS = ("open", "os.", "socket.", "subprocess.", "shutil.", "tempfile.", "fcntl.", "sqlite3.", "glob.")
_HARMLESS = {"os.putenv", "os.unsetenv"}
# fmt: off
_OS = [
    "access", "close", "fdatasync", "fstat", "fsync", "ftruncate", "lseek", "lstat", "posix_fallocate", "pread",
    "preadv", "pwrite", "pwritev", "read", "readv", "sendfile", "stat", "statvfs", "sync", "write", "writev",
]
_SOCKET = ["accept", "recv", "recv_into", "recvfrom", "recvmsg", "send", "sendall", "sendmsg", "sendto"]
# fmt: on


class IOViolation(AssertionError):
    """A guarded thread did I/O, or slept."""


class _Guard:
    """Who is guarded, and what was caught. An audit hook can't be removed, so that one stays for good and asks
    here; the patches stand while any thread is guarded."""

    def __init__(self) -> None:
        self._caught: dict[int, list[str]] = {}  # guarded thread -> what it did
        self._lock = threading.Lock()  # covers beginning and ending
        self._patches: ExitStack | None = None
        self._hooked = False
        self._reporting = threading.local()

    def begin(self, ident: int) -> bool:
        """False where the thread is guarded already."""
        with self._lock:
            if ident in self._caught:
                return False
            if not self._hooked:
                sys.addaudithook(self._audit)
                self._hooked = True
            self._patches = self._patches or _patched()
            self._caught[ident] = []
            return True

    def end(self, ident: int) -> list[str]:
        """What the thread was caught at."""
        with self._lock:
            caught = self._caught.pop(ident)
            if self._patches is not None and not self._caught:
                self._patches.close()
                self._patches = None
            return caught

    def check(self, what: str) -> None:
        """Notes and raises, where the calling thread is guarded."""
        caught = self._caught.get(threading.get_ident())
        if caught is None or getattr(self._reporting, "now", False):
            return
        self._reporting.now = True  # reading source lines for the stack is I/O of our own
        try:
            stack = "".join(traceback.format_stack(sys._getframe(2), limit=12))
        finally:
            self._reporting.now = False
        caught.append(f"{what}, called from\n{stack}")
        raise IOViolation(f"I/O on a thread that must do none: {what}")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._caught and event.startswith(_EVENTS) and event not in _HARMLESS:
            self.check(f"{event}{arguments!r:.120}")


_guard = _Guard()


@contextmanager
def forbid_io(thread: int | None = None) -> Iterator[None]:
    """Inside, a call of `thread` (an ident; default: the caller) that opens, reads, writes or lists files, uses a
    socket, starts a process or sleeps raises `IOViolation`, there and again at the end, in case it was swallowed.

    Not seen: what C code does by itself (LMDB, file objects that are already open); for tiers there is
    `GuardTier`. A module that is imported for the first time is read from disk: that counts.

    Raises:
        IOViolation: at the end, with what was done and from where.
    """
    ident = threading.get_ident() if thread is None else thread
    if not _guard.begin(ident):
        yield  # inside another one, which reports
        return
    try:
        yield
    finally:
        caught = _guard.end(ident)
    if caught:
        raise IOViolation(f"{len(caught)} times I/O on a thread that must do none:\n" + "\n".join(caught))


class GuardTier(TierWrapper):
    """Raises `IOViolation` where a verb that may do I/O is called from a thread that `forbid_io` guards."""

    def around(self, verb: str, keys: Sequence[Key], buffers: Sequence[Buffer], call: Answer) -> Any:
        _guard.check(f"{type(self.inner).__name__}.{verb} of {len(keys)} keys")
        return call()


def _patched() -> ExitStack:
    stack = ExitStack()
    for owner, names in ((os, _OS), (socket.socket, _SOCKET), (time, ["sleep"])):
        for name in names:
            if hasattr(owner, name):
                checked = _checked(getattr(owner, name), f"{owner.__name__}.{name}")
                stack.enter_context(mock.patch.object(owner, name, checked))
    return stack


def _checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not _is_message(arguments[0] if arguments else None):
            _guard.check(name)
        return function(*arguments, **named)

    return call


def _is_message(end: object) -> bool:
    """Whether this is a socket between processes of this machine that never waits: what passes there is no I/O."""
    return isinstance(end, socket.socket) and end.family == socket.AF_UNIX and end.gettimeout() == 0
