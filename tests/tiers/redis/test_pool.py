"""Connections are few: whatever becomes of one, the next caller can have it, or another one in its place."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvcascade.errors import TierUnavailable
from kvcascade.tiers.redis.pool import Pool
from kvcascade.tiers.redis.settings import Location
from kvcascade.tiers.redis.wire import Wire

LIMIT = 2
HANG = 60.0


class Connection:
    """What a wire needs of redis-py's."""

    def __init__(self) -> None:
        self._sock, self.server = socket.socketpair()
        self.broken = False

    def disconnect(self) -> None:
        self._sock.close()
        self.server.close()
        if self.broken:
            raise OSError("it can't be closed")


class Dials:
    """Makes wires; `takes` seconds of the clock pass meanwhile."""

    def __init__(self) -> None:
        self.now = 0.0
        self.takes = 0.0
        self.made: list[Connection] = []
        self.error: BaseException | None = None
        self.pool = Pool(self.dial, LIMIT, self.clock)

    def clock(self) -> float:
        return self.now

    def dial(self, end: float) -> Wire:
        self.now += self.takes
        if self.error is not None:
            raise self.error
        self.made.append(Connection())
        return Wire(self.made[-1], Location("test"), self.clock)


@pytest.fixture
def dials() -> Iterator[Dials]:
    made = Dials()
    yield made
    made.pool.close()
    assert made.pool.used == 0


def all_can_be_had(dials: Dials) -> bool:
    """At the same time."""
    dials.takes, dials.error = 0.0, None
    with dials.pool.lease(dials.now + 1) as one, dials.pool.lease(dials.now + 1) as two:
        return one is not two and dials.pool.used == LIMIT


def test_a_connection_that_comes_too_late_is_kept_for_the_next(dials: Dials) -> None:
    dials.takes = 2.0
    for _ in range(3 * LIMIT):
        with pytest.raises(TierUnavailable, match="no answer in time"), dials.pool.lease(dials.now + 1):
            pytest.fail("its time is over")
        assert dials.pool.used == 0
        dials.now += 100  # an old one is not trusted, so that the next is made
    dials.now -= 100
    count = len(dials.made)
    with dials.pool.lease(dials.now + 1):
        assert len(dials.made) == count, "it is as good as new"
    assert all_can_be_had(dials)


@pytest.mark.parametrize("error", [TierUnavailable("refused"), OSError("x"), KeyboardInterrupt()])
def test_a_connection_that_can_not_be_made_takes_no_place(dials: Dials, error: BaseException) -> None:
    dials.error = error
    for _ in range(3 * LIMIT):
        with pytest.raises(type(error)), dials.pool.lease(dials.now + 1):
            pytest.fail("there is none")
    assert all_can_be_had(dials)


@pytest.mark.parametrize("broken", [False, True])
def test_what_goes_wrong_with_one_is_the_end_of_it_alone(dials: Dials, broken: bool) -> None:
    for _ in range(3 * LIMIT):
        with pytest.raises((RuntimeError, OSError)), dials.pool.lease(dials.now + 1) as wire:
            dials.made[-1].broken = broken
            raise RuntimeError("x")
        assert wire.closed
    assert len(dials.made) == 3 * LIMIT
    assert all_can_be_had(dials)


def test_who_waits_in_vain_is_told_and_takes_no_place(dials: Dials) -> None:
    with dials.pool.lease(1.0), dials.pool.lease(1.0):
        for _ in range(3):
            with pytest.raises(TierUnavailable, match="all 2 connections are in use"), dials.pool.lease(0.0):
                pytest.fail("there are only two")
        assert dials.pool.used == LIMIT
    assert all_can_be_had(dials)


def test_who_waits_gets_the_one_that_is_given_back(dials: Dials) -> None:
    got: list[Any] = []

    def wait() -> None:
        with dials.pool.lease(HANG) as wire:
            got.append(wire)

    with dials.pool.lease(1.0), dials.pool.lease(1.0) as wire:
        waiter = threading.Thread(target=wait)
        waiter.start()
    waiter.join(HANG)
    assert len(got) == 1
    assert len(dials.made) == LIMIT
    assert not wire.closed
