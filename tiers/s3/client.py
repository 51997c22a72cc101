"""Sends requests, several at a time where that is free, and returns their answers in order."""

from collections import deque
from collections.abc import Iterable, Iterator
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
_FAILS = (OSError, TierUnavailable, BotoCoreError, RuntimeError, ValueError)
"""What connections, credentials, botocore and answers that make no sense raise."""


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
                flight = _Flight(request, self.sdk, self._pool, end)
                while not flight.take_off(wait=not flying):
                    yield flying.popleft().land()
                flying.append(flight)
            while flying:
                yield flying.popleft().land()
        finally:
            for flight in flying:
                flight.abandon()

    @property
    def under_way(self) -> int:
        """Requests that have not ended."""
        return self._pool.under_way

    def close(self) -> None:
        """Closes all connections, after the last call has returned."""
        self._pool.close()


class _Flight:
    """One request under way, from `take_off` to `land` or `abandon`, of which one is called, once."""

    def __init__(self, request: Request, sdk: Sdk, pool: Pool, end: float) -> None:
        self._request = request
        self._sdk = sdk
        self._pool = pool
        self._end = end
        self._terms = sdk.terms
        self._connection: Connection | None = None
        self._failure: TierUnavailable | None = None

    def take_off(self, wait: bool) -> bool:
        """Sends the request; False where it would have to wait for that, and shall not. What fails is told when it
        lands."""
        try:
            self._connection = self._pool.take(self._terms.origin, self._end, wait)
            if self._connection is None:
                return False
            self._send(self._connection, self._request)
        except _FAILS as error:
            self._fail(error)
        except BaseException:
            self.abandon()
            raise
        return True

    def land(self) -> Answer | TierError:
        """Its answer; trouble that the answer explains is corrected, and the request sent again."""
        answer = None
        try:
            if self._connection is not None and self._failure is None:
                answer = self._corrected(self._received(self._connection, self._request))
        except _FAILS as error:
            self._fail(error)
        finally:
            self.abandon()
        if answer is None:
            return self._failure or TierUnavailable("no answer")
        if answer.status in _SLOW_DOWN:
            self._pool.slow_down()
        return answer

    def abandon(self) -> None:
        """Gives back what it holds."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.put_back(connection)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, TierUnavailable):
            self._failure = error
        elif isinstance(error, OSError):
            self._failure = failures.of_transport(error, self._terms.origin)
        else:
            self._failure = failures.of_nonsense(error, self._terms.origin)

    def _corrected(self, answer: Answer) -> Answer:
        """The answer to the request under better terms, as long as answers tell of some."""
        for _ in range(_CORRECTIONS):
            if answer.good or answer.status == _MISSING:
                break
            answer = self._explained(answer)
            terms = self._sdk.revised(self._terms, self._request, answer)
            if terms is None:
                break
            self._terms = terms
            answer = self._repeated(self._request)
        return answer

    def _explained(self, answer: Answer) -> Answer:
        if self._request.method != "HEAD" or answer.status not in _MUTE or answer.code:
            return answer
        why = self._repeated(Request("GET", self._request.name, fields=(("Range", "bytes=0-0"),)))
        return answer if why.good else why

    def _repeated(self, request: Request, fresh: bool = False) -> Answer:
        connection, self._connection = self._connection, None
        if connection is None:
            raise TimeoutError("the request has ended")
        self._connection = self._pool.exchange(connection, self._terms.origin, self._end, fresh)
        self._send(self._connection, request)
        return self._received(self._connection, request)

    def _send(self, connection: Connection, request: Request) -> None:
        connection.send(signed(request, self._terms), request.body, self._end)

    def _received(self, connection: Connection, request: Request) -> Answer:
        """A connection that was closed while it was idle is no failure of the request."""
        try:
            head = connection.receive_head(request.method, self._end)
        except (ConnectionError, SSLError):
            if not connection.reused or connection.answered:
                raise
            return self._repeated(request, fresh=True)
        received, body = 0, b""
        if request.into and 200 <= head.status < 300:
            for view in request.into:
                received += connection.receive_into(view, self._end)
        else:
            body = connection.receive_rest(_LONGEST_BODY, self._end)
        return answer_of(head, body, received)
