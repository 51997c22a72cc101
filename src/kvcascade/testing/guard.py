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
    """What is guarded, and what was caught. An audit hook can't be removed, so that one stays for good and asks
    here."""

    def __init__(self) -> None:
        self.caught: dict[int, list[str]] = {}  # guarded thread -> what it did
        self._hooked = False
        self._reporting = threading.local()

    def check(self, what: str) -> None:
        """Notes and raises, where the calling thread is guarded."""
        caught = self.caught.get(threading.get_ident())
        if caught is None or getattr(self._reporting, "now", False):
            return
        self._reporting.now = True  # reading source lines for the stack is I/O of our own
        try:
            stack = "".join(traceback.format_stack(sys._getframe(2), limit=12))
        finally:
            self._reporting.now = False
        caught.append(f"{what}, called from\n{stack}")
        raise IOViolation(f"I/O on a thread that must do none: {what}")

    def hook(self) -> None:
        if not self._hooked:
            sys.addaudithook(self._audit)
            self._hooked = True

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.caught and event.startswith(_EVENTS) and event not in _HARMLESS:
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
    if ident in _guard.caught:
        yield  # inside another one, which reports
        return
    _guard.hook()
    with _patched():
        _guard.caught[ident] = []
        try:
            yield
        finally:
            caught = _guard.caught.pop(ident)
    if caught:
        raise IOViolation(f"{len(caught)} times I/O on a thread that must do none:\n" + "\n".join(caught))


class GuardTier(TierWrapper):
    """Raises `IOViolation` where a verb that may do I/O is called from a thread that `forbid_io` guards."""

    def around(self, verb: str, keys: Sequence[Key], buffers: Sequence[Buffer], call: Answer) -> Any:
        _guard.check(f"{type(self.inner).__name__}.{verb} of {len(keys)} keys")
        return call()


@contextmanager
def _patched() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, names in ((os, _OS), (socket.socket, _SOCKET), (time, ["sleep"])):
            for name in names:
                if hasattr(owner, name):
                    checked = _checked(getattr(owner, name), f"{owner.__name__}.{name}")
                    stack.enter_context(mock.patch.object(owner, name, checked))
        yield


def _checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        _guard.check(name)
        return function(*arguments, **named)

    return call
