"""Sends requests, several at a time where that is free, and returns their answers in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from ssl import SSLError

from botocore.exceptions import BotoCoreError

from kvcascade.errors import TierError, TierUnavailable

from . import failures
from .messages import Answer, Request, answer_of
from .pool import Pool
from .sdk import Sdk
from .signing import signed
from .wire import Connection

__all__ = ["Client"]

_LONGEST_BODY = 8 << 20
_CORRECTIONS = 3
_MISSING = 404
_SLOW_DOWN = (429, 503)
_MUTE = (400, 403)
"""Answers to HEAD, which have no body that says why."""


class Client:
    """Talks to one bucket. Thread-safe; `end` is the time, of the monotonic clock, at which a call fails."""

    def __init__(self, sdk: Sdk, limit: int) -> None:
        """`limit`: of connections."""
        self.sdk = sdk
        self._pool = Pool(limit, lambda origin, end: Connection(origin, end, sdk.tls))

    def ask(self, request: Request, end: float) -> Answer:
        """One request.

        Raises:
            TierError: there was no answer.
        """
        (answer,) = self.each([request], end)
        if isinstance(answer, TierError):
            raise answer
        return answer

    def each(self, requests: Iterable[Request], end: float) -> Iterator[Answer | TierError]:
        """The answer to each request, in their order; the error, where there was none.

        Requests are sent ahead, each on a connection of its own, as far as connections are free; so their ways to
        the store and back overlap. Take all answers, soon: meanwhile the connections of others are kept.
        """
        flying: deque[_Flight] = deque()
        try:
            for request in requests:
                entered = False
                while flying and not (entered := self._pool.try_enter()):
                    yield flying.popleft().land()
                flying.append(_Flight(request, self.sdk, self._pool, end, entered))
            while flying:
                yield flying.popleft().land()
        finally:
            for flight in flying:
                flight.abandon()

    def close(self) -> None:
        """Closes all connections, after the last call has returned."""
        self._pool.close()


class _Flight:
    """One request under way, until `land` or `abandon` is called, once."""

    def __init__(self, request: Request, sdk: Sdk, pool: Pool, end: float, entered: bool) -> None:
        """Sends the request. `entered`: the pool has already let it in."""
        self._request = request
        self._sdk = sdk
        self._pool = pool
        self._end = end
        self._terms = sdk.terms
        self._entered = entered
        self._connection: Connection | None = None
        self._answer: Answer | None = None
        self._failure: TierUnavailable | None = None
        self._attempt(self._take_off)

    def land(self) -> Answer | TierError:
        """Its answer; trouble that the answer explains is corrected, and the request sent again."""
        if self._failure is None:
            self._attempt(self._correct)
        self.abandon()
        if self._answer is None:
            return self._failure or TierUnavailable("no answer")
        if self._answer.status in _SLOW_DOWN:
            self._pool.slow_down()
        return self._answer

    def abandon(self) -> None:
        """Gives back what it holds."""
        self._let_go()
        if self._entered:
            self._entered = False
            self._pool.leave()

    def _attempt(self, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            self._failure = failures.of_transport(error, self._terms.origin)
        except BotoCoreError as error:
            self._failure = failures.of_credentials(error)

    def _take_off(self) -> None:
        if not self._entered:
            self._pool.enter(self._end)
            self._entered = True
        self._send(self._request)

    def _correct(self) -> None:
        answer = self._explained(self._receive(self._request))
        for _ in range(_CORRECTIONS):
            settled = answer.good or answer.status == _MISSING
            terms = None if settled else self._sdk.revised(self._terms, self._request, answer)
            if terms is None:
                break
            self._terms = terms
            answer = self._explained(self._repeat(self._request))
        self._answer = answer

    def _explained(self, answer: Answer) -> Answer:
        if self._request.method != "HEAD" or answer.status not in _MUTE or answer.code:
            return answer
        why = self._repeat(Request("GET", self._request.name, fields=(("Range", "bytes=0-0"),)))
        return answer if why.good else why

    def _repeat(self, request: Request) -> Answer:
        self._send(request)
        return self._receive(request)

    def _send(self, request: Request, fresh: bool = False) -> Connection:
        self._let_go()
        self._connection = self._pool.connection(self._terms.origin, self._end, fresh)
        self._connection.send(signed(request, self._terms), request.body, self._end)
        return self._connection

    def _let_go(self) -> None:
        if self._connection is not None:
            self._pool.give_back(self._connection)
            self._connection = None

    def _receive(self, request: Request) -> Answer:
        """A connection that was closed while it was idle is no failure of the request."""
        connection = self._connection or self._send(request)
        try:
            head = connection.receive_head(request.method, self._end)
        except (ConnectionError, SSLError):
            if not connection.reused or connection.answered:
                raise
            connection = self._send(request, fresh=True)
            head = connection.receive_head(request.method, self._end)
        received, body = 0, b""
        if request.into and 200 <= head.status < 300:
            received = sum(connection.receive_into(view, self._end) for view in request.into)
        else:
            body = connection.receive_rest(_LONGEST_BODY, self._end)
        return answer_of(head, body, received)
