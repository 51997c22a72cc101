"""Making connections: redis-py knows how, we say to what, and what went wrong in words."""

import socket
import ssl
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from kvcascade.configs.units import format_duration
from kvcascade.errors import TierError, TierRefused, TierUnavailable

from .settings import Location, RedisSettings
from .wire import Wire

__all__ = ["DRIVER_ERRORS", "Dialler", "in_words"]

DRIVER_ERRORS = (redis.RedisError, redis.exceptions.RedisClusterException, OSError, UnicodeError)
"""What redis-py raises for what servers and networks do; the last one for names that can be no host's."""


class Dialler:
    """Makes authenticated connections as the settings describe them.

    redis-py's own retries are off. RESP2 and no maintenance notifications, so that nothing but replies ever comes.
    """

    def __init__(self, settings: RedisSettings, name: str) -> None:
        """`name`: what the server shows of our connections (CLIENT LIST)."""
        username, password = settings.credentials()
        self._name = name
        self._settings = settings
        self._access = {"username": username, "password": password}

    def options(self, share: int = 1) -> dict[str, Any]:
        """What a connection of redis-py is made with, but for its address. `share`: of how many that are tried
        one after the other within a deadline."""
        patience = self._settings.deadline / share
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

    def dial(self, where: Location, *, replica: bool = False) -> Wire:
        """A new connection; to a replica of a cluster's slots, one that may read there.

        Raises:
            TierUnavailable: the server can't be reached, or is not ready.
            TierRefused: it does not let us in.
        """
        connection = self._connection(where)
        try:
            connection.connect()
        except DRIVER_ERRORS as error:
            with suppress(*DRIVER_ERRORS):
                connection.disconnect()
            raise in_words(error, where, self._settings.deadline) from error
        wire = Wire(connection, where)
        wire.greet(self._settings.deadline, "CLIENT", "SETNAME", self._name)
        if replica:
            wire.greet(self._settings.deadline, "READONLY")
        return wire

    def _connection(self, where: Location) -> Any:
        options = {**self.options(), **self._access, "db": self._settings.db}
        if where.path:
            return UnixDomainSocketConnection(path=where.path, **_without(options, "socket_keepalive"))
        kind = SSLConnection if self._settings.encrypted else Connection
        return kind(host=where.host, port=where.port, **options, **self.tls)


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def in_words(error: BaseException, where: Location | str, deadline: float) -> TierError:
    """What keeps us from connecting, as a person can act on it."""
    for cause in _causes(error):
        if said := _known(cause, deadline):
            kind, text = said
            return kind(f"{where}: {text}")
    return TierUnavailable(f"{where}: {error}")


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
        case redis.AuthenticationError() if "required" in str(cause):
            return TierRefused, f"a password is required ({cause})"
        case redis.AuthenticationError():
            return TierRefused, f"wrong username or password ({cause})"
        case redis.exceptions.NoPermissionError():
            return TierRefused, f"the user may not do this ({cause})"
        case redis.BusyLoadingError():
            return TierUnavailable, "it is still loading its data"
        case redis.TimeoutError() | TimeoutError():
            return TierUnavailable, f"no answer within {format_duration(deadline)}"
        case redis.ResponseError():
            return TierRefused, str(cause)
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """The error and those that it stands for, the first one first: redis-py keeps them as its context."""
    found = [error]
    while (cause := found[0].__cause__ or found[0].__context__) is not None and cause not in found:
        found.insert(0, cause)
    return found
