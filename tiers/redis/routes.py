"""Which server a key belongs to."""

import random
import threading
from typing import Any, Protocol

from kvcascade.errors import TierError, TierRefused, TierUnavailable

from .dialling import DRIVER_ERRORS, Dialler, in_words
from .settings import Location, RedisSettings

__all__ = ["Route", "route_of"]


class Route(Protocol):
    """Knows the servers. All methods may do I/O, and raise `TierUnavailable` or `TierRefused`."""

    @property
    def only(self) -> Location | None:
        """The server of all keys, where there is never another one."""

    def primary(self, name: bytes) -> Location:
        """The server that a key is written to."""

    def replica(self, name: bytes) -> Location | None:
        """One that it can be read from, too; None where there is none."""

    def primaries(self) -> list[Location]:
        """The servers that hold all keys between them."""

    def mistrust(self) -> None:
        """Something was not where it was expected: ask anew before the next answer."""

    def close(self) -> None:
        """Ends connections that it has of its own."""


class Single:
    """One server, always the same."""

    def __init__(self, where: Location) -> None:
        self.only = where

    def primary(self, name: bytes) -> Location:
        return self.only

    def replica(self, name: bytes) -> Location | None:
        return None

    def primaries(self) -> list[Location]:
        return [self.only]

    def mistrust(self) -> None:
        """There is no other."""

    def close(self) -> None:
        """It has none."""


class Sentinels:
    """The primary that Sentinels name, asked again whenever something went wrong."""

    only = None

    def __init__(self, settings: RedisSettings, dialler: Dialler) -> None:
        from redis.sentinel import Sentinel

        self._service = settings.service or ""
        self._deadline = settings.deadline
        self._locations = settings.locations
        self._names = ", ".join(map(str, settings.locations))
        access = {"username": settings.sentinel_username, "password": settings.sentinel_password}
        tls = {"ssl": True, **dialler.tls} if dialler.tls else {}
        self._sentinel = Sentinel(
            [(where.host, where.port) for where in settings.locations],
            sentinel_kwargs={**dialler.patience(len(settings.nodes)), **access, **tls},
        )
        self._lock = threading.Lock()
        self._primary: Location | None = None
        self._replicas: list[Location] | None = None
        self._turn = 0

    def primary(self, name: bytes) -> Location:
        with self._lock:
            if self._primary is None:
                self._primary = self._discover()
            return self._primary

    def replica(self, name: bytes) -> Location | None:
        with self._lock:
            if self._replicas is None:
                try:
                    found = self._sentinel.discover_slaves(self._service)
                except DRIVER_ERRORS as error:
                    raise in_words(error, f"Sentinels {self._names}", self._deadline) from None
                self._replicas = [Location(*address) for address in found]
            self._turn += 1
            return self._replicas[self._turn % len(self._replicas)] if self._replicas else None

    def primaries(self) -> list[Location]:
        return [self.primary(b"")]

    def mistrust(self) -> None:
        with self._lock:
            self._primary = self._replicas = None

    def close(self) -> None:
        for client in self._sentinel.sentinels:
            client.close()

    def _discover(self) -> Location:
        """The primary. Each Sentinel is asked in turn, and what is wrong with it said in our words: redis-py's
        would show its passwords."""
        errors: list[TierError] = []
        for where, client in zip(self._locations, self._sentinel.sentinels, strict=True):
            try:
                state = client.sentinel_masters().get(self._service)
                if state and self._sentinel.check_master_state(state, self._service):
                    return Location(state["ip"], state["port"])
                errors.append(TierUnavailable(f"{where}: none"))
            except DRIVER_ERRORS as error:
                errors.append(in_words(error, where, self._deadline))
        text = f"no Sentinel of {self._names} knows a primary of {self._service!r} that is up"
        kind = TierRefused if all(isinstance(error, TierRefused) for error in errors) else TierUnavailable
        raise kind(f"{text}: {'; '.join(map(str, errors))}")


class Cluster:
    """The nodes of a Redis Cluster, by the slots that redis-py has read from one of them."""

    only = None

    def __init__(self, settings: RedisSettings, dialler: Dialler) -> None:
        self._names = ", ".join(map(str, settings.locations))
        self._locations = settings.locations
        self._deadline = settings.deadline
        tls = {"ssl": True, **dialler.tls} if dialler.tls else {}
        self._options = {**dialler.patience(len(settings.nodes)), **dialler.access, **tls}
        del self._options["retry"]  # redis-py gives its nodes one of its own that never retries
        self._lock = threading.Lock()
        self._slots: Any = None
        self._mistrusted = False

    def primary(self, name: bytes) -> Location:
        return self._nodes(name)[0]

    def replica(self, name: bytes) -> Location | None:
        nodes = self._nodes(name)
        return random.choice(nodes[1:]) if len(nodes) > 1 else None

    def primaries(self) -> list[Location]:
        nodes = {Location(node[0].host, node[0].port) for node in self._current().slots_cache.values() if node}
        return sorted(nodes)

    def mistrust(self) -> None:
        self._mistrusted = True

    def close(self) -> None:
        if self._slots is not None:
            self._slots.close()

    def _nodes(self, name: bytes) -> list[Location]:
        from redis.crc import key_slot

        nodes = self._current().slots_cache.get(key_slot(name))
        if not nodes:
            self._mistrusted = True
            raise TierUnavailable(f"cluster {self._names}: no node serves the slot of this key")
        return [Location(node.host, node.port) for node in nodes]

    def _current(self) -> Any:
        """redis-py's map of slots."""
        if self._slots is not None and not self._mistrusted:
            return self._slots
        with self._lock:
            try:
                if self._slots is None:
                    self._slots = self._first()
                elif self._mistrusted:
                    self._slots.initialize()
                self._mistrusted = False
            except DRIVER_ERRORS as error:
                raise self._unknown(error) from None  # a trace would show what redis-py says, and passwords
            return self._slots

    def _first(self) -> Any:
        from redis.cluster import ClusterNode, NodesManager

        nodes = [ClusterNode(where.host, where.port) for where in self._locations]
        try:
            return NodesManager(startup_nodes=nodes, **self._options)
        except DRIVER_ERRORS:
            for node in nodes:
                if node.redis_connection is not None:
                    node.redis_connection.close()
            raise

    def _unknown(self, error: Exception) -> TierError:
        mapped = in_words(error, f"cluster {self._names}", self._deadline)
        if "cluster support disabled" in f"{mapped} {error}":
            return TierRefused(f"{self._names}: no Redis Cluster; see the tier's mode")
        return mapped


def route_of(settings: RedisSettings, dialler: Dialler) -> Route:
    """As the settings describe it."""
    if settings.mode == "sentinel":
        return Sentinels(settings, dialler)
    if settings.mode == "cluster":
        return Cluster(settings, dialler)
    return Single(settings.locations[0])
