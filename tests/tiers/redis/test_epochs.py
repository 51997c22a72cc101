"""Epochs on servers that several engines share: who is reset, who stays, what is never served again."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import TierUnavailable
from kvcascade.testing import buffer, bytes_for, key_for
from kvcascade.testing.servers import Proxy, wait_until
from kvcascade.testing.servers.redis import GivenServer, RedisServer
from kvcascade.types import Outcome

KEY = key_for(1)
HANG = 60.0


def holds(shared: Any, tier: Any, epoch: str) -> bool:
    """Whether the chunk that was stored for `epoch` is served; that of another one never is."""
    there = tier.exists([KEY]) == [True]
    (outcome,) = shared.load(tier, [KEY], epoch=epoch)
    assert outcome == (Outcome.OK if there else Outcome.MISSING)
    return there


@pytest.mark.parametrize("start", ["", "v1"])
@pytest.mark.parametrize("target", ["", "v2"])
def test_a_reset_moves_one_engine_and_leaves_the_others(shared: Any, start: str, target: str) -> None:
    """vllm-project/vllm#57727: after it, nothing old is served to the one, and all of it to the others."""
    one, other = shared.engine(start), shared.engine(start)
    shared.store(other, [KEY], epoch="old")
    assert holds(shared, one, "old")
    one.move_to(target)
    assert not holds(shared, one, "")
    assert list(one.entries()) == []
    assert holds(shared, other, "old")
    shared.store(one, [KEY], epoch="new")
    assert holds(shared, one, "new")
    assert holds(shared, other, "old")


@pytest.mark.parametrize("start", ["", "v1"])
@pytest.mark.parametrize("target", ["", "v2"])
def test_a_restart_after_a_reset_finds_nothing_old(shared: Any, start: str, target: str) -> None:
    """Its stack file does not know of the reset. Others that still run in the old epoch go on to store there."""
    one, other = shared.engine(start), shared.engine(start)
    shared.store(one, [KEY], epoch="old")
    one.move_to(target)
    one.close()
    shared.store(other, [KEY], epoch="old")
    again = shared.engine(start)
    assert not holds(shared, again, "")
    assert holds(shared, other, "old")
    shared.store(again, [KEY], epoch="again")
    again.close()
    assert holds(shared, shared.engine(start), "again")  # the next restart is warm


def test_engines_that_name_the_same_weights_share(shared: Any) -> None:
    one, two, three = shared.engine(), shared.engine("v1"), shared.engine("v2")
    one.move_to("v2")
    shared.store(one, [KEY], epoch="v2")
    assert holds(shared, three, "v2")
    assert not holds(shared, two, "")
    two.move_to("v2")
    assert holds(shared, two, "v2")
    one.close()
    assert holds(shared, shared.engine("v2"), "v2")


def test_nobody_joins_an_engine_that_was_reset_without_a_name(shared: Any) -> None:
    one, two = shared.engine(), shared.engine()
    one.move_to("")
    shared.store(one, [KEY], epoch="one")
    two.move_to("")
    assert not holds(shared, two, "")
    for epoch in ("", "v1"):
        assert not holds(shared, shared.engine(epoch), "")
    one.close()
    assert not holds(shared, shared.engine(), "")


def test_a_reset_to_the_same_name_is_a_reset(shared: Any) -> None:
    """Engines that name it and are reset as well share what comes then."""
    one, two, late = shared.engine("v1"), shared.engine("v1"), shared.engine("v1")
    shared.store(one, [KEY], epoch="old")
    one.move_to("v1")
    assert not holds(shared, one, "")
    shared.store(one, [KEY], epoch="new")
    assert holds(shared, two, "old")
    two.move_to("v1")
    assert holds(shared, two, "new")
    assert holds(shared, late, "old")
    assert holds(shared, shared.engine("v1"), "new")


def test_weights_that_come_back_begin_empty(shared: Any) -> None:
    one = shared.engine("v1")
    shared.store(one, [KEY], epoch="first")
    one.move_to("v2")
    one.move_to("v1")
    assert not holds(shared, one, "")


def test_two_engines_that_leave_the_same_epoch_at_once_meet_again(shared: Any) -> None:
    """All engines of a deployment are reset to the same weights, again and again, at the same time."""
    engines = [shared.engine("v1") for _ in range(4)]
    start = threading.Barrier(4)
    entered: list[list[str]] = [[] for _ in engines]

    def engine(who: int) -> None:
        for _ in range(20):
            start.wait(HANG)
            engines[who].move_to("v1")
            entered[who].append(engines[who]._epoch.mark)

    threads = [threading.Thread(target=engine, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert entered[0] == entered[1] == entered[2] == entered[3]
    assert len(set(entered[0])) == 20


class HeldBatch(list):  # type: ignore[type-arg]
    """Buffers, of which the second is handed over when it is released."""

    def __init__(self, buffers: list[memoryview]) -> None:
        super().__init__(buffers)
        self.reached, self.released = threading.Event(), threading.Event()

    def __iter__(self) -> Any:
        yield self[0]
        self.reached.set()
        assert self.released.wait(HANG)
        yield from self[1:]


@pytest.mark.parametrize("target", ["", "v2"])
def test_a_late_write_of_the_old_epoch_is_not_seen(shared: Any, target: str) -> None:
    """Neither by this engine nor by one that has named the new weights before."""
    tier = shared.engine()
    keys = shared.keys(1, 2, 3)
    batch = HeldBatch([memoryview(bytes_for(key, shared.chunk)) for key in keys])
    writer = threading.Thread(target=lambda: tier.write(keys, batch))
    writer.start()
    assert batch.reached.wait(HANG)
    tier.move_to(target)
    batch.released.set()
    writer.join(HANG)
    assert tier.exists(keys) == [False] * 3
    assert shared.engine(target).exists(keys) == [False] * 3


def test_a_late_read_of_the_old_epoch(shared: Any) -> None:
    tier = shared.engine()
    keys = shared.keys(1, 2)
    shared.store(tier, keys)
    batch = HeldBatch([buffer(shared.chunk) for _ in keys])
    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.extend(tier.read(keys, batch)))
    reader.start()
    assert batch.reached.wait(HANG)
    tier.move_to("v2")
    batch.released.set()
    reader.join(HANG)
    assert outcomes == [Outcome.MISSING] * 2


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
    assert tier.exists([KEY]) == [False]
    assert spoiled.load(tier, [KEY]) == [Outcome.MISSING]
    assert spoiled.store(tier, [KEY]) == [Outcome.REFUSED]
    assert tier.delete([KEY]) == [Outcome.MISSING]
    assert list(tier.entries()) == []
    tier.touch([KEY])
    with pytest.raises(TierUnavailable):
        tier.move_to("v2")
    proxy.heal()
    tier.move_to("v2")
    assert not holds(spoiled, tier, "")
    spoiled.store(tier, [KEY], epoch="v2")
    assert holds(spoiled, spoiled.engine("v2"), "v2")


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
    assert not holds(shared, late, "")
    assert holds(shared, one, "old")
    shared.store(late, [KEY], epoch="late")
    assert holds(shared, shared.engine(name), "late")
    assert holds(shared, one, "old")


def test_a_lost_mark_does_not_bring_back_what_was_void(shared: Any, given_server: GivenServer) -> None:
    """Though an engine that runs still knows the old one."""
    one, other = shared.engine("v1"), shared.engine("v1")
    shared.store(one, [KEY], epoch="old")
    one.move_to("v1")
    given_server.ask("DEL", *marks(given_server, shared))
    shared.store(other, [KEY], epoch="old")
    other.maintain(1.0)
    assert not holds(shared, shared.engine("v1"), "")


def test_a_reset_of_an_engine_whose_mark_was_lost(shared: Any, given_server: GivenServer) -> None:
    one, two = shared.engine("v1"), shared.engine("v1")
    shared.store(one, [KEY], epoch="old")
    given_server.ask("DEL", *marks(given_server, shared))
    one.move_to("v1")
    assert not holds(shared, one, "")
    shared.store(one, [KEY], epoch="new")
    two.move_to("v1")
    assert holds(shared, two, "new")
    assert holds(shared, shared.engine("v1"), "new")


def test_a_flushed_server_begins_anew(ours: Any, server: RedisServer) -> None:
    one = ours.engine()
    ours.store(one, [KEY], epoch="old")
    server.ask("FLUSHALL")
    assert not holds(ours, one, "")
    ours.store(one, [KEY], epoch="old")
    assert holds(ours, one, "old")
    assert not holds(ours, ours.engine(), "")


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
