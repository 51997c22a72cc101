"""The settings of the redis tier, and what `check`, `ls` and `clear` make of a server."""

import os
import platform
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from kvcascade.configs import parse_stack, resolved
from kvcascade.errors import ConfigError
from kvcascade.testing.servers.redis import GivenServer, RedisServer
from kvcascade.tiers.redis import RedisSettings
from kvcascade.types import Namespace, Outcome

HOST = {"type": "host", "capacity": "1MiB"}


def test_defaults() -> None:
    settings = RedisSettings()
    assert (settings.type, settings.name, settings.mode) == ("redis", "redis", "single")
    assert settings.url == "redis://127.0.0.1:6379/0"
    assert (settings.username, settings.password, settings.tls.ca_file) == (None, None, None)
    assert (settings.prefix, settings.read_replicas) == ("kvcascade", False)
    assert (settings.write, settings.fill, settings.promote) == ("through", False, "always")
    assert (settings.ttl, settings.probe_ttl, settings.deadline) == (86400.0, 10.0, 0.5)
    assert (settings.concurrency, settings.queue, settings.retries) == (4, 0.125, 1)
    assert (settings.breaker.failures, settings.breaker.probe_every) == (5, 2.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "http://x"}, "expected redis://HOST"),
        ({"url": "redis://x/0?decode_responses=true"}, "has an option 'decode_responses'"),
        ({"url": "redis://x/one"}, "expected the number of a database"),
        ({"url": "redis://x:port/0"}, "Port could not be cast"),
        ({"url": "unix://run/redis.sock"}, "absolute path"),
        ({"nodes": ["x:1"]}, "is for mode: sentinel and cluster"),
        ({"mode": "cluster"}, "required with mode: cluster"),
        ({"mode": "sentinel", "nodes": ["x:1"]}, "required with mode: sentinel"),
        ({"mode": "cluster", "nodes": ["x:1"], "service": "s"}, "is for mode: sentinel"),
        ({"mode": "cluster", "nodes": ["x:1"], "url": "redis://x"}, "is for mode: single"),
        ({"mode": "cluster", "nodes": ["http://x:1"]}, "expected HOST:PORT"),
        ({"mode": "cluster", "nodes": ["x:99999"]}, "expected HOST:PORT"),
        ({"read_replicas": True}, "needs mode: sentinel or cluster"),
        ({"password": "x", "password_file": "/y"}, "a password is given too"),
        ({"tls": {"enabled": True}}, "write rediss://"),
        ({"tls": {"cert_file": "/x"}}, "belong together"),
        ({"prefix": "a b"}, "expected 1 to 100 letters"),
        ({"prefix": "{tag}"}, "expected 1 to 100 letters"),
        ({"mode": "one"}, "'single', 'sentinel' or 'cluster'"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str) -> None:
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    with pytest.raises(ValidationError, match=said):
        RedisSettings(**given)


def test_where_the_servers_are() -> None:
    assert [str(where) for where in RedisSettings(url="redis://h").locations] == ["h:6379"]
    assert [str(where) for where in RedisSettings(url="rediss://[::1]:7/3").locations] == ["[::1]:7"]
    assert [str(where) for where in RedisSettings(url="unix:///run/a%20b?db=2").locations] == ["/run/a b"]
    nodes = ("a", "b:1", "[::1]:2")
    sentinels = RedisSettings(mode="sentinel", nodes=nodes, service="s")
    assert [str(where) for where in sentinels.locations] == ["a:26379", "b:1", "[::1]:2"]
    assert RedisSettings(url="rediss://h").encrypted
    assert RedisSettings(mode="cluster", nodes=nodes, tls={"enabled": True}).encrypted
    assert RedisSettings(url="unix:///s?db=2").db == 2


def test_secrets_come_from_elsewhere_and_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = {"type": "redis", "username": "u", "password": "hunter2"}
    with pytest.raises(ConfigError, match="a secret must not stand in a stack"):
        parse_stack({"version": 1, "tiers": [HOST, tier]})
    with pytest.raises(ConfigError, match="literal password") as caught:
        parse_stack({"version": 1, "tiers": [HOST, {"type": "redis", "url": "redis://u:hunter2@h/0"}]})
    assert "hunter2" not in str(caught.value)
    monkeypatch.setenv("TEST_PASSWORD", "hunter2")
    for given in (
        {"password": "${TEST_PASSWORD}"},
        {"url": "redis://u:${TEST_PASSWORD}@h/0"},
        {"mode": "sentinel", "nodes": ["h"], "service": "s", "sentinel_password": "${TEST_PASSWORD}"},
    ):
        stack = parse_stack({"version": 1, "tiers": [HOST, {"type": "redis", **given}]})
        assert "hunter2" not in resolved(stack) + repr(stack) + str(stack)
    monkeypatch.setenv("TEST_PASSWORD", "")
    stack = parse_stack({"version": 1, "tiers": [HOST, {"type": "redis", "password": "${TEST_PASSWORD:-}"}]})
    assert stack.tiers[1].password is None  # type: ignore[attr-defined]


def test_two_tiers_can_not_have_the_same_keys() -> None:
    claims = [RedisSettings(**given).claims() for given in ({}, {"url": "redis://127.0.0.1"}, {"prefix": "b"})]
    assert claims[0] == claims[1] != claims[2]
    assert RedisSettings(url="redis://127.0.0.1/1").claims() != claims[0]


def test_importing_the_settings_imports_no_driver() -> None:
    code = "import sys, kvcascade.tiers.redis; sys.exit('redis' in sys.modules or 'xxhash' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Check


def test_a_probe_changes_nothing(ours: Any, server: RedisServer) -> None:
    before = server.ask("DBSIZE")
    probe = ours.settings().probe(64 << 10)
    assert probe.problems == []
    assert probe.chunks is None
    facts = dict(probe.facts)
    assert facts[f"server 127.0.0.1:{server.port}"].endswith(", standalone")
    assert "no maxmemory" in facts["memory"]
    assert facts["replicas"] == "0"
    assert facts["ttl"] == "1d"
    assert server.ask("DBSIZE") == before


@pytest.mark.parametrize(
    ("policy", "ttl", "said"),
    [
        ("noeviction", "24h", "once it is full, new chunks are refused"),
        ("volatile-lru", None, "evicts nothing without a ttl"),
        ("volatile-lru", "24h", "; volatile-lru"),
    ],
)
def test_a_probe_says_what_a_full_server_will_do(
    ours: Any, server: RedisServer, policy: str, ttl: str | None, said: str
) -> None:
    server.configure(maxmemory="1gb", maxmemory_policy=policy)
    try:
        assert said in dict(ours.settings(ttl=ttl).probe().facts)["memory"]
    finally:
        server.configure(maxmemory=0, maxmemory_policy="noeviction")


def test_a_probe_finds_chunks_that_are_too_large(ours: Any, server: RedisServer) -> None:
    server.configure(proto_max_bulk_len=1 << 20)
    try:
        (problem,) = ours.settings().probe(1 << 20).problems
        assert "above its proto-max-bulk-len of 1 MiB, and would be refused" in problem
        assert ours.settings().probe(1 << 19).problems == []
    finally:
        server.configure(proto_max_bulk_len=512 << 20)


def test_a_probe_finds_a_replica(ours: Any, server: RedisServer) -> None:
    server.ask("REPLICAOF", "127.0.0.1", 1)
    try:
        problems = ours.settings().probe().problems
        assert any("a read-only replica" in problem for problem in problems)
    finally:
        server.ask("REPLICAOF", "NO", "ONE")


# What is kept


def test_holdings_name_each_namespace(shared: Any) -> None:
    assert shared.settings().holdings() == []
    other = Namespace.of(model="other", tenant="acme")
    one, two = shared.engine(), shared.engine(namespace=other)
    shared.store(one, shared.keys(1, 2))
    one.move_to("v2")
    shared.store(one, shared.keys(3))
    shared.store(two, shared.keys(1))
    two.close()
    held = {holding.tenant: holding for holding in shared.settings().holdings()}
    assert {tenant: holding.chunks for tenant, holding in held.items()} == {"": 3, "acme": 1}
    assert held[""].bytes == 3 * one.footprint(shared.chunk)
    assert held["acme"].namespace == "model=other tenant=acme"
    assert held[""].used_by == f"process {os.getpid()} on {platform.node()}"
    assert held["acme"].used_by == ""
    assert held["acme"].oldest == held["acme"].newest is not None


def test_clear_removes_a_tenants_namespaces(shared: Any, given_server: GivenServer) -> None:
    given_server.ask("SET", f"{shared.prefix}-foreign", "x")
    other = Namespace.of(model="other", tenant="acme")
    one, two = shared.engine(), shared.engine(namespace=other)
    shared.store(one, shared.keys(1))
    shared.store(two, shared.keys(1, 2))
    two.move_to("v2")
    with pytest.raises(ConfigError, match=r"in use by process .* Nothing was removed"):
        shared.settings().clear("acme")
    two.close()
    (line,) = shared.settings().clear("acme")
    assert line.startswith(f"removed {shared.prefix}:v1:{other.digest.hex()}:* (2 chunks, ")
    assert [holding.tenant for holding in shared.settings().holdings()] == [""]
    assert shared.load(one, shared.keys(1)) == [Outcome.OK]
    one.close()
    assert len(shared.settings().clear(None)) == 1
    assert given_server.ask("KEYS", f"{shared.prefix}*") == [f"{shared.prefix}-foreign".encode()]
    assert shared.settings().clear(None) == []


def test_a_namespace_whose_description_was_lost(shared: Any, given_server: GivenServer) -> None:
    tier = shared.engine()
    shared.store(tier, shared.keys(1))
    tier.close()
    given_server.ask("DEL", tier._names.description)
    (kept,) = shared.settings().stored()
    assert kept.holding().chunks == 1
    assert len(shared.settings().clear(None)) == 1
