"""Calls that run, and the close that waits for them."""

import os
import threading
from types import TracebackType

from kvcascade.errors import ClosedError, ProtocolError

__all__ = ["Calls"]


class Calls:
    """A context that each call of an object enters; after `close` none can.

    Raises, on entering:
        ClosedError: it is closed.
        ProtocolError: this is a fork of the process that made it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running = 0
        self._closed = False

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise ProtocolError(f"{self._name} was opened by process {self._pid}; after a fork, open it anew")
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self._name} is closed")
            self._running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._running -= 1
            if self._closed and not self._running:
                self._changed.notify_all()

    def close(self) -> bool:
        """Lets no call in any more, waits for those that run; False where it was closed before, or in a fork."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            if self._closed:
                return False
            self._closed = True
            self._changed.wait_for(lambda: not self._running)
            return True
