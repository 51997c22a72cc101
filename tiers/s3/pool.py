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
        self._changed = threading.Condition(threading.Lock())
        self._allowed = float(limit)
        self._under_way = 0
        self._waiting = 0
        self._idle: list[tuple[float, Connection]] = []

    def take(self, origin: Origin, end: float, wait: bool = True) -> Connection | None:
        """A connection for one more request, until it is `put_back`. Without `wait`, None where too many are under
        way, or would be overtaken while they wait.

        Raises:
            OSError: none can be made; TimeoutError: none is free before the deadline `end`.
        """
        with self._changed:
            if self._under_way >= self._most or self._waiting:
                if not wait:
                    return None
                self._wait(end)
            connection = self._next_idle(origin)
            self._under_way += 1
        return connection or self._new(origin, end)

    def put_back(self, connection: Connection) -> None:
        """A request has ended. Its connection serves again where the answer has come in full."""
        with self._changed:
            self._keep(connection)
            self._leave()

    def exchange(self, connection: Connection, origin: Origin, end: float, fresh: bool) -> Connection:
        """Another connection for the same request; with `fresh` one that has not served before.

        Raises:
            OSError: none can be made; the request has ended.
        """
        with self._changed:
            self._keep(connection)
            other = None if fresh else self._next_idle(origin)
        return other or self._new(origin, end)

    def slow_down(self) -> None:
        """The store has asked for less."""
        with self._changed:
            self._allowed = max(1.0, self._allowed * _LESS)

    def close(self) -> None:
        """Closes the connections that are idle."""
        with self._changed:
            self._close_idle()

    @property
    def under_way(self) -> int:
        """Requests that have a connection."""
        return self._under_way

    @property
    def _most(self) -> int:
        return int(self._allowed)

    # -- under the lock

    def _wait(self, end: float) -> None:
        self._waiting += 1
        try:
            while self._under_way >= self._most:
                self._changed.wait(left(end))
        except TimeoutError:
            self._changed.notify()  # it may have been its turn just now
            raise
        finally:
            self._waiting -= 1

    def _leave(self) -> None:
        self._under_way -= 1
        if self._allowed < self._limit:
            self._allowed = min(self._limit, self._allowed + _MORE)
        if self._waiting:
            self._changed.notify()

    def _keep(self, connection: Connection) -> None:
        if connection.done:
            connection.reused = True
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()

    def _next_idle(self, origin: Origin) -> Connection | None:
        """The one that has served last. After a long rest none is trusted: what lies between may have forgotten a
        connection without closing it."""
        while self._idle:
            since, connection = self._idle.pop()
            rested = time.monotonic() - since
            if rested > _LONGEST_REST:
                self._close_idle()
            elif connection.origin == origin and (rested < _SHORT_REST or connection.idle):
                return connection
            connection.close()
        return None

    def _close_idle(self) -> None:
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()

    # -- without it

    def _new(self, origin: Origin, end: float) -> Connection:
        try:
            return self._connect(origin, end)
        except BaseException:
            with self._changed:
                self._leave()
            raise
