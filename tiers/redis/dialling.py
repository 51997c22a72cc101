"""Making connections: redis-py knows how, we say to what, and what went wrong in words."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvcascade.configs.units import format_duration
from kvcascade.errors import TierError, TierRefused, TierUnavailable

from .replies import Refusal, Reply, error_of, is_done, shown
from .settings import Location, RedisSettings
from .wire import Wire, command

__all__ = ["DRIVER_ERRORS", "Dialler", "in_words"]

DRIVER_ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException, OSError, UnicodeError)
"""What redis-py raises for what servers and networks do; the last one for names that can be no host's."""


_WANTS_TLS = "a server that expects TLS does that: then write rediss://, or with nodes tls: {enabled: true}"
_DECISIVE = ("NOAUTH", "max number of clients")  # keep a connection from being of use, whatever was asked first


class Dialler:
    """Makes authenticated connections as the settings describe them.

    redis-py's own retries are off. RESP2 and no maintenance notifications, so that nothing but replies ever comes.
    What is said first goes out in one piece, so that a connection costs one round trip.
    """

    def __init__(self, settings: RedisSettings, name: str) -> None:
        """`name`: what the server shows of our connections (CLIENT LIST)."""
        username, password = settings.credentials()
        self._name = name
        self._settings = settings
        self._access = {"username": username, "password": password}

    def patience(self, share: int) -> dict[str, Any]:
        """redis-py's options for clients of its own. `share`: of how many that are tried one after the other
        within a deadline."""
        return self._options(self._settings.deadline / share)

    def _options(self, patience: float) -> dict[str, Any]:
        return {
            "socket_timeout": patience,
            "socket_connect_timeout": patience,
            "socket_keepalive": True,
            "protocol": 2,
            "decode_responses": False,
            "retry": Retry(NoBackoff(), 0),
        }

    @property
    def access(self) -> dict[str, Any]:
        """User and password."""
        return dict(self._access)

    @property
    def tls(self) -> dict[str, Any]:
        """redis-py's options for TLS; {} where there is none."""
        if not self._settings.encrypted:
            return {}
        tls = self._settings.tls
        return {
            "ssl_ca_certs": tls.ca_file,
            "ssl_certfile": tls.cert_file,
            "ssl_keyfile": tls.key_file,
            "ssl_check_hostname": tls.check_hostname,
            "ssl_cert_reqs": "required",
        }

    def dial(self, where: Location, end: float, *, replica: bool = False) -> Wire:
        """A new connection, made by `end` (time.monotonic()); to a replica in a cluster, one that may read there.

        Raises:
            TierUnavailable: the server can't be reached, or is not ready.
            TierRefused: it does not let us in.
        """
        if (left := end - time.monotonic()) <= 0:
            raise TierUnavailable(f"{where}: no time left to connect")
        connection = self._connection(where, left)
        try:
            connection.connect()
        except DRIVER_ERRORS as error:
            with suppress(*DRIVER_ERRORS):
                connection.disconnect()
            raise in_words(error, where, self._settings.deadline) from error
        wire = Wire(connection, where)
        try:
            wire.begin(end)
            self._introduce(wire, list(self._greetings(replica)))
        except BaseException:
            wire.close()
            raise
        return wire

    def _connection(self, where: Location, left: float) -> Any:
        """Not connected yet; it does no more than that."""
        options = {**self._options(left), "redis_connect_func": _say_nothing}
        if where.path:
            del options["socket_keepalive"]
            return UnixDomainSocketConnection(path=where.path, **options)
        if not self._settings.encrypted:
            return Connection(host=where.host, port=where.port, **options)
        connection = TlsConnection(host=where.host, port=where.port, **options, **self.tls)
        connection.end = time.monotonic() + left
        return connection

    def _greetings(self, replica: bool) -> Iterator[tuple[str | int, ...]]:
        username, password = self._access["username"], self._access["password"]
        if password or username:
            yield ("AUTH", username, password or "") if username else ("AUTH", password or "")
        if self._settings.db:
            yield "SELECT", self._settings.db
        yield "CLIENT", "SETNAME", self._name
        if replica:
            yield ("READONLY",)

    def _introduce(self, wire: Wire, greetings: list[tuple[str | int, ...]]) -> None:
        try:
            with suppress(TierUnavailable):  # a server that hangs up may have said why
                wire.send([command(*words) for words in greetings])
            for words in greetings:
                _check(wire, str(words[0]), wire.reply())
        except TierUnavailable as error:
            if wire.lost and not wire.where.path and not self._settings.encrypted:
                raise TierUnavailable(f"{error}, at the first command; {_WANTS_TLS}") from error
            raise


class TlsConnection(SSLConnection):  # type: ignore[misc]
    """Has only until `end` for the TLS handshake, since connecting has taken some of the time."""

    end = 0.0

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> Any:
        sock.settimeout(max(self.end - time.monotonic(), 1e-3))
        return super()._wrap_socket_with_ssl(sock)


def _say_nothing(connection: Any) -> None:
    """In place of redis-py's own commands after connecting."""


def _check(wire: Wire, word: str, answer: Reply) -> None:
    """Whether the connection can be used after this answer to a greeting."""
    if not isinstance(answer, Refusal):
        if not is_done(answer):
            raise wire.unexpected(answer)
        return
    said = f"{answer.code} {answer.text}"
    if any(text in said for text in _DECISIVE):
        raise error_of(answer, wire.where)
    if word not in ("AUTH", "SELECT"):
        return  # a name is not needed; who may not read from replicas is sent to the primary
    if answer.code == "ERR":
        raise TierRefused(f"{wire.where}: {word} is refused ({shown(said)})")
    raise error_of(answer, wire.where)


def in_words(error: BaseException, where: Location | str, deadline: float) -> TierError:
    """What keeps us from connecting, as a person can act on it."""
    for cause in _causes(error):
        if said := _known(cause, deadline):
            kind, text = said
            return kind(f"{where}: {text}")
    return TierUnavailable(f"{where}: {type(error).__name__}")  # the text of redis-py may hold a password


def _known(cause: BaseException, deadline: float) -> tuple[type[TierError], str] | None:
    """`TierRefused` where trying again can't help."""
    match cause:
        case ssl.SSLCertVerificationError():
            return TierRefused, f"its TLS certificate is not trusted: {cause.verify_message}; see tls.ca_file"
        case ssl.SSLError():
            return TierUnavailable, f"no TLS connection: {cause.reason or cause}; does the server speak TLS?"
        case TimeoutError() if "handshake" in str(cause):
            return TierUnavailable, "no TLS connection: no answer in time; does the server speak TLS?"
        case socket.gaierror():
            return TierUnavailable, f"unknown host ({cause.strerror})"
        case ConnectionRefusedError():
            return TierUnavailable, "refused; no server listens there"
        case FileNotFoundError():
            return TierUnavailable, "no such file: a socket on which no server listens, or a file of tls"
        case ConnectionResetError() | BrokenPipeError():
            return TierUnavailable, f"the connection was lost; {_WANTS_TLS}"
        case UnicodeError():
            return TierUnavailable, f"no name of a host ({cause})"
        case redis.AuthenticationError() if "required" in str(cause):
            return TierRefused, "a password is required"
        case redis.AuthenticationError():
            return TierRefused, "wrong username or password"
        case redis.exceptions.NoPermissionError():
            return TierRefused, f"the user may not do this ({shown(str(cause))})"
        case redis.BusyLoadingError():
            return TierUnavailable, "it is still loading its data"
        case redis.TimeoutError() | TimeoutError():
            return TierUnavailable, f"no answer within {format_duration(deadline)}"
        case redis.ResponseError():
            return TierRefused, shown(str(cause))
        case OSError() if cause.strerror:
            return TierUnavailable, cause.strerror
        case redis.InvalidResponse():
            return TierUnavailable, "an answer that is none; is it a Redis server? Does it expect TLS?"
        case redis.ConnectionError() if "closed by server" in str(cause):
            return TierUnavailable, f"it hung up; {_WANTS_TLS}"
        case redis.ConnectionError() if "number of clients" in str(cause):
            return TierUnavailable, "it has as many clients as it takes (maxclients)"
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """The error and those that it stands for, the first one first: redis-py keeps them as its context."""
    found = [error]
    while (cause := found[0].__cause__ or found[0].__context__) is not None and cause not in found:
        found.insert(0, cause)
    return found
