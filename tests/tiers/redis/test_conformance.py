"""The redis tier does what every tier must: over TCP, a Unix socket, TLS, and on a Cluster."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings as hypothesis_settings

from kvcascade.testing import TierConformance, TierStateMachine, key_for
from kvcascade.testing.conformance import Opener
from kvcascade.testing.servers.redis import GivenServer, RedisCluster, RedisServer
from kvcascade.testing.servers.tls import TlsFront, make_certificates
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.redis import RedisSettings
from kvcascade.tiers.redis.tier import RedisTier
from kvcascade.types import Key, Outcome


class OnRedis(TierConformance):
    """What the tests of each way to connect have in common: every test has a prefix of its own."""

    given: ClassVar[dict[str, Any]] = {}

    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        return RedisSettings(**self.given, prefix=prefix_of(path), deadline="10s").open(context)

    def raw_corrupt(self, tier: Tier, key: Key) -> None:
        name = name_of(tier, key)
        place = int(ask(tier, name, "STRLEN", name)) - 2
        byte = ask(tier, name, "GETRANGE", name, place, place)
        ask(tier, name, "SETRANGE", name, place, bytes([byte[0] ^ 1]))

    def raw_truncate(self, tier: Tier, key: Key) -> None:
        name = name_of(tier, key)
        ask(tier, name, "SET", name, ask(tier, name, "GET", name)[:-1])

    def raw_remove(self, tier: Tier, key: Key) -> None:
        name = name_of(tier, key)
        ask(tier, name, "DEL", name)

    def test_recency_outlives_a_close(self, opener: Opener) -> None:
        """The server keeps it, in whole seconds and for its own eviction; what is told it must be there."""
        tier = opener()
        key = key_for(1)
        assert tier.write([key], [memoryview(bytes(4096))]) == [Outcome.OK]
        tier.touch([key, key_for(2)])
        tier.maintain(60.0)
        tier.close()
        assert [entry.key for entry in opener().entries()] == [key]


class TestTcp(OnRedis):
    @pytest.fixture(autouse=True)
    def _url(self, given_server: GivenServer) -> None:
        type(self).given = {"url": given_server.url}


class TestUnixSocket(OnRedis):
    @pytest.fixture(autouse=True)
    def _url(self, server: RedisServer) -> None:
        type(self).given = {"url": server.unix_url}


@pytest.fixture(scope="module")
def encrypted(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    certificates = make_certificates(tmp_path_factory.mktemp("tls"), "127.0.0.1")
    with TlsFront(server.port, certificates) as front:
        yield {"url": f"rediss://127.0.0.1:{front.port}/0", "tls": {"ca_file": str(certificates.ca_file)}}


class TestTls(OnRedis):
    @pytest.fixture(autouse=True)
    def _url(self, encrypted: dict[str, Any]) -> None:
        type(self).given = encrypted


class TestCluster(OnRedis):
    @pytest.fixture(autouse=True)
    def _nodes(self, cluster: RedisCluster) -> None:
        type(self).given = {"mode": "cluster", "nodes": tuple(cluster.nodes)}


class RedisMachine(TierStateMachine):
    persists = True
    url: ClassVar[str] = ""

    def open(self, path: Path, context: OpenContext) -> Tier:
        return RedisSettings(url=self.url, prefix=prefix_of(path), deadline="10s").open(context)


def test_it_behaves_like_a_dict(given_server: GivenServer) -> None:
    RedisMachine.url = given_server.url
    machine = RedisMachine.TestCase
    machine.settings = hypothesis_settings(max_examples=25, stateful_step_count=25, deadline=None)
    machine().runTest()


def prefix_of(path: Path) -> str:
    return "test-" + hashlib.sha256(str(path).encode()).hexdigest()[:12]


def name_of(tier: Tier, key: Key) -> bytes:
    assert isinstance(tier, RedisTier)
    assert tier._era is not None
    return tier._era.name(key)


def ask(tier: Tier, name: bytes, *command: Any) -> Any:
    """What the server that holds `name` answers."""
    assert isinstance(tier, RedisTier)
    return tier._exchange.command(name, *command)
