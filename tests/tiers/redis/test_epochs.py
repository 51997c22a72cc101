"""Epochs on servers that several engines share: who is reset, who stays, what is never served again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import TierUnavailable
from kvcascade.testing.epochs import KEY, EpochConformance
from kvcascade.testing.servers import Proxy, wait_until
from kvcascade.testing.servers.redis import GivenServer, RedisServer
from kvcascade.types import Outcome


class TestEpochs(EpochConformance):
    at_once = 4
    late = None

    def mark(self, tier: Any) -> object:
        return tier._epoch.mark


@pytest.mark.parametrize("fault", ["the server is gone", "a reply is lost"])
def test_a_mark_that_can_not_be_written(spoiled: Any, proxy: Proxy, fault: str) -> None:
    """The tier answers nothing and takes nothing until it can."""
    tier = spoiled.engine(deadline="300ms")
    spoiled.store(tier, [KEY], epoch="old")
    if fault == "the server is gone":
        proxy.refuse()
    else:
        proxy.cut("client", times=None)
    with pytest.raises(TierUnavailable, match="mark of the new epoch can't be written"):
        tier.move_to("v2")
    spoiled.check_silent(tier)
    proxy.heal()
    tier.move_to("v2")
    assert not spoiled.serves(tier, "")
    spoiled.store(tier, [KEY], epoch="v2")
    assert spoiled.serves(spoiled.engine("v2"), "v2")


# Marks that the server loses


def marks(given_server: GivenServer, shared: Any) -> list[bytes]:
    found: list[bytes] = given_server.ask("KEYS", f"{shared.prefix}:*:epoch:*")
    return found


@pytest.mark.parametrize("name", ["", "v1"])
def test_a_mark_that_was_lost_takes_its_chunks_along(shared: Any, given_server: GivenServer, name: str) -> None:
    """Evicted, say. Who runs goes on; who starts can't know whether the epoch was over, and begins empty."""
    one = shared.engine(name)
    shared.store(one, [KEY], epoch="old")
    given_server.ask("DEL", *marks(given_server, shared))
    late = shared.engine(name)
    assert not shared.serves(late, "")
    assert shared.serves(one, "old")
    shared.store(late, [KEY], epoch="late")
    assert shared.serves(shared.engine(name), "late")
    assert shared.serves(one, "old")


def test_a_lost_mark_does_not_bring_back_what_was_void(shared: Any, given_server: GivenServer) -> None:
    """Though an engine that runs still knows the old one."""
    one, other = shared.engine("v1"), shared.engine("v1")
    shared.store(one, [KEY], epoch="old")
    one.move_to("v1")
    given_server.ask("DEL", *marks(given_server, shared))
    shared.store(other, [KEY], epoch="old")
    other.maintain(1.0)
    assert not shared.serves(shared.engine("v1"), "")


def test_a_reset_of_an_engine_whose_mark_was_lost(shared: Any, given_server: GivenServer) -> None:
    one, two = shared.engine("v1"), shared.engine("v1")
    shared.store(one, [KEY], epoch="old")
    given_server.ask("DEL", *marks(given_server, shared))
    one.move_to("v1")
    assert not shared.serves(one, "")
    shared.store(one, [KEY], epoch="new")
    two.move_to("v1")
    assert shared.serves(two, "new")
    assert shared.serves(shared.engine("v1"), "new")


def test_a_flushed_server_begins_anew(ours: Any, server: RedisServer) -> None:
    one = ours.engine()
    ours.store(one, [KEY], epoch="old")
    server.ask("FLUSHALL")
    assert not ours.serves(one, "")
    ours.store(one, [KEY], epoch="old")
    assert ours.serves(one, "old")
    assert not ours.serves(ours.engine(), "")


def test_a_move_waits_for_the_replicas(tmp_path: Path, sharing: Callable[..., Any]) -> None:
    """So that one that takes over knows that the old epoch is void."""
    with RedisServer(tmp_path) as primary, RedisServer(tmp_path) as replica:
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        wait_until(lambda: bool(primary.ask("ROLE")[2]), "the replica is connected")
        shared = sharing(url=primary.url, deadline="400ms")
        tier = shared.engine("v1")
        tier.move_to("v1")
        assert sorted(map(replica.ask, ["GET"] * 2, sorted(marks(primary, shared)))) == sorted(
            map(primary.ask, ["GET"] * 2, sorted(marks(primary, shared)))
        )
        replica.pause()
        with pytest.raises(TierUnavailable, match="0 of 1 replicas have confirmed"):
            tier.move_to("v1")
        assert tier.exists([KEY]) == [False]
        replica.resume()
        tier.move_to("v1")
        assert shared.store(tier, [KEY]) == [Outcome.OK]


def test_who_runs_on_in_an_epoch_that_is_over_says_so_once(
    ours: Any, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    one, private = ours.engine("v1"), ours.engine("v1")
    private.move_to("")
    one._watched = private._watched = float("-inf")
    for _ in range(2):
        one.maintain(1.0)
        private.maintain(1.0)
    again = ours.engine("v1")
    again._watched = float("-inf")
    again.maintain(1.0)
    (line,) = [record.getMessage() for record in caplog.records if "epoch is over" in record.getMessage()]
    assert line.startswith(f"127.0.0.1:{server.port}: ")
