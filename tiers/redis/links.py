"""The connections to all servers of a tier."""

import threading
from contextlib import suppress

from .dialling import DRIVER_ERRORS, Dialler
from .pool import Pool
from .routes import Route, route_of
from .settings import Location, RedisSettings

__all__ = ["Links"]


class Links:
    """The connections to all servers of a tier."""

    def __init__(self, settings: RedisSettings, name: str) -> None:
        self._dialler = Dialler(settings, name)
        self._limit = settings.concurrency
        self.clustered = settings.mode == "cluster"
        self.route: Route = route_of(settings, self._dialler)
        self._lock = threading.Lock()
        self._pools: dict[tuple[Location, bool], Pool] = {}

    def pool(self, where: Location, *, replica: bool = False) -> Pool:
        replica = replica and self.clustered
        pool = self._pools.get((where, replica))
        if pool is not None:
            return pool
        with self._lock:
            pool = self._pools.get((where, replica))
            if pool is None:
                pool = Pool(lambda end: self._dialler.dial(where, end, replica=replica), self._limit)
                self._pools[where, replica] = pool
            return pool

    @property
    def used(self) -> int:
        """Connections in use."""
        return sum(pool.used for pool in self._pools.copy().values())

    def close(self) -> None:
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()
        with suppress(*DRIVER_ERRORS):
            self.route.close()
