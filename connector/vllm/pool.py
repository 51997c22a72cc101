"""One host pool for the scheduler and the workers of an engine, which are processes of one host.

The pool is a memfd, handed over a Unix socket without a file (an abstract one), named after the engine: the small
/dev/shm of a container does not bind it, and a killed engine leaves nothing behind. The first worker that comes
makes the pool when all have come and have said how much room they need; the scheduler comes last.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvcascade.errors import ConfigError
from kvcascade.tiers.host import HostPool

from .handover import address, ask, connected, receive_checked, send

__all__ = ["SharedPool", "WorkerPool", "join_as_scheduler", "join_as_worker"]

_PAUSE = 0.05


class SharedPool(NamedTuple):
    """What the scheduler gets."""

    pool: HostPool
    ranks: list[dict[str, Any]]
    """What each worker has told, by rank."""


@dataclass(slots=True)
class WorkerPool:
    """What a worker gets. `close` when it ends."""

    pool: HostPool
    part_bytes: int
    """Bytes of a slot that belong to each worker: the same for all, the largest that any needs."""
    _host: "_Host | None" = field(default=None, repr=False)

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        self.pool.close()


def join_as_worker(
    engine_id: str,
    rank: int,
    world: int,
    part_bytes: int,
    told: Mapping[str, Any],
    make: Callable[[int], HostPool],
    timeout: float = 300.0,
) -> WorkerPool:
    """Returns the engine's pool, once all `world` workers have come.

    Args:
        part_bytes: of a slot, that this worker needs.
        told: for the scheduler.
        make: makes the pool, for `part_bytes` of each worker; called in one of them.

    Raises:
        ConfigError: the pool can't be made, or a worker does not come: it may be on another host.
    """
    end = time.monotonic() + timeout
    hello = {"rank": rank, "part_bytes": part_bytes, "told": dict(told)}
    while True:
        if host := _Host.bind(engine_id, world):
            return host.gather(hello, make, end)
        with connected(engine_id) as connection:
            if connection:
                answer, fd = ask(connection, hello, end)
                return WorkerPool(_attached(fd), answer["part_bytes"])
        if time.monotonic() > end:
            raise ConfigError(f"no worker of engine {engine_id} hands out the host pool after {timeout:g} s")
        time.sleep(_PAUSE)


def join_as_scheduler(engine_id: str, timeout: float = 60.0) -> SharedPool:
    """Returns the engine's pool, which its workers have made.

    Raises:
        ConfigError: there is none.
    """
    end = time.monotonic() + timeout
    while True:
        with connected(engine_id) as connection:
            if connection:
                answer, fd = ask(connection, {"rank": None}, end)
                return SharedPool(_attached(fd), answer["ranks"])
        if time.monotonic() > end:
            raise ConfigError(
                f"no worker of engine {engine_id} hands out the host pool after {timeout:g} s; scheduler and "
                f"workers must be processes of one user on one host"
            )
        time.sleep(_PAUSE)


class _Waiting(list[socket.socket]):
    """Workers that have come and wait for the pool. They hear of it where there will be none."""

    def __enter__(self) -> "_Waiting":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for connection in self:
            with connection, contextlib.suppress(OSError):
                if error is not None:
                    send(connection, {"error": str(error)})


class _Host:
    """The worker that makes the pool and hands it out."""

    def __init__(self, listener: socket.socket, world: int) -> None:
        self._listener = listener
        self._world = world
        self._pool: HostPool | None = None
        self._thread: threading.Thread | None = None

    @classmethod
    def bind(cls, engine_id: str, world: int) -> "_Host | None":
        """None where another worker was first."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address(engine_id))
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return None
            raise ConfigError(f"the host pool can't be shared between processes here: {error}") from error
        listener.listen(world + 1)
        return cls(listener, world)

    def gather(self, own: dict[str, Any], make: Callable[[int], HostPool], end: float) -> WorkerPool:
        """Waits for the other workers, makes the pool, hands it to them, and stays for the scheduler."""
        hellos = {own["rank"]: own}
        with contextlib.ExitStack() as undo:
            undo.callback(self._listener.close)
            with _Waiting() as waiting:
                while len(hellos) < self._world:
                    self._welcome(hellos, waiting, end)
                part_bytes = max(hello["part_bytes"] for hello in hellos.values())
                pool = self._pool = make(part_bytes)
                for connection in waiting:
                    send(connection, {"part_bytes": part_bytes}, pool.fd)
            undo.pop_all()
        ranks = [hellos[rank]["told"] for rank in sorted(hellos)]
        self._thread = threading.Thread(
            target=self._serve_scheduler, args=(ranks,), name="kvcascade-pool", daemon=True
        )
        self._thread.start()
        return WorkerPool(pool, part_bytes, self)

    def close(self) -> None:
        """The scheduler gets it no more. A second call does nothing."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self._listener.close()

    def _welcome(self, hellos: dict[int, dict[str, Any]], waiting: _Waiting, end: float) -> None:
        """Takes the next worker."""
        self._listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            missing = sorted(set(range(self._world)) - set(hellos))
            raise ConfigError(
                f"ranks {missing} of {self._world} have not come to share the host pool; all workers of an engine "
                f"must be processes of one user on one host"
            ) from None
        hello = receive_checked(connection)
        if hello is None or hello.get("rank") in (None, *hellos):
            connection.close()  # another user, or an engine of the same id that is starting, too
            return
        hellos[hello["rank"]] = hello
        waiting.append(connection)

    def _serve_scheduler(self, ranks: list[dict[str, Any]]) -> None:
        self._listener.settimeout(None)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                hello = receive_checked(connection)
                if hello is None or hello.get("rank") is not None or self._pool is None:
                    continue
                with contextlib.suppress(OSError):
                    send(connection, {"ranks": ranks}, self._pool.fd)
                    self._listener.close()
                    return


def _attached(fd: int) -> HostPool:
    try:
        return HostPool.attach(fd)
    finally:
        os.close(fd)
