"""The connections to one server."""

import threading
import time
from collections.abc import Callable
from types import TracebackType

from kvcascade.errors import TierUnavailable

from .wire import Wire

__all__ = ["Pool"]

_IDLE = 30.0  # seconds after which a connection is not trusted any more: a firewall may have forgotten it


class Pool:
    """The connections to one server, at most `limit` at a time. `_lock` covers which are idle and how many are in
    use; connecting and closing run with it released."""

    def __init__(
        self, dial: Callable[[float], Wire], limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`dial`: makes a connection by the time that it is given, in the clock's seconds."""
        self.clock = clock
        self._dial = dial
        self._limit = limit
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._idle: list[Wire] = []
        self._used = 0
        self._waiting = 0
        self._closed = False

    def lease(self, end: float) -> "_Lease":
        """A context that gives a connection that works, for one thread; it must be done by `end`.

        Raises, on entering:
            TierUnavailable: there is none, or all are in use until then.
            TierRefused: the server does not let us in.
        """
        return _Lease(self, end)

    @property
    def used(self) -> int:
        """Connections in use."""
        return self._used

    def close(self) -> None:
        """Closes what is idle; what is in use is closed when it is handed back."""
        self._closed = True
        self.discard()

    def discard(self) -> None:
        """Closes what is idle: the server is gone, or another one now."""
        with self._lock:
            idle, self._idle = self._idle, []
        for wire in idle:
            wire.close()

    def take(self, end: float) -> Wire:
        """See `lease`."""
        with self._lock:
            if self._used >= self._limit and not self._wait(end):
                raise TierUnavailable(f"all {self._limit} connections are in use")
            self._used += 1
            wire = self._idle.pop() if self._idle else None
        try:
            while wire is not None:
                if self.clock() - wire.used < _IDLE and wire.quiet:
                    return wire
                wire.close()
                with self._lock:
                    wire = self._idle.pop() if self._idle else None
            return self._dial(end)
        except BaseException:
            self._release(None)
            raise

    def give_back(self, wire: Wire) -> None:
        """What `take` gave. One that is closed tells that the others are no better."""
        wire.used = self.clock()
        self._release(None if wire.closed or self._closed else wire)
        if wire.closed:
            self.discard()
        elif self._closed:
            wire.close()

    def _wait(self, end: float) -> bool:
        self._waiting += 1
        try:
            return self._freed.wait_for(lambda: self._used < self._limit, max(0.0, end - self.clock()))
        finally:
            self._waiting -= 1

    def _release(self, wire: Wire | None) -> None:
        with self._lock:
            self._used -= 1
            if wire is not None:
                self._idle.append(wire)
            if self._waiting:
                self._freed.notify()


class _Lease:
    """A connection for as long as the context lasts. What is raised meanwhile closes it."""

    def __init__(self, pool: Pool, end: float) -> None:
        self._pool = pool
        self._end = end

    def __enter__(self) -> Wire:
        self._wire = self._pool.take(self._end)
        try:
            self._wire.begin(self._end)
        except BaseException:
            self._pool.give_back(self._wire)
            raise
        return self._wire

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                self._wire.close()
        finally:
            self._pool.give_back(self._wire)
