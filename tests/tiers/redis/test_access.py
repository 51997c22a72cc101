"""Who is let in and how: passwords, users, TLS, and what is said to those who are not."""

import os
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.cluster
import redis.crc
import redis.sentinel

from kvcascade.errors import ConfigError, TierRefused, TierUnavailable
from kvcascade.testing.servers import free_port
from kvcascade.testing.servers.redis import RedisServer
from kvcascade.testing.servers.tls import Certificates, TlsFront, make_certificates
from kvcascade.tiers import OpenContext
from kvcascade.tiers.redis.dialling import DRIVER_ERRORS
from kvcascade.types import Outcome

PASSWORD = "pass/wörd:@% "


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with a password, and users."""
    with RedisServer(tmp_path_factory.mktemp("guarded"), requirepass=PASSWORD) as server:
        rights = ["+get", "+set", "+exists", "+unlink", "+touch", "+eval", "+role", "+wait"]
        server.ask("ACL", "SETUSER", "engine", "on", ">secret", "~test-*", *rights)
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
    """The rights that the page on this tier names are enough."""
    assert works(sharing(url=guarded.url, username="engine", password="secret"))


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
