"""Who is known to run: what an engine is using is not taken away, and what one that has ended had to itself is."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import ConfigError
from kvcascade.testing.servers import wait_until
from kvcascade.testing.servers.redis import GivenServer, RedisServer
from kvcascade.tiers.redis.engines import SILENT
from kvcascade.types import Outcome

ENGINE = ["on", ">pw", "~test-*", "+get", "+set", "+exists", "+unlink", "+touch", "+eval", "+role", "+wait"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that shows nothing of its engines: they may not name their connections."""
    with RedisServer(tmp_path_factory.mktemp("guarded")) as server:
        server.ask("ACL", "SETUSER", "engine", *ENGINE)
        yield server


@pytest.fixture(params=["may not name its connections", "has lost its connections"])
def unseen(request: pytest.FixtureRequest, guarded: RedisServer, sharing: Callable[..., Any]) -> tuple[Any, Any]:
    """An engine that has stored two chunks in an epoch of its own, and of which the list of clients says nothing;
    and what tools see with."""
    tools, seen = sharing(url=guarded.url), GivenServer(guarded.url)
    named = request.param == "has lost its connections"
    user = {} if named else {"username": "engine", "password": "pw"}
    tier = tools.engine(**user)
    tier.move_to("")
    tools.store(tier, tools.keys(1, 2))
    assert bool(seen.connections()) is named
    for client in seen.connections():
        guarded.ask("CLIENT", "KILL", "ID", client["id"])
    wait_until(lambda: seen.connections() == [], "its connections are closed")
    return tier, tools


def signs(server: GivenServer | RedisServer, shared: Any) -> list[bytes]:
    found: list[bytes] = server.ask("KEYS", f"{shared.prefix}:*:engine:*")
    return found


def voids(shared: Any) -> dict[bytes, bool]:
    """Whether `gc` would take them, by key."""
    return {chunk.entry.key: chunk.epoch.void for one in shared.settings().stored() for chunk in one.chunks()}


def test_an_engine_that_the_server_does_not_show_is_in_use(unseen: tuple[Any, Any]) -> None:
    tier, tools = unseen
    keys = tools.keys(1, 2)
    (holding,) = tools.settings().holdings()
    assert f"process {os.getpid()} on " in holding.used_by
    assert voids(tools) == dict.fromkeys(keys, False)
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on .* Nothing was removed"):
        tools.settings().clear(None)
    assert tools.load(tier, keys) == [Outcome.OK] * 2
    tier.close()
    assert voids(tools) == dict.fromkeys(keys, True)
    assert len(tools.settings().clear(None)) == 1


def test_what_an_ended_engine_had_to_itself_is_void_beside_others(shared: Any) -> None:
    one, two = shared.engine(), shared.engine()
    for tier, key in ((one, 1), (two, 2)):
        tier.move_to("")
        shared.store(tier, shared.keys(key))
    one.close()
    assert voids(shared) == dict(zip(shared.keys(1, 2), (True, False), strict=True))


def test_where_an_engine_is_known_but_not_its_epoch_nothing_is_void(
    shared: Any, given_server: GivenServer
) -> None:
    """Its sign was evicted, say: only its connections tell of it."""
    tier = shared.engine()
    tier.move_to("")
    shared.store(tier, shared.keys(1))
    given_server.ask("DEL", *signs(given_server, shared))
    assert voids(shared) == {shared.keys(1)[0]: False}
    with pytest.raises(ConfigError, match="in use by process"):
        shared.settings().clear(None)


def test_a_sign_is_renewed_while_the_engine_lives(shared: Any, given_server: GivenServer) -> None:
    """And expires after one that was killed."""
    tier = shared.engine()
    (sign,) = signs(given_server, shared)
    for loss in ("PEXPIRE", "DEL"):
        given_server.ask(loss, sign, *([1000] if loss == "PEXPIRE" else []))
        tier.maintain(1.0)  # it is not yet time
        assert given_server.ask("PTTL", sign) <= 1000
        tier._presence._due = float("-inf")
        tier.maintain(1.0)
        assert 1000 * SILENT - 60_000 < given_server.ask("PTTL", sign) <= 1000 * SILENT
    tier.move_to("v2")
    assert given_server.ask("GET", sign) == tier._era.stamp.hex().encode()
    tier.close()
    assert signs(given_server, shared) == []


def test_a_full_server_does_not_forget_who_runs(tmp_path: Path, sharing: Callable[..., Any]) -> None:
    with RedisServer(tmp_path, maxmemory="8mb", maxmemory_policy="noeviction") as server:
        shared = sharing(url=server.url)
        tier = shared.engine()
        (sign,) = signs(server, shared)
        server.fill()
        server.ask("PEXPIRE", sign, 1000)
        tier._presence._due = float("-inf")
        tier.maintain(1.0)
        assert server.ask("PTTL", sign) > 1000
        silent = shared.engine()
        assert signs(server, shared) == [sign]
        silent.maintain(1.0)
        server.empty()
        silent._presence._due = float("-inf")
        silent.maintain(1.0)
        assert len(signs(server, shared)) == 2


def test_a_fork_has_a_sign_of_its_own(shared: Any, given_server: GivenServer) -> None:
    tier = shared.engine()
    before = signs(given_server, shared)
    pid = os.fork()
    if pid == 0:
        tier.maintain(1.0)
        both = len(signs(given_server, shared)) == 2
        tier.close()
        os._exit(not both)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert signs(given_server, shared) == before
