"""Whole stacks on one server, as engines have them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.configs import parse_stack
from kvcascade.stack import build
from kvcascade.testing import Driver, forbid_io
from kvcascade.testing.servers.redis import RedisServer
from kvcascade.types import MissReason, Namespace

CHUNK = 4096
Engine = Callable[..., Driver]


@pytest.fixture
def engine(shared: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Makes an engine on the server: host memory of 16 chunks, then the redis tier."""
    monkeypatch.setenv("TEST_URL", shared._settings["url"])  # it may hold a password
    made: list[Driver] = []

    def make(epoch: str = "", weights_version: str = "", **settings: Any) -> Driver:
        host = {"type": "host", "capacity": 17 * CHUNK}
        redis = {
            "type": "redis",
            "url": "${TEST_URL}",
            "prefix": shared.prefix,
            "deadline": "5s",
            "queue": 1.0,
            "breaker": {"failures": 1, "probe_every": "50ms"},
            **settings,
        }
        stack = {"version": 1, "weights_version": weights_version, "log_every": "0s", "tiers": [host, redis]}
        made.append(Driver(build(parse_stack(stack), Namespace.of(model="m"), CHUNK), epoch))
        return made[-1]

    yield make
    for one in made:
        one.manager.shutdown()


def test_what_one_engine_has_stored_the_others_load(shared: Any, engine: Engine) -> None:
    one, two = engine(), engine()
    prompt = shared.keys(*range(8))
    assert one.serve("a", prompt) == 0
    assert two.serve("b", prompt) == 8
    for driver in (one, two):
        driver.check_at_rest()


def test_prompts_that_do_not_fit_into_host_memory_come_back(shared: Any, engine: Engine) -> None:
    one = engine()
    prompts = [shared.keys(*range(first, first + 8)) for first in range(0, 80, 8)]
    assert [one.serve(str(number), prompt) for number, prompt in enumerate(prompts)] == [0] * 10
    assert [one.serve(f"again {number}", prompt) for number, prompt in enumerate(prompts)] == [8] * 10


def test_a_reset_of_one_engine_leaves_the_other(shared: Any, engine: Engine) -> None:
    """vllm-project/vllm#57727."""
    one, two = engine("old"), engine("old")
    prompt = shared.keys(*range(4))
    one.serve("a", prompt)
    assert one.manager.reset_cache("all", "v2").failed == {}
    one.epoch = "v2"
    assert one.serve("b", prompt) == 0
    assert two.serve("c", prompt) == 4
    assert two.manager.reset_cache("all", "v2").failed == {}
    two.epoch = "v2"
    assert two.serve("d", prompt) == 4
    assert engine("v2", weights_version="v2").serve("e", prompt) == 4
    assert engine("?").serve("f", prompt) == 0


def test_a_server_that_dies_costs_the_engine_nothing(tmp_path: Path, engine: Engine, shared: Any) -> None:
    """vllm-project/vllm#56828: once it is known to be down, lookups are misses without any I/O; it comes back by
    itself."""
    with RedisServer(tmp_path) as server:
        driver = engine(url=server.url)
        prompt = shared.keys(*range(4))
        driver.serve("a", prompt)
        server.kill()
        driver.until(lambda: _noticed(driver, shared), "the tier does not go down")
        ctx = driver.begin("while it is down")
        with forbid_io():
            for key in shared.keys(*range(100, 200)):
                assert driver.lookup(ctx, key).name == "MISS"
        driver.finish(ctx)
        assert driver.manager.get_stats().misses[MissReason.TIER_DOWN] >= 100
        server.start()
        driver.until(lambda: driver.manager.get_stats().tiers[1].up, "the tier does not come back")
        prompts = [shared.keys(*range(first, first + 8)) for first in range(300, 340, 8)]
        assert [driver.serve(str(number), prompt) for number, prompt in enumerate(prompts)] == [0] * 5
        assert [driver.serve(f"again {number}", prompt) for number, prompt in enumerate(prompts)] == [8] * 5
        driver.check_at_rest()


def test_a_full_server_keeps_no_engine_from_starting(tmp_path: Path, engine: Engine, shared: Any) -> None:
    """It has no room for the mark of a new namespace: the tier is down until it has."""
    with RedisServer(tmp_path, maxmemory="8mb", maxmemory_policy="noeviction") as server:
        server.fill()
        driver = engine(url=server.url)
        prompt = shared.keys(*range(4))
        assert driver.serve("a", prompt) == 0
        assert driver.serve("again", prompt) == 4
        assert not driver.manager.get_stats().tiers[1].up
        server.empty()
        driver.until(lambda: driver.manager.get_stats().tiers[1].up, "the tier does not come")
        driver.serve("b", shared.keys(*range(10, 14)))
        assert engine(url=server.url).serve("c", shared.keys(*range(10, 14))) == 4
        driver.check_at_rest()


def _noticed(driver: Driver, shared: Any) -> bool:
    """Asks for something new, until the tier is down."""
    number = len(driver.running) + driver.manager.get_stats().lookups + 1000
    driver.serve(f"ask {number}", shared.keys(number))
    return not driver.manager.get_stats().tiers[1].up


def test_a_server_that_comes_later_is_found(tmp_path: Path, engine: Engine, shared: Any) -> None:
    """LMCache/LMCache#1938: an engine hung at its start because the server was not there."""
    server = RedisServer(tmp_path)
    driver = engine(url=server.url)
    prompt = shared.keys(*range(4))
    assert driver.serve("a", prompt) == 0
    assert not driver.manager.get_stats().tiers[1].up
    with server:
        driver.until(lambda: driver.manager.get_stats().tiers[1].up, "the tier does not come")
        driver.serve("b", shared.keys(*range(10, 14)))
        assert engine(url=server.url).serve("c", shared.keys(*range(10, 14))) == 4
        driver.check_at_rest()
