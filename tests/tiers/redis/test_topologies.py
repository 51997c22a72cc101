"""Sentinels and Clusters: which server a key goes to, and what happens when that changes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import ConfigError, TierError, TierUnavailable
from kvcascade.testing import bytes_for, key_for
from kvcascade.testing.servers import free_port, wait_until
from kvcascade.testing.servers.redis import (
    RedisCluster,
    RedisServer,
    Sentinels,
    redis_cluster,
    redis_sentinels,
)
from kvcascade.types import Outcome

PATIENCE = 30.0


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [outcome.kind.value for outcome in outcomes]


# Sentinels


@pytest.fixture(scope="module")
def sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sentinels]:
    with redis_sentinels(tmp_path_factory.mktemp("sentinels")) as running:
        yield running


@pytest.fixture
def watched(sentinels: Sentinels, sharing: Callable[..., Any]) -> Any:
    sentinels.wait_for_replica()
    return sharing(mode="sentinel", nodes=tuple(sentinels.nodes), service=sentinels.service)


def test_the_sentinels_name_the_primary(watched: Any, sentinels: Sentinels) -> None:
    tier, keys = watched.engine(), watched.keys(1, 2)
    assert watched.store(tier, keys) == [Outcome.OK] * 2
    assert sentinels.primary.ask("EXISTS", watched.name(tier, keys[0])) == 1
    assert watched.load(watched.engine(), keys) == [Outcome.OK] * 2
    facts = dict(watched.settings().probe().facts)
    assert facts[f"server 127.0.0.1:{sentinels.primary.port}"].endswith("standalone")
    assert facts["replicas"] == "1"


def test_chunks_are_read_from_a_replica(watched: Any, sentinels: Sentinels) -> None:
    """And from the primary what the replica does not have yet."""
    tier, keys = watched.engine(read_replicas=True), watched.keys(1, 2)
    watched.store(tier, keys)
    replica = sentinels.replica
    wait_until(lambda: replica.ask("EXISTS", watched.name(tier, keys[1])) == 1, "it is replicated")
    before = replica.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"]
    assert watched.load(tier, keys) == [Outcome.OK] * 2
    assert replica.info("commandstats")["cmdstat_get"]["calls"] == before + 2
    replica.pause()
    try:
        slow = watched.engine(read_replicas=True, deadline="300ms")
        fresh = watched.keys(3)
        assert watched.store(slow, fresh) == [Outcome.OK]
        assert watched.load(slow, fresh) == [Outcome.OK]
    finally:
        replica.resume()


def test_a_service_that_the_sentinels_do_not_know(sentinels: Sentinels, sharing: Callable[..., Any]) -> None:
    shared = sharing(mode="sentinel", nodes=tuple(sentinels.nodes), service="other")
    with pytest.raises(TierUnavailable, match=r"no Sentinel .* knows a primary of 'other'"):
        shared.engine()
    nodes = (f"127.0.0.1:{free_port()}",)
    with pytest.raises(
        TierUnavailable, match=r"no Sentinel .* is up: 127.0.0.1:\d+: refused; no server listens there"
    ):
        sharing(mode="sentinel", nodes=nodes, service="main").engine()


def test_a_failover_is_followed(tmp_path: Path, sharing: Callable[..., Any]) -> None:
    """What the new primary has is served; epochs that were over stay over."""
    with redis_sentinels(tmp_path) as sentinels:
        shared = sharing(mode="sentinel", nodes=tuple(sentinels.nodes), service=sentinels.service)
        tier, keys = shared.engine("v1"), shared.keys(1, 2, 3)
        other = shared.engine("v1")
        shared.store(tier, keys[:1], epoch="old")
        tier.move_to("v1")
        shared.store(tier, keys[1:], epoch="new")
        replica, primary = sentinels.replica, sentinels.primary
        wait_until(lambda: replica.ask("EXISTS", shared.name(tier, keys[2])) == 1, "it is replicated")
        primary.kill()
        assert kinds(shared.store(tier, keys)) == ["failed"] * 3
        wait_until(lambda: _there(tier, keys) == [False, True, True], "the failover is done")
        assert sentinels.primary is replica
        assert shared.load(tier, keys[1:], epoch="new") == [Outcome.OK] * 2
        assert shared.store(tier, keys[:1], epoch="new") == [Outcome.OK]
        assert _there(other, keys) == []  # it hears of it now
        assert _there(other, keys) == [True, False, False]
        assert _there(shared.engine("v1"), keys) == [True, True, True]


def test_a_demoted_primary_is_left(tmp_path: Path, sharing: Callable[..., Any]) -> None:
    """Connections to it stay open, and its READONLY says that there is another one."""
    with redis_sentinels(tmp_path) as sentinels:
        shared = sharing(mode="sentinel", nodes=tuple(sentinels.nodes), service=sentinels.service)
        tier, keys = shared.engine(), shared.keys(1, 2)
        shared.store(tier, keys)
        old = sentinels.primary
        sentinels.sentinel.ask("SENTINEL", "FAILOVER", sentinels.service)
        wait_until(lambda: sentinels.primary is not old, "the failover is done")
        old.ask("REPLICAOF", "127.0.0.1", sentinels.primary.port)  # as the Sentinel does, ten seconds later
        wait_until(lambda: shared.store(tier, shared.keys(3)) == [Outcome.OK], "the new primary takes writes")
        assert sentinels.primary.ask("EXISTS", shared.name(tier, shared.keys(3)[0])) == 1


def _there(tier: Any, keys: Any) -> list[bool]:
    try:
        found: list[bool] = tier.exists(keys)
    except TierError:
        return []
    return found


# Cluster


@pytest.fixture
def spread(cluster: RedisCluster, sharing: Callable[..., Any]) -> Any:
    return sharing(mode="cluster", nodes=tuple(cluster.nodes))


def test_keys_are_spread_over_the_nodes(spread: Any, cluster: RedisCluster) -> None:
    tier, keys = spread.engine(), spread.keys(*range(30))
    assert spread.store(tier, keys) == [Outcome.OK] * 30
    held = [server.ask("DBSIZE") for server in cluster.servers[:3]]
    assert min(held) >= 3
    assert spread.load(spread.engine(), keys) == [Outcome.OK] * 30
    assert sorted(entry.key for entry in tier.entries()) == sorted(keys)
    assert tier.delete([*keys, key_for(99)]) == [Outcome.OK] * 30 + [Outcome.MISSING]


def test_a_batch_survives_the_loss_of_one_node(tmp_path: Path, sharing: Callable[..., Any]) -> None:
    """Keys of the others are served."""
    with redis_cluster(tmp_path) as cluster:
        for server in cluster.servers:
            server.configure(cluster_require_full_coverage="no")
        spread = sharing(mode="cluster", nodes=tuple(cluster.nodes))
        tier, keys = spread.engine(), spread.keys(*range(20))
        spread.store(tier, keys)
        owners = [cluster.owner(spread.name(tier, key)) for key in keys]
        cluster.servers[1].kill()
        outcomes = spread.load(tier, keys)
        assert kinds(outcomes) == ["failed" if owner is cluster.servers[1] else "ok" for owner in owners]
        assert len(set(kinds(outcomes))) == 2


@pytest.mark.parametrize("stage", ["ASK", "MOVED"])
def test_a_slot_that_moves_is_followed_with_the_whole_payload(
    spread: Any, cluster: RedisCluster, stage: str
) -> None:
    tier, (key,) = spread.engine(), spread.keys(1)
    name = spread.name(tier, key)
    source = cluster.owner(name)
    target = next(server for server in cluster.servers[:3] if server is not source)
    slot = source.ask("CLUSTER", "KEYSLOT", name)
    spread.load(tier, [key])  # it has read where the slots are
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.identity(source))
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.identity(target))
    if stage == "MOVED":
        for server in (target, source, *cluster.servers[:3]):
            server.ask("CLUSTER", "SETSLOT", slot, "NODE", cluster.identity(target))
    try:
        keys = [key, *spread.keys(*range(2, 12))]
        payload = [memoryview(bytes_for(one, 1 << 20)) for one in keys]
        assert tier.write(keys, payload) == [Outcome.OK] * 11
        assert target.ask("DBSIZE") >= 1
        assert name in target.ask("CLUSTER", "GETKEYSINSLOT", slot, 10)
        assert spread.load(tier, keys, 1 << 20) == [Outcome.OK] * 11
        assert tier.exists(keys) == [True] * 11
        tier.delete(keys)
    finally:
        for server in cluster.servers[:3]:
            if stage == "ASK" and server in (source, target):
                server.ask("CLUSTER", "SETSLOT", slot, "STABLE")
            elif stage == "MOVED":
                server.ask("CLUSTER", "SETSLOT", slot, "NODE", cluster.identity(source))


def test_chunks_are_read_from_replicas_of_a_cluster(spread: Any, cluster: RedisCluster) -> None:
    tier, keys = spread.engine(read_replicas=True), spread.keys(*range(20))
    spread.store(tier, keys)
    replica = cluster.servers[3]
    wait_until(lambda: replica.ask("DBSIZE") == cluster.servers[0].ask("DBSIZE"), "they are replicated")
    before = replica.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"]
    assert spread.load(tier, keys) == [Outcome.OK] * 20
    assert replica.info("commandstats")["cmdstat_get"]["calls"] > before


def test_a_server_that_is_no_cluster(server: RedisServer, sharing: Callable[..., Any]) -> None:
    shared = sharing(mode="cluster", nodes=(f"127.0.0.1:{server.port}",))
    with pytest.raises(ConfigError, match="no Redis Cluster; see the tier's mode"):
        shared.engine()


def test_a_cluster_that_is_taken_for_one_server(cluster: RedisCluster, sharing: Callable[..., Any]) -> None:
    shared = sharing(url=cluster.servers[0].url)
    problems = shared.settings().probe().problems
    assert any("set mode: cluster" in problem for problem in problems)
    with pytest.raises(ConfigError, match="Redis Cluster"):
        for number in range(20):
            shared.engine(f"v{number}")


def test_a_cluster_that_is_not_there(sharing: Callable[..., Any]) -> None:
    nodes = (f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")
    with pytest.raises(TierUnavailable, match="refused; no server listens there"):
        sharing(mode="cluster", nodes=nodes).engine()
