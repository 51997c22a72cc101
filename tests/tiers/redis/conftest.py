"""Servers for the tests of the redis tier, and what tests do with them. A server lives as long as the module that
asks for it; each test has a prefix of its own on it."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvcascade.testing.epochs import SharedPlace
from kvcascade.testing.servers import Proxy
from kvcascade.testing.servers.redis import GivenServer, RedisCluster, RedisServer, external_url, redis_cluster
from kvcascade.tiers.redis import RedisSettings
from kvcascade.tiers.redis.tier import RedisTier
from kvcascade.types import Key


class Shared(SharedPlace):
    """Servers that engines share."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.prefix = f"test-{secrets.token_hex(6)}"
        self._settings = settings

    def settings(self, **given: Any) -> RedisSettings:
        return RedisSettings(**{"prefix": self.prefix, "deadline": "5s", **self._settings, **given})

    def close(self) -> None:
        """Closes the engines, none of which may have a connection in use."""
        used = [tier._links.used for tier in self.opened]
        super().close()
        assert not any(used), f"connections that were not given back: {used}"

    def name(self, tier: RedisTier, key: Key) -> bytes:
        """What the chunk is called on the server."""
        assert tier._era is not None
        return tier._era.name(key)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One of our own, to be configured, filled and flushed."""
    with RedisServer(tmp_path_factory.mktemp("redis"), unix=True) as running:
        yield running


@pytest.fixture(scope="module")
def given_server(request: pytest.FixtureRequest) -> GivenServer:
    """The server of KVCASCADE_TEST_REDIS_URL, else our own: for tests that only have keys of their own there."""
    return GivenServer(external_url() or request.getfixturevalue("server").url)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """For all modules; who moves a slot moves it back."""
    with redis_cluster(tmp_path_factory.mktemp("cluster"), replica=True) as running:
        yield running


@pytest.fixture
def sharing() -> Iterator[Callable[..., Shared]]:
    """Makes a `Shared` with settings, and closes its engines."""
    made: list[Shared] = []

    def make(**settings: Any) -> Shared:
        made.append(Shared(**settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def shared(given_server: GivenServer, sharing: Callable[..., Shared]) -> Shared:
    return sharing(url=given_server.url)


@pytest.fixture
def ours(server: RedisServer, sharing: Callable[..., Shared]) -> Shared:
    """On our own server."""
    return sharing(url=server.url)


@pytest.fixture
def proxy(given_server: GivenServer) -> Iterator[Proxy]:
    where = urlsplit(given_server.url)
    if where.scheme != "redis":
        pytest.skip("the server of KVCASCADE_TEST_REDIS_URL can't be reached through a proxy")
    with Proxy(where.port or 6379, where.hostname or "127.0.0.1") as running:
        yield running


@pytest.fixture
def spoiled(given_server: GivenServer, proxy: Proxy, sharing: Callable[..., Shared]) -> Shared:
    """Through the proxy."""
    return sharing(url=given_server.through(proxy.port))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
