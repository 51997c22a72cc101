"""Connections that are kept for the next request, and how many requests are under way at once."""

import threading
import time
from collections.abc import Callable

from .wire import Connection, Origin, left

__all__ = ["Pool"]

_LESS = 0.5
_MORE = 0.05
_LONGEST_REST = 30.0
_SHORT_REST = 0.2


class Pool:
    """At most `limit` requests are under way at a time, each on a connection of its own.

    A store that asks for less is given less: `slow_down` halves the limit, and every request that ends raises it a
    little again.

    Notes:
        `_changed` covers the counts and the idle connections; connecting is done with it released.
    """

    def __init__(self, limit: int, connect: Callable[[Origin, float], Connection]) -> None:
        self._limit = limit
        self._connect = connect
        self._changed = threading.Condition()
        self._allowed = float(limit)
        self._under_way = 0
        self._waiting = 0
        self._idle: list[tuple[float, Connection]] = []

    # -- requests

    def enter(self, end: float) -> None:
        """Waits until one more request may be under way.

        Raises:
            TimeoutError: none may before the deadline `end`.
        """
        with self._changed:
            self._waiting += 1
            try:
                while self._under_way >= self._most:
                    self._changed.wait(left(end))
            finally:
                self._waiting -= 1
            self._under_way += 1

    def try_enter(self) -> bool:
        """As `enter`; False where that would have to wait, or would get ahead of those who do."""
        with self._changed:
            if self._under_way >= self._most or self._waiting:
                return False
            self._under_way += 1
            return True

    def leave(self) -> None:
        """A request has ended."""
        with self._changed:
            self._under_way -= 1
            self._allowed = min(self._limit, self._allowed + _MORE)
            self._changed.notify()

    def slow_down(self) -> None:
        """The store has asked for less."""
        with self._changed:
            self._allowed = max(1.0, self._allowed * _LESS)

    @property
    def _most(self) -> int:
        return int(self._allowed)

    # -- connections

    def connection(self, origin: Origin, end: float, fresh: bool = False) -> Connection:
        """One that nobody else uses; with `fresh` one that has not served before.

        Raises:
            OSError: none can be made.
        """
        while not fresh and (found := self._next_idle()) is not None:
            rested, connection = found
            if connection.origin == origin and (rested < _SHORT_REST or connection.idle):
                return connection
            connection.close()
        return self._connect(origin, end)

    def give_back(self, connection: Connection) -> None:
        """It is not used any more; it will serve again where its answer has come in full."""
        if not connection.done:
            connection.close()
            return
        connection.reused = True
        with self._changed:
            self._idle.append((time.monotonic(), connection))

    def close(self) -> None:
        """Closes the connections that are idle."""
        with self._changed:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    def _next_idle(self) -> tuple[float, Connection] | None:
        """The one that has served last, and for how many seconds it has rested. After a long rest none is trusted:
        what lies between may have forgotten a connection without closing it."""
        with self._changed:
            if not self._idle:
                return None
            since, connection = self._idle.pop()
            rested = time.monotonic() - since
            if rested < _LONGEST_REST:
                return rested, connection
        connection.close()
        self.close()
        return None
