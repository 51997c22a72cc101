"""What `kvcascade inspect`, `verify`, `gc`, `export` and `warm` see on servers and do to it."""

from pathlib import Path

import pytest

from kvcascade.testing import StoredConformance
from kvcascade.testing.servers.redis import GivenServer, RedisCluster, RedisServer
from kvcascade.tiers import StoredChunk, TierSettings
from kvcascade.tiers.redis import RedisSettings


class TestStored(StoredConformance):
    @pytest.fixture(autouse=True)
    def _server(self, given_server: GivenServer) -> None:
        self.where = given_server

    def settings(self, path: Path) -> TierSettings:
        return RedisSettings(url=self.where.url, prefix=f"test-{path.name[-40:]}", deadline="5s")

    def raw_corrupt(self, chunk: StoredChunk) -> None:
        owner = self.owner(chunk.place)
        byte = owner.ask("GETRANGE", chunk.place, 9000, 9000)
        owner.ask("SETRANGE", chunk.place, 9000, bytes([byte[0] ^ 1]))

    def owner(self, name: str) -> GivenServer | RedisServer:
        return self.where


class TestStoredOnACluster(TestStored):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: RedisCluster) -> None:
        self.cluster = cluster

    def settings(self, path: Path) -> TierSettings:
        nodes = tuple(self.cluster.nodes)
        return RedisSettings(mode="cluster", nodes=nodes, prefix=f"test-{path.name[-40:]}", deadline="5s")

    def owner(self, name: str) -> RedisServer:
        return self.cluster.owner(name.encode())
