"""Who is let in and how: passwords, users, TLS, and what is said to those who are not."""

import inspect
import os
import re
import ssl
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.cluster
import redis.connection
import redis.crc
import redis.sentinel

from kvcascade.errors import ConfigError, TierRefused, TierUnavailable
from kvcascade.testing.servers import Proxy, free_port
from kvcascade.testing.servers.redis import RedisCluster, RedisServer, redis_sentinels
from kvcascade.testing.servers.tls import Certificates, TlsFront, make_certificates
from kvcascade.tiers import OpenContext
from kvcascade.tiers.redis.dialling import DRIVER_ERRORS
from kvcascade.types import Outcome

PASSWORD = "pass/wörd:@% "
PAGE = Path(__file__).parents[3] / "docs" / "redis.md"
EVERYWHERE = "on every server"
WRONG = "TOP-SECRET"


def user(*places: str) -> list[str]:
    """Who may do exactly what the page on this tier says of these places."""
    lines = dict(re.split(r" {3,}", line, maxsplit=1) for line in PAGE.read_text().splitlines() if "   +" in line)
    return ["on", ">secret", "~test-*", *(right for place in places for right in lines[place].split())]


def denied(server: RedisServer) -> set[str]:
    """What users were not allowed to do; but for what is of use where it is allowed."""
    entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in server.ask("ACL", "LOG")]
    found = {entry[b"object"].decode() for entry in entries}
    return {word.partition("|")[0] for word in found} - {"client", "config", "info"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with a password, and users."""
    with RedisServer(tmp_path_factory.mktemp("guarded"), requirepass=PASSWORD) as server:
        server.ask("ACL", "SETUSER", "engine", *user(EVERYWHERE))
        server.ask("ACL", "SETUSER", "elsewhere-engine", *user(EVERYWHERE, "in a database other than 0"))
        server.ask("ACL", "SETUSER", "reader", "on", ">secret", "~test-*", "+get", "+exists", "+info")
        server.ask("ACL", "SETUSER", "elsewhere", "on", ">secret", "~other:*", "+@all")
        yield server


def works(shared: Any, **settings: Any) -> bool:
    tier, keys = shared.engine(**settings), shared.keys(1, 2)
    assert shared.store(tier, keys) == [Outcome.OK] * 2
    assert shared.load(tier, keys) == [Outcome.OK] * 2
    assert tier.exists(keys) == [True, True]
    tier.touch(keys)
    tier.maintain(1.0)
    tier.move_to("v2")
    assert tier.exists(keys) == [False, False]
    return True


def test_a_password(guarded: RedisServer, sharing: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    assert works(sharing(url=guarded.url, password=PASSWORD))
    assert works(sharing(url=guarded.url, username="engine", password_file=str(file)))
    quoted = "pass%2Fw%C3%B6rd%3A%40%25%20"
    assert works(sharing(url=f"redis://:{quoted}@127.0.0.1:{guarded.port}/0"))
    assert works(sharing(url=f"redis://engine:secret@127.0.0.1:{guarded.port}/0"))


def test_a_user_that_may_do_what_an_engine_needs(guarded: RedisServer, sharing: Callable[..., Any]) -> None:
    """The rights that the page on this tier names are enough, and needed."""
    guarded.ask("ACL", "LOG", "RESET")
    assert works(sharing(url=guarded.url, username="engine", password="secret"))
    other = f"redis://127.0.0.1:{guarded.port}/1"
    assert works(sharing(url=other, username="elsewhere-engine", password="secret"))
    assert denied(guarded) == set()
    with pytest.raises(ConfigError, match=r"may not do this .*'select'"):
        sharing(url=other, username="engine", password="secret").engine()


def test_a_user_that_may_do_what_an_engine_of_a_cluster_needs(
    cluster: RedisCluster, sharing: Callable[..., Any]
) -> None:
    nodes = "on the nodes of a Cluster"
    who = {"mode": "cluster", "nodes": tuple(cluster.nodes), "username": "engine", "password": "secret"}
    try:
        for server in cluster.servers:
            server.ask("ACL", "SETUSER", "engine", *user(EVERYWHERE))
        with pytest.raises(ConfigError, match=r"may not do this .*cluster"):
            sharing(**who).engine()
        for server in cluster.servers:
            server.ask("ACL", "SETUSER", "engine", *user(EVERYWHERE, nodes))
            server.ask("ACL", "LOG", "RESET")
        assert works(sharing(**who))
        assert [denied(server) for server in cluster.servers] == [set()] * 4
        for server in cluster.servers:
            server.ask("ACL", "SETUSER", "engine", *user(EVERYWHERE, nodes, "on the nodes, with read_replicas"))
        assert works(sharing(**who, read_replicas=True))
        assert [denied(server) for server in cluster.servers] == [set()] * 4
    finally:
        for server in cluster.servers:
            server.ask("ACL", "DELUSER", "engine")


def test_users_that_may_do_what_an_engine_needs_of_sentinels(tmp_path: Path, sharing: Callable[..., Any]) -> None:
    with redis_sentinels(tmp_path) as sentinels:
        for server in sentinels.servers:
            server.ask("ACL", "SETUSER", "engine", *user(EVERYWHERE))
        watched = {
            "mode": "sentinel",
            "nodes": tuple(sentinels.nodes),
            "service": sentinels.service,
            "username": "engine",
            "password": "secret",
            "sentinel_username": "watcher",
        }
        watcher = sentinels.sentinel
        watcher.ask("ACL", "SETUSER", "watcher", *user("on Sentinels (sentinel_username)"))
        assert works(sharing(**watched, sentinel_password="secret"))
        watcher.ask("ACL", "SETUSER", "watcher", *user("on Sentinels, with read_replicas"))
        assert works(sharing(**watched, sentinel_password="secret", read_replicas=True))
        assert [denied(server) for server in (*sentinels.servers, watcher)] == [set()] * 3
        with pytest.raises(ConfigError, match=r"no Sentinel .*: wrong username or password") as caught:
            sharing(**watched, sentinel_password=WRONG).engine()
        assert WRONG not in trace(caught.value)
        watcher.ask("ACL", "SETUSER", "watcher", "-@all")
        with pytest.raises(ConfigError, match="the user may not do this"):
            sharing(**watched, sentinel_password="secret").engine()


# Secrets


def trace(error: BaseException) -> str:
    """All that a log with a trace shows."""
    return "".join(traceback.format_exception(error))


@pytest.mark.parametrize("what", ["nobody listens", "it hangs up", "it is no Sentinel"])
def test_what_is_wrong_with_a_sentinel_shows_no_secret(
    server: RedisServer, sharing: Callable[..., Any], what: str
) -> None:
    """redis-py's own text holds its clients' passwords."""
    with Proxy(server.port) as proxy:
        if what == "nobody listens":
            proxy.refuse()
        elif what == "it hangs up":
            proxy.cut("server", times=None)
        shared = sharing(
            mode="sentinel",
            nodes=(f"127.0.0.1:{proxy.port}",),
            service="main",
            sentinel_username="watcher",
            sentinel_password="TOP-SECRET",
            password="TOP-SECRET-2",
            deadline="500ms",
        )
        with pytest.raises(
            (TierUnavailable, ConfigError), match=r"no Sentinel of .* knows a primary of"
        ) as caught:
            shared.engine()
        (problem,) = shared.settings().probe().problems
        for text in (trace(caught.value), problem):
            assert "TOP-SECRET" not in text
            assert "<redis" not in text
            assert f"127.0.0.1:{proxy.port}" in text


@pytest.mark.parametrize("mode", ["single", "cluster"])
def test_a_server_that_repeats_what_it_was_told_shows_no_secret(
    tmp_path: Path, sharing: Callable[..., Any], mode: str
) -> None:
    """It does with a command that it does not know; AUTH may be hidden."""
    with RedisServer(tmp_path, rename_command=("AUTH", "hidden")) as server:
        place = {"url": server.url} if mode == "single" else {"nodes": (f"127.0.0.1:{server.port}",)}
        shared = sharing(mode=mode, username="me", password="TOP-SECRET", **place)
        with pytest.raises((ConfigError, TierUnavailable)) as caught:
            shared.engine()
        assert "127.0.0.1" in str(caught.value)
        assert "TOP-SECRET" not in trace(caught.value) + str(shared.settings().probe().problems)


def test_a_password_for_a_server_without_one(server: RedisServer, sharing: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"AUTH is refused .*without any password configured"):
        sharing(url=server.url, password="TOP-SECRET").engine()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "a password is required"),
        ({"password": "wrong"}, "wrong username or password"),
        ({"username": "nobody", "password": "secret"}, "wrong username or password"),
        ({"username": "elsewhere", "password": "secret"}, "the user may not do this"),
    ],
)
def test_who_is_not_let_in_is_told_why_and_a_secret_is_not(
    guarded: RedisServer, sharing: Callable[..., Any], settings: dict[str, Any], said: str
) -> None:
    """It can never work, so that the engine does not start."""
    shared = sharing(url=guarded.url, **settings)
    with pytest.raises(ConfigError, match=said) as caught:
        shared.engine()
    assert isinstance(caught.value.__cause__, TierRefused)
    (problem,) = shared.settings().probe().problems
    assert said in problem or "may not use" in problem
    for text in (str(caught.value), repr(caught.value.__cause__), problem, repr(shared.settings())):
        assert "secret" not in text
        assert "wrong'" not in text


def test_a_user_that_may_only_read_is_told_what_is_missing(
    guarded: RedisServer, sharing: Callable[..., Any]
) -> None:
    shared = sharing(url=guarded.url, username="reader", password="secret")
    (problem,) = shared.settings().probe().problems
    assert "may not use SET, UNLINK, TOUCH, EVAL" in problem
    assert f"ACL SETUSER reader +set +unlink +touch +eval ~{shared.prefix}:*" in problem


def test_a_password_file_that_is_not_there(guarded: RedisServer, sharing: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="password_file: /no/such can't be read: No such file"):
        sharing(url=guarded.url, password_file="/no/such").engine()


def test_a_database_that_is_not_there(server: RedisServer, sharing: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="DB index is out of range"):
        sharing(url=f"redis://127.0.0.1:{server.port}/99").engine()
    assert works(sharing(url=f"redis://127.0.0.1:{server.port}/3"))
    assert works(sharing(url=f"{server.unix_url}?db=3"))


# Where nobody is


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://127.0.0.1:{port}/0", "refused; no server listens there"),
        ("redis://no-such-host.invalid/0", "unknown host"),
        ("redis://a-name-that-is-longer-than-the-sixty-three-characters-a-label-may-have/0", "label"),
        ("unix:///no/such.sock", "no such file"),
    ],
)
def test_a_server_that_is_not_there_is_named(sharing: Callable[..., Any], url: str, said: str) -> None:
    shared = sharing(url=url.format(port=free_port()))
    with pytest.raises(TierUnavailable, match=said):
        shared.engine()
    (problem,) = shared.settings().probe().problems
    assert said in problem


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"), "127.0.0.1")


@pytest.fixture
def front(server: RedisServer, certificates: Certificates) -> Iterator[TlsFront]:
    with TlsFront(server.port, certificates) as running:
        yield running


def test_tls_with_a_trusted_certificate(
    sharing: Callable[..., Any], front: TlsFront, certificates: Certificates
) -> None:
    tls = {"ca_file": str(certificates.ca_file)}
    assert works(sharing(url=f"rediss://127.0.0.1:{front.port}/0", tls=tls))


def test_a_certificate_that_is_not_trusted(sharing: Callable[..., Any], front: TlsFront) -> None:
    shared = sharing(url=f"rediss://127.0.0.1:{front.port}/0")
    with pytest.raises(ConfigError, match=r"TLS certificate is not trusted.*see tls\.ca_file"):
        shared.engine()
    assert "not trusted" in shared.settings().probe().problems[0]


def test_the_certificate_of_another_host(
    sharing: Callable[..., Any], front: TlsFront, certificates: Certificates
) -> None:
    tls = {"ca_file": str(certificates.ca_file)}
    url = f"rediss://localhost:{front.port}/0"
    with pytest.raises(ConfigError, match="not trusted: Hostname mismatch"):
        sharing(url=url, tls=tls).engine()
    assert works(sharing(url=url, tls={**tls, "check_hostname": False}))


def test_tls_to_a_server_that_does_not_speak_it(server: RedisServer, sharing: Callable[..., Any]) -> None:
    with pytest.raises(TierUnavailable, match="no TLS connection"):
        sharing(url=f"rediss://127.0.0.1:{server.port}/0", deadline="300ms").engine()


@pytest.mark.parametrize("mode", ["single", "cluster", "sentinel"])
def test_no_tls_to_a_server_that_expects_it(sharing: Callable[..., Any], front: TlsFront, mode: str) -> None:
    place: dict[str, Any] = {"nodes": (f"127.0.0.1:{front.port}",)}
    if mode == "single":
        place = {"url": f"redis://127.0.0.1:{front.port}/0"}
    if mode == "sentinel":
        place["service"] = "main"
    shared = sharing(mode=mode, **place)
    with pytest.raises(TierUnavailable, match=r"expects? TLS"):
        shared.engine()
    (problem,) = shared.settings().probe().problems
    assert "TLS" in problem


def test_a_ca_file_that_is_not_there(sharing: Callable[..., Any], front: TlsFront) -> None:
    shared = sharing(url=f"rediss://127.0.0.1:{front.port}/0", tls={"ca_file": "/no/such.pem"})
    with pytest.raises((ConfigError, TierUnavailable), match=r"tls"):
        shared.engine()


# What redis-py keeps to itself, and the wire needs


def test_what_is_used_of_redis_py_is_there(server: RedisServer, sharing: Callable[..., Any]) -> None:
    """Names that it may change without notice, and what it must not do."""
    tier = sharing(url=server.url).engine()
    with tier._links.pool(tier._settings.locations[0]).lease(time.monotonic() + 60) as wire:
        connection = wire._connection
        assert connection._sock is wire._socket
        assert not isinstance(wire._socket, ssl.SSLSocket)
        assert connection.retry.get_retries() == 0
        assert connection.protocol == 2
        config = getattr(connection, "maint_notifications_config", None)
        assert not (config and config.enabled)
        wire.close()
        assert connection._sock is None
    assert "_wrap_socket_with_ssl" in vars(redis.connection.SSLConnection)
    assert "redis_connect_func" in inspect.signature(redis.connection.AbstractConnection).parameters
    manager = redis.cluster.NodesManager
    assert {"initialize", "close"} <= set(dir(manager))
    assert redis.crc.key_slot(b"123456789") == 12739
    assert {"discover_master", "discover_slaves"} <= set(dir(redis.sentinel.Sentinel))
    assert os.getpid() == connection.pid


def test_every_error_of_redis_py_is_one_of_ours() -> None:
    found = [
        one
        for one in vars(redis.exceptions).values()
        if isinstance(one, type) and one.__module__ == "redis.exceptions"
    ]
    errors = [one for one in found if issubclass(one, Exception)]
    assert len(errors) > 20
    others = {error.__name__ for error in errors if not issubclass(error, DRIVER_ERRORS)}
    assert others <= {"ChildDeadlockedError", "IncorrectPolicyType"}, "those are of parts that are not used"


def test_open_takes_no_longer_than_it_may(sharing: Callable[..., Any]) -> None:
    shared = sharing(url=f"redis://127.0.0.1:{free_port()}/0", deadline="300ms")
    with pytest.raises(TierUnavailable):
        shared.settings().open(OpenContext(shared.namespace, 4096))
