"""Servers and networks that do not behave: each fault has its right outcome, and harms nothing else."""

import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import TierError, TierRefused, TierUnavailable
from kvcascade.testing import buffer, bytes_for, key_for
from kvcascade.testing.servers import Proxy, wait_until
from kvcascade.testing.servers.redis import GivenServer, RedisServer
from kvcascade.tiers.redis.chunks import client_name
from kvcascade.tiers.redis.dialling import TlsConnection
from kvcascade.tiers.redis.links import Links
from kvcascade.types import Outcome, OutcomeKind

VALUE = 64 << 10
HANG = 60.0


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., RedisServer]]:
    """Starts servers that a test may configure, fill and kill."""
    started: list[RedisServer] = []

    def start(**config: object) -> RedisServer:
        started.append(RedisServer(tmp_path, **config))
        started[-1].start()
        return started[-1]

    yield start
    for server in started:
        server.stop()


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [outcome.kind.value for outcome in outcomes]


def failure(outcome: Outcome) -> str:
    """What a failed outcome says."""
    assert outcome.kind is OutcomeKind.FAILED
    assert isinstance(outcome.cause, TierError)
    return str(outcome.cause)


# The connection


def test_a_connection_that_is_cut_in_a_payload_fails_what_was_not_received(spoiled: Any, proxy: Proxy) -> None:
    tier, keys = spoiled.engine(), spoiled.keys(1, 2, 3, 4)
    spoiled.store(tier, keys)
    proxy.cut("client", after=100_000)
    outcomes = spoiled.load(tier, keys)
    assert kinds(outcomes) == ["ok", "failed", "failed", "failed"]
    assert "the connection was lost" in failure(outcomes[1])
    assert spoiled.load(tier, keys) == [Outcome.OK] * 4


def test_a_store_that_is_cut_off_leaves_nothing_that_is_found(spoiled: Any, proxy: Proxy) -> None:
    """kvcache-ai/Mooncake#974: a writer that dies in the middle blocks nothing."""
    tier, keys = spoiled.engine(), spoiled.keys(1, 2, 3)
    proxy.cut("server", after=100_000)
    outcomes = spoiled.store(tier, keys)
    assert kinds(outcomes)[1:] == ["failed", "failed"]
    assert tier.exists(keys)[1:] == [False, False]
    assert spoiled.store(tier, keys) == [Outcome.OK] * 3
    assert spoiled.load(tier, keys) == [Outcome.OK] * 3


def test_a_byte_that_changes_on_the_way_is_seen(spoiled: Any, proxy: Proxy) -> None:
    tier, keys = spoiled.engine(), spoiled.keys(1, 2, 3)
    spoiled.store(tier, keys)
    proxy.corrupt("client", after=100_000)
    assert kinds(spoiled.load(tier, keys)) == ["ok", "corrupt", "ok"]
    assert tier.exists(keys) == [True, False, True]


def test_a_byte_that_changes_on_its_way_to_the_server_is_seen(spoiled: Any, proxy: Proxy) -> None:
    tier, keys = spoiled.engine(), spoiled.keys(1, 2, 3)
    proxy.corrupt("server", after=100_000)
    assert spoiled.store(tier, keys) == [Outcome.OK] * 3
    assert kinds(spoiled.load(tier, keys)) == ["ok", "corrupt", "ok"]


@pytest.mark.parametrize("after", [0, 3, VALUE + 328 + 8])
def test_an_answer_that_is_none_ends_the_connection(spoiled: Any, proxy: Proxy, after: int) -> None:
    """A damaged type, length or end of a reply: nothing that follows on that connection is believed."""
    tier, keys = spoiled.engine(), spoiled.keys(1, 2)
    spoiled.store(tier, keys)
    proxy.corrupt("client", after=after)
    outcomes = spoiled.load(tier, keys)
    assert kinds(outcomes)[1:] == ["failed"] or after == 3
    assert kinds(outcomes)[0] in ("failed", "corrupt")
    spoiled.store(tier, keys)
    assert spoiled.load(tier, keys) == [Outcome.OK] * 2


def test_a_server_that_says_nothing_costs_one_deadline(spoiled: Any, proxy: Proxy) -> None:
    tier, keys = spoiled.engine(deadline="200ms"), spoiled.keys(1, 2)
    spoiled.store(tier, keys)
    proxy.stall("client", after=70_000)
    outcomes = spoiled.load(tier, keys)
    assert kinds(outcomes) == ["ok", "failed"]
    assert "no answer in time" in failure(outcomes[1])
    with pytest.raises(TierUnavailable, match="no answer"):
        tier.exists(keys)
    proxy.heal()
    assert spoiled.load(tier, keys) == [Outcome.OK] * 2


def test_a_server_that_reads_nothing_costs_one_deadline(spoiled: Any, proxy: Proxy) -> None:
    tier = spoiled.engine(deadline="200ms")
    proxy.stall("server", after=1000)
    key = key_for(1)
    (outcome,) = tier.write([key], [memoryview(bytes_for(key, 32 << 20))])
    assert "no answer in time" in failure(outcome)
    proxy.heal()
    assert tier.exists([key]) == [False]
    assert spoiled.store(tier, [key]) == [Outcome.OK]


def test_a_slow_link_is_no_fault(spoiled: Any, proxy: Proxy) -> None:
    tier, keys = spoiled.engine(), spoiled.keys(1, 2, 3)
    proxy.slow(delay=0.001, rate=20e6)
    assert spoiled.store(tier, keys) == [Outcome.OK] * 3
    assert spoiled.load(tier, keys) == [Outcome.OK] * 3


@pytest.mark.parametrize("how", ["the server closes it", "the network drops it"])
def test_an_idle_connection_that_was_closed_is_not_used(
    spoiled: Any, proxy: Proxy, given_server: GivenServer, how: str
) -> None:
    """LMCache/LMCache#1913: after one dropped connection all calls failed."""
    tier, keys = spoiled.engine(), spoiled.keys(1, 2)
    spoiled.store(tier, keys)
    if how == "the server closes it":
        for client in given_server.connections(client_name(spoiled.namespace.digest.hex())):
            given_server.ask("CLIENT", "KILL", "ID", client["id"])
    else:
        proxy.drop()
    wait_until(lambda: proxy.open == 0, "the connections are closed")
    assert tier.exists(keys) == [True, True]
    assert spoiled.load(tier, keys) == [Outcome.OK] * 2


def test_a_link_that_is_too_slow_for_the_deadline_costs_no_connections(spoiled: Any, proxy: Proxy) -> None:
    """A connection that is made at the very end of its time was never given back: after a few of those a tier said
    that all were in use, for good."""
    tier, keys = spoiled.engine(deadline="300ms", concurrency=2), spoiled.keys(1)
    spoiled.store(tier, keys)
    for delay in (0.02, 0.06, 0.07, 0.075, 0.08, 0.1, 0.14, 0.15, 0.16):
        proxy.drop()
        proxy.slow(delay=delay)
        assert kinds(spoiled.load(tier, keys))[0] in ("ok", "failed")
        assert tier._links.used == 0
    proxy.heal()
    wait_until(lambda: spoiled.load(tier, keys) == [Outcome.OK], "it works again")


@pytest.mark.parametrize("kind", ["redis", "rediss", "unix"])
def test_making_a_connection_has_only_the_time_of_the_call(tmp_path: Path, sharing: Any, kind: str) -> None:
    """Nobody answers there. The tier's own deadline would be ten minutes."""
    path = tmp_path / "silent.sock"
    with socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET) as silent:
        silent.bind(str(path) if kind == "unix" else ("127.0.0.1", 0))
        silent.listen()
        url = f"unix://{path}" if kind == "unix" else f"{kind}://127.0.0.1:{silent.getsockname()[1]}/3"
        settings = sharing(url=url, deadline="10m", password="x").settings()
        links = Links(settings, "test")
        pool = links.pool(settings.locations[0])
        for _ in range(2):
            with pytest.raises(TierUnavailable, match="no answer"), pool.lease(time.monotonic() + 0.2):
                pytest.fail("there is nobody")
        with pytest.raises(TierUnavailable, match="no time left"), pool.lease(time.monotonic()):
            pytest.fail("there is no time")
        assert links.used == 0
        links.close()


def test_a_host_that_does_not_answer_has_only_the_time_of_the_call(sharing: Any) -> None:
    """Nor does it refuse: its queue is full, and what is sent to it is dropped."""
    with ExitStack() as open_ends:
        host = open_ends.enter_context(socket.socket())
        host.bind(("127.0.0.1", 0))
        host.listen(0)
        for _ in range(3):
            end = open_ends.enter_context(socket.socket())
            end.setblocking(False)
            end.connect_ex(host.getsockname())
        settings = sharing(url=f"redis://127.0.0.1:{host.getsockname()[1]}", deadline="10m").settings()
        links = Links(settings, "test")
        pool = links.pool(settings.locations[0])
        with pytest.raises(TierUnavailable, match="no answer"), pool.lease(time.monotonic() + 0.2):
            pytest.fail("there is nobody")
        assert links.used == 0


def test_a_tls_handshake_has_only_what_connecting_has_left() -> None:
    connection = TlsConnection(host="127.0.0.1", socket_timeout=600)
    connection.end = time.monotonic() + 0.1
    one, other = socket.socketpair()
    with one, other, pytest.raises(TimeoutError):
        connection._wrap_socket_with_ssl(one)


def test_more_threads_than_connections_take_turns(shared: Any, given_server: GivenServer) -> None:
    """redis/redis-py#2517: threads above the limit got an error."""
    tier = shared.engine(concurrency=2, deadline="30s")
    me = tier._presence._name.rpartition(b":")[2].decode()
    wrong: list[str] = []
    most: list[int] = []

    def worker(thread: int) -> None:
        keys = shared.keys(*range(thread * 10, thread * 10 + 10))
        for _ in range(3):
            wrong.extend(kinds([one for one in shared.store(tier, keys) if not one.ok]))
            wrong.extend(kinds([one for one in shared.load(tier, keys) if not one.ok]))
            most.append(len(given_server.connections(f"kvcascade:{shared.namespace.digest.hex()}:{me}")))

    threads = [threading.Thread(target=worker, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert wrong == []
    assert 1 <= max(most) <= 2


def test_all_connections_in_use_is_said(shared: Any) -> None:
    tier, keys = shared.engine(concurrency=1, deadline="200ms"), shared.keys(1)
    with tier._links.pool(tier._settings.locations[0]).lease(time.monotonic() + HANG):
        with pytest.raises(TierUnavailable, match="all 1 connections are in use"):
            tier.exists(keys)
        assert "all 1 connections are in use" in failure(shared.load(tier, keys)[0])
    assert shared.store(tier, keys) == [Outcome.OK]


# The server


def test_a_server_that_dies_and_comes_back(own: Any, sharing: Any) -> None:
    """LMCache/LMCache#1491: the backend stayed dead. What the server has lost is missing, not wrong."""
    server = own()
    shared = sharing(url=server.url)
    tier, keys = shared.engine(), shared.keys(1, 2)
    shared.store(tier, keys)
    server.kill()
    outcomes = shared.load(tier, keys)
    assert "refused; no server listens there" in failure(outcomes[0]) or "lost" in failure(outcomes[0])
    with pytest.raises(TierUnavailable, match="refused; no server listens there"):
        tier.exists(keys)
    assert kinds(shared.store(tier, keys)) == ["failed", "failed"]
    server.start()
    assert tier.exists(keys) == [False, False]
    assert shared.store(tier, keys) == [Outcome.OK] * 2
    assert shared.load(tier, keys) == [Outcome.OK] * 2


def test_a_full_server_refuses_and_goes_on_serving(own: Any, sharing: Any) -> None:
    """redis/redis#2746: exactly the refused keys are refused."""
    server = own(maxmemory="8mb", maxmemory_policy="noeviction")
    shared = sharing(url=server.url)
    tier, keys = shared.engine(), shared.keys(*range(20))
    outcomes = shared.store(tier, keys, 1 << 20)
    assert set(kinds(outcomes)) == {"ok", "refused"}
    assert tier.exists(keys) == [outcome.ok for outcome in outcomes]
    kept = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.ok]
    assert shared.load(tier, kept, 1 << 20) == [Outcome.OK] * len(kept)
    again = shared.engine()  # a start needs no write
    assert shared.load(again, kept, 1 << 20) == [Outcome.OK] * len(kept)
    tier.delete(kept)
    assert shared.store(tier, keys[-3:], 1 << 20) == [Outcome.OK] * 3


def test_a_full_server_that_does_not_know_the_namespace(own: Any, sharing: Any) -> None:
    """Nobody can say which epoch that is, before there is room to write it down."""
    server = own(maxmemory="8mb", maxmemory_policy="noeviction")
    server.fill()
    shared = sharing(url=server.url)
    for _ in range(3):
        with pytest.raises(TierUnavailable, match=r"it is full .* evicts nothing"):
            shared.engine()
    assert shared.settings().probe().problems == []
    server.empty()
    tier, keys = shared.engine(), shared.keys(1)
    assert shared.store(tier, keys) == [Outcome.OK]
    server.fill()
    assert kinds(shared.store(tier, shared.keys(2))) == ["refused"]
    tier._presence._due = float("-inf")
    tier.maintain(1.0)
    assert shared.load(shared.engine(), keys) == [Outcome.OK]


def test_what_the_server_evicts_is_missing(own: Any, sharing: Any) -> None:
    server = own(maxmemory="8mb", maxmemory_policy="allkeys-lru")
    shared = sharing(url=server.url)
    tier, keys = shared.engine(), shared.keys(*range(20))
    for key in keys:
        assert shared.store(tier, [key], 1 << 20) == [Outcome.OK]
    outcomes = shared.load(tier, keys, 1 << 20)
    assert set(kinds(outcomes)) == {"ok", "missing"}
    assert [entry.key for entry in tier.entries() if entry.key not in keys] == []


def test_a_chunk_that_expires_is_missing(shared: Any, given_server: GivenServer) -> None:
    tier, (key,) = shared.engine(ttl="1h"), shared.keys(1)
    shared.store(tier, [key])
    name = shared.name(tier, key)
    assert 3_590_000 < given_server.ask("PTTL", name) <= 3_600_000
    given_server.ask("PEXPIRE", name, 1)
    wait_until(lambda: not tier.exists([key])[0], "it has expired")
    assert shared.load(tier, [key]) == [Outcome.MISSING]
    unending = shared.engine(ttl=None)
    shared.store(unending, [key])
    assert given_server.ask("PTTL", name) == -1


@pytest.mark.parametrize("told", [True, False], ids=["the limit is told", "the limit is found out"])
def test_a_value_above_the_servers_limit_is_refused_alone(own: Any, sharing: Any, told: bool) -> None:
    """redis/redis#757: a value that is too large fails only its own key."""
    server = own(proto_max_bulk_len=1 << 20, **({} if told else {"rename_command": ("CONFIG", "hidden")}))
    shared = sharing(url=server.url)
    tier, keys = shared.engine(), shared.keys(*range(6))
    sizes = [VALUE, 2 << 20, VALUE, 2 << 20, VALUE, VALUE]
    sources = [memoryview(bytes_for(key, nbytes)) for key, nbytes in zip(keys, sizes, strict=True)]
    wanted = ["ok", "refused", "ok", "refused", "ok", "ok"]
    assert kinds(tier.write(keys, sources)) == wanted
    assert kinds(tier.write(keys, sources)) == wanted
    assert tier.exists(keys) == [kind == "ok" for kind in wanted]
    small = [keys[place] for place in (0, 2, 4, 5)]
    assert shared.load(tier, small) == [Outcome.OK] * 4


def test_a_server_that_became_a_replica_takes_no_writes(own: Any, sharing: Any) -> None:
    primary, server = own(), own()
    shared = sharing(url=server.url)
    tier, keys = shared.engine(), shared.keys(1)
    server.configure(replica_serve_stale_data="yes")
    server.ask("REPLICAOF", "127.0.0.1", primary.port)
    assert "read-only replica" in failure(shared.store(tier, keys)[0])
    server.ask("REPLICAOF", "NO", "ONE")
    assert shared.store(tier, keys) == [Outcome.OK]


def test_a_replica_without_its_primary_is_unavailable(own: Any, sharing: Any) -> None:
    primary, server = own(), own()
    shared = sharing(url=server.url)
    tier, keys = shared.engine(), shared.keys(1)
    shared.store(tier, keys)
    server.configure(replica_serve_stale_data="no")
    server.ask("REPLICAOF", "127.0.0.1", primary.port)
    primary.kill()
    wait_until(lambda: server.info("replication")["master_link_status"] == "down", "the link is down")
    assert "lost its primary" in failure(shared.load(tier, keys)[0])


def test_a_server_that_is_loading_is_unavailable(own: Any, sharing: Any) -> None:
    server = own(save="3600 1000000", rdbcompression="no", key_load_delay=50_000)
    shared = sharing(url=server.url)
    tier, keys = shared.engine(), shared.keys(*range(20))
    shared.store(tier, keys, 1 << 20)
    server.ask("SAVE")
    server.stop()
    starting = threading.Thread(target=server.start)
    starting.start()
    wait_until(lambda: "still loading" in failure_of(tier, keys), "the server is loading")
    assert "still loading" in failure(shared.load(tier, keys[:1])[0])
    starting.join(HANG)
    assert shared.load(tier, keys, 1 << 20) == [Outcome.OK] * 20


def failure_of(tier: Any, keys: Any) -> str:
    try:
        tier.exists(keys)
    except TierError as error:
        return str(error)
    return ""


# What lies on the server


def test_a_value_of_another_key_is_not_served(shared: Any, given_server: GivenServer) -> None:
    tier, keys = shared.engine(), shared.keys(1, 2)
    shared.store(tier, keys)
    given_server.ask("RENAME", shared.name(tier, keys[0]), shared.name(tier, keys[1]))
    assert kinds(shared.load(tier, keys)) == ["missing", "corrupt"]
    assert tier.exists(keys) == [False, False]


@pytest.mark.parametrize("command", [("SET", b""), ("SET", b"short"), ("RPUSH", b"x"), ("SET", b"x" * 300_000)])
def test_a_foreign_value_is_removed(shared: Any, given_server: GivenServer, command: tuple[str, bytes]) -> None:
    """LMCache/LMCache#426: there, but not whole: a miss, and the next store heals it."""
    tier, keys = shared.engine(), shared.keys(1, 2, 3)
    shared.store(tier, keys)
    name = shared.name(tier, keys[1])
    given_server.ask("DEL", name)
    given_server.ask(command[0], name, command[1])
    assert kinds(shared.load(tier, keys)) == ["ok", "corrupt", "ok"]
    assert shared.load(tier, keys[1:2]) == [Outcome.MISSING]
    assert shared.store(tier, keys) == [Outcome.OK] * 3
    assert shared.load(tier, keys) == [Outcome.OK] * 3


def test_a_chunk_of_another_epoch_under_our_name_is_not_served(shared: Any, given_server: GivenServer) -> None:
    old, new = shared.engine("v1"), shared.engine("v2")
    (key,) = shared.keys(1)
    shared.store(old, [key], epoch="v1")
    given_server.ask("RENAME", shared.name(old, key), shared.name(new, key))
    assert kinds(shared.load(new, [key])) == ["corrupt"]


# Memory


def test_payloads_are_not_copied(shared: Any) -> None:
    """redis/redis-py#1055: a pipeline of large values took their size again, and more."""
    tier, keys = shared.engine(deadline="30s"), shared.keys(*range(24))
    sources = [memoryview(bytes_for(key, 4 << 20)) for key in keys]
    targets = [buffer(4 << 20) for _ in keys]
    tier.exists(keys)
    tracemalloc.start()
    try:
        assert tier.write(keys, sources) == [Outcome.OK] * 24
        assert tier.read(keys, targets) == [Outcome.OK] * 24
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    tier.delete(keys)


def test_refusals_name_what_will_not_help(own: Any, sharing: Any) -> None:
    """A password that no longer fits is not tried again and again."""
    server = own()
    shared = sharing(url=server.url)
    tier = shared.engine()
    server.configure(requirepass="new")
    server.password = "new"
    server.ask("CLIENT", "KILL", "TYPE", "normal")
    (outcome,) = shared.load(tier, shared.keys(1))
    assert isinstance(outcome.cause, TierRefused)
    assert "password" in failure(outcome)
