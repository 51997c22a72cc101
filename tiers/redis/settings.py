"""The settings of the redis tier."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from kvcascade.configs.schema import (
    CONTRADICTION,
    BreakerSettings,
    NonZeroDuration,
    Settings,
    SharedSettings,
)
from kvcascade.errors import ConfigError
from kvcascade.tiers.base import OpenContext, Probe, StoredNamespace, Tier, TierSettings

__all__ = ["Location", "RedisSettings", "TlsSettings"]

_URL = "redis://127.0.0.1:6379/0"
_PREFIX = r"[A-Za-z0-9_./-]{1,100}"
_SERVER_PORT, _SENTINEL_PORT = 6379, 26379


class Location(NamedTuple):
    """Where a server is, as a URL or a node says it."""

    host: str = ""
    port: int = _SERVER_PORT
    path: str = ""
    """Of a Unix socket; then host and port have no meaning."""

    def __str__(self) -> str:
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class _Url(NamedTuple):
    location: Location
    tls: bool
    db: int
    username: str | None
    password: str | None


def _read_url(url: str) -> _Url:
    """
    Raises:
        ValueError: it is no URL of a Redis server; the text says what is allowed.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError("expected redis://HOST:PORT/DB, rediss:// (TLS) or unix:///PATH?db=DB")
    db = parts.path.removeprefix("/") if parts.scheme != "unix" else ""
    for option in filter(None, parts.query.split("&")):
        name, _, value = option.partition("=")
        if name != "db":
            raise ValueError(f"has an option {name!r}; allowed in a URL: db. All others are settings of the tier")
        db = value
    if db and not db.isdecimal():
        raise ValueError(f"expected the number of a database, not {db!r}")
    username, password = (unquote(part) if part else None for part in (parts.username, parts.password))
    if parts.scheme == "unix":
        if parts.hostname or not parts.path.startswith("/"):
            raise ValueError("expected the socket's absolute path: unix:///run/redis.sock")
        location = Location(path=unquote(parts.path))
    else:
        location = Location(parts.hostname or "127.0.0.1", parts.port or _SERVER_PORT)
    return _Url(location, parts.scheme == "rediss", int(db or 0), username, password)


def _read_node(node: str, port: int) -> Location:
    host, _, given = node.rpartition(":") if re.search(r":\d+$", node) else (node, "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[A-Za-z0-9_.:-]+", host) or int(given or port) > 65535:
        raise ValueError("expected HOST:PORT")
    return Location(host, int(given or port))


def _url(url: str | None) -> str | None:
    if url is not None:
        _read_url(url)
    return url


def _node(node: str) -> str:
    _read_node(node, _SERVER_PORT)
    return node


def _prefix(prefix: str) -> str:
    if not re.fullmatch(_PREFIX, prefix):
        raise ValueError("expected 1 to 100 letters, digits, '_', '-', '.' or '/'")
    return prefix


Node = Annotated[str, AfterValidator(_node)]


class TlsSettings(Settings):
    """How servers are known, and how this engine shows itself to them. In effect with a `rediss://` URL, and
    where `enabled`."""

    enabled: bool = False
    """For `nodes`; a URL says it by its scheme."""
    ca_file: str | None = None
    """Certificates that are trusted, as PEM; null: those of the system."""
    cert_file: str | None = None
    key_file: str | None = None
    check_hostname: bool = True
    """Whether the certificate must be that of the host that is connected to."""


class RedisSettings(SharedSettings, TierSettings):
    """Chunks on a Redis or Valkey server, set of Sentinels or Cluster that engines share."""

    type: Literal["redis"] = "redis"
    mode: Literal["single", "sentinel", "cluster"] = "single"
    url: Annotated[str | None, AfterValidator(_url)] = Field(
        default_factory=lambda data: _URL if data.get("mode") == "single" else None
    )
    """Of a single server: `redis://HOST:PORT/DB`, `rediss://` (TLS), `unix:///PATH`."""
    nodes: tuple[Node, ...] = ()
    """`HOST:PORT` of Sentinels, or of some nodes of a Cluster."""
    service: str | None = None
    """What the Sentinels call the set of servers."""
    username: str | None = None
    password: str | None = None
    password_file: str | None = None
    """A file that holds the password alone."""
    sentinel_username: str | None = None
    sentinel_password: str | None = None
    tls: TlsSettings = TlsSettings()
    prefix: Annotated[
        str, AfterValidator(_prefix), WithJsonSchema({"type": "string", "pattern": f"^{_PREFIX}$"})
    ] = "kvcascade"
    """What the names of all keys begin with."""
    read_replicas: bool = False
    """Chunks are read from replicas, and from the primary what a replica does not have."""
    ttl: NonZeroDuration | None = 24 * 3600.0
    """Set on the server, from the write on."""
    deadline: NonZeroDuration = 0.5
    retries: Annotated[int, Field(ge=0, le=10)] = 1
    breaker: BreakerSettings = BreakerSettings.model_validate({"probe_every": "2s"})

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if found := [*self._wrong_place(), *self._wrong_access()]:
            raise PydanticCustomError(CONTRADICTION, "; ".join(text for _, text in found), {"found": found})
        return self

    def _wrong_place(self) -> Iterator[tuple[tuple[str], str]]:
        several = self.mode != "single"
        if several and not self.nodes:
            yield ("nodes",), f"required with mode: {self.mode}: [HOST:PORT, ...]"
        if several and self.url is not None:
            yield ("url",), f"is for mode: single; with mode: {self.mode} give nodes: [HOST:PORT, ...]"
        if not several and self.nodes:
            yield ("nodes",), "is for mode: sentinel and cluster; with mode: single give a url"
        if not several and self.url is None:
            yield ("url",), "required with mode: single"
        if (self.service is None) == (self.mode == "sentinel"):
            need = "required with mode: sentinel: the name that the Sentinels know"
            yield ("service",), need if self.mode == "sentinel" else "is for mode: sentinel"
        if self.read_replicas and not several:
            yield ("read_replicas",), "needs mode: sentinel or cluster, which know the replicas"

    def _wrong_access(self) -> Iterator[tuple[tuple[str], str]]:
        url = _read_url(self.url) if self.url else None
        if self.password and self.password_file:
            yield ("password_file",), "a password is given too; leave one of them out"
        if url and url.password and (self.password or self.password_file):
            yield ("url",), "holds a password, and another one is given; leave one of them out"
        if url and url.username and self.username:
            yield ("username",), "the url holds one, too; leave one of them out"
        if url and self.tls.enabled and not url.tls:
            yield ("tls",), "enabled, but the url says no TLS; write rediss://"
        if (self.tls.cert_file is None) != (self.tls.key_file is None):
            yield ("tls",), "cert_file and key_file belong together"

    @property
    def locations(self) -> tuple[Location, ...]:
        """The server, or the nodes that are given."""
        if self.url is not None:
            return (_read_url(self.url).location,)
        port = _SENTINEL_PORT if self.mode == "sentinel" else _SERVER_PORT
        return tuple(_read_node(node, port) for node in self.nodes)

    @property
    def encrypted(self) -> bool:
        return self.tls.enabled or (self.url is not None and _read_url(self.url).tls)

    @property
    def db(self) -> int:
        return _read_url(self.url).db if self.url else 0

    def credentials(self) -> tuple[str | None, str | None]:
        """User and password, read from where they are kept.

        Raises:
            ConfigError: the file of the password can't be read.
        """
        url = _read_url(self.url) if self.url else None
        password = self.password or (url.password if url else None)
        if self.password_file:
            try:
                password = Path(self.password_file).read_text().strip()
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"password_file: {self.password_file} can't be read: {reason}") from error
        return self.username or (url.username if url else None), password or None

    def claims(self) -> frozenset[str]:
        where = ",".join(sorted(map(str, self.locations)))
        return frozenset({f"the keys {self.prefix}:* of database {self.db} at {where}"})

    def open(self, context: OpenContext) -> Tier:
        from .tier import RedisTier

        return RedisTier.open(self, context)

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        from .inspection import probe

        return probe(self, chunk_bytes)

    def stored(self, engine_id: str | None = None) -> list[StoredNamespace]:
        from .inspection import stored

        return stored(self)

    def clear(self, tenant: str | None) -> list[str]:
        from .inspection import clear

        return clear(self, tenant)
