"""Whole stacks on one bucket, as engines have them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.configs import parse_stack
from kvcascade.stack import build
from kvcascade.testing import Driver, forbid_io
from kvcascade.testing.servers.s3 import rclone
from kvcascade.types import LookupResult, MissReason, Namespace

CHUNK = 4096
Engine = Callable[..., Driver]


@pytest.fixture
def engine(one_shared: Any) -> Iterator[Engine]:
    """Makes an engine on the bucket: host memory of 16 chunks, then the s3 tier."""
    made: list[Driver] = []

    def make(epoch: str = "", weights_version: str = "", **settings: Any) -> Driver:
        host = {"type": "host", "capacity": 17 * CHUNK}
        s3 = {
            "type": "s3",
            "bucket": one_shared.bucket,
            "prefix": one_shared.prefix,
            "endpoint_url": one_shared.endpoint,
            "create_bucket": True,
            "promote": "always",
            "deadline": "5s",
            "queue": 1.0,
            "breaker": {"failures": 1, "probe_every": "50ms"},
            **settings,
        }
        stack = {"version": 1, "weights_version": weights_version, "log_every": "0s", "tiers": [host, s3]}
        made.append(Driver(build(parse_stack(stack), Namespace.of(model="m"), CHUNK), epoch))
        return made[-1]

    yield make
    for one in made:
        one.manager.shutdown()


def test_what_one_engine_has_stored_the_others_load(one_shared: Any, engine: Engine) -> None:
    one, two = engine(), engine()
    prompt = one_shared.keys(*range(8))
    assert one.serve("a", prompt) == 0
    assert two.serve("b", prompt) == 8
    for driver in (one, two):
        driver.check_at_rest()


def test_prompts_that_do_not_fit_into_host_memory_come_back(one_shared: Any, engine: Engine) -> None:
    one = engine()
    prompts = [one_shared.keys(*range(first, first + 8)) for first in range(0, 80, 8)]
    assert [one.serve(str(number), prompt) for number, prompt in enumerate(prompts)] == [0] * 10
    assert [one.serve(f"again {number}", prompt) for number, prompt in enumerate(prompts)] == [8] * 10


def test_by_default_a_chunk_moves_up_at_its_second_use(one_shared: Any, engine: Engine) -> None:
    """What is there counts as a use where it is asked for; the promotion is worth its cost from the second on."""
    engine().serve("a", one_shared.keys(*range(4)))
    one = engine(promote={"after": 2})
    assert one.serve("b", one_shared.keys(*range(4))) == 0
    for first in range(10, 42, 4):
        one.serve(f"push out {first}", one_shared.keys(*range(first, first + 4)))
    assert one.serve("c", one_shared.keys(*range(4))) == 4


def test_a_reset_of_one_engine_leaves_the_other(one_shared: Any, engine: Engine) -> None:
    """vllm-project/vllm#57727."""
    one, two = engine("old"), engine("old")
    prompt = one_shared.keys(*range(4))
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


def test_a_warm_engine_needs_not_ask(one_shared: Any, engine: Engine) -> None:
    """What the namespace's list has told is a hit at once, without a probe."""
    prompt = one_shared.keys(*range(4))
    engine().serve("a", prompt)
    one = engine(warm=True)
    one.until(lambda: one.manager.get_stats().tiers[1].chunks == 4, "the list is not told")
    ctx = one.begin("b")
    assert [one.manager.lookup(key, ctx) for key in prompt] == [LookupResult.HIT_PENDING] * 4
    one.finish(ctx)
    assert one.serve("c", prompt) == 4


def test_what_is_removed_outside_is_a_miss_once_and_heals(one_shared: Any, engine: Engine) -> None:
    """LMCache/LMCache#4745: the first that loads it finds out, for all."""
    prompt = one_shared.keys(*range(4))
    engine().serve("a", prompt)
    two = engine()
    two.serve("other", one_shared.keys(9))
    ctx = two.begin("b")
    two.until(lambda: two.manager.get_stats().tiers[1].chunks >= 1, "nothing is known")
    for name in one_shared.names():
        if name.endswith(prompt[2].hex()):
            one_shared.client().delete_object(Bucket=one_shared.bucket, Key=name)
    assert two.match(ctx, prompt).hits == 2
    two.finish(ctx)
    assert two.serve("c", prompt) == 2
    assert engine().serve("d", prompt) == 4


def test_refusals_are_failures_and_take_the_tier_down(faulty: Any, engine: Engine) -> None:
    """LMCache/LMCache#4483: 403 was "not there", so that everything was uploaded again and again."""
    shared, faults = faulty
    driver = engine(breaker={"failures": 3, "probe_every": "50ms"})
    driver.serve("a", shared.keys(1))
    faults.answer(403, "AccessDenied", times=10_000)
    driver.until(lambda: _noticed(driver, shared), "the tier does not go down")
    stats = driver.manager.get_stats()
    assert stats.misses[MissReason.TIER_DOWN] > 0
    faults.heal()
    driver.until(lambda: driver.manager.get_stats().tiers[1].up, "the tier does not come back")
    driver.check_at_rest()


def test_a_store_that_dies_costs_the_engine_nothing(tmp_path: Path, engine: Engine, one_shared: Any) -> None:
    """vllm-project/vllm#56828: once it is known to be down, lookups are misses without any I/O; it comes back by
    itself."""
    store = rclone(tmp_path)
    assert store.server is not None
    with store.server as server:
        driver = engine(endpoint_url=store.endpoint)
        driver.serve("a", one_shared.keys(*range(4)))
        server.kill()
        driver.until(lambda: _noticed(driver, one_shared), "the tier does not go down")
        ctx = driver.begin("while it is down")
        with forbid_io():
            for key in one_shared.keys(*range(100, 200)):
                assert driver.lookup(ctx, key).name == "MISS"
        driver.finish(ctx)
        assert driver.manager.get_stats().misses[MissReason.TIER_DOWN] >= 100
        server.start()
        one_shared.engine(endpoint_url=store.endpoint).close()  # the bucket went with the memory of the server
        driver.until(lambda: driver.manager.get_stats().tiers[1].up, "the tier does not come back")
        prompt = one_shared.keys(*range(300, 304))
        driver.serve("b", prompt)
        fresh = engine(endpoint_url=store.endpoint)  # the marks went as well: what was before stays out of reach
        assert fresh.serve("c", prompt) == 0
        driver.manager.reset_cache("primary")
        assert driver.serve("d", prompt) == 4
        assert engine(endpoint_url=store.endpoint).serve("e", prompt) == 4  # as the fresh one has stored it
        driver.check_at_rest()


def test_a_store_that_comes_later_is_found(tmp_path: Path, engine: Engine, one_shared: Any) -> None:
    """LMCache/LMCache#1938: an engine hung at its start because the server was not there."""
    store = rclone(tmp_path)
    driver = engine(endpoint_url=store.endpoint)
    assert driver.serve("a", one_shared.keys(*range(4))) == 0
    assert not driver.manager.get_stats().tiers[1].up
    assert store.server is not None
    with store.server:
        driver.until(lambda: driver.manager.get_stats().tiers[1].up, "the tier does not come")
        driver.serve("b", one_shared.keys(*range(10, 14)))
        assert engine(endpoint_url=store.endpoint).serve("c", one_shared.keys(*range(10, 14))) == 4
        driver.check_at_rest()


def _noticed(driver: Driver, shared: Any) -> bool:
    """Asks for something new, until the tier is down."""
    number = driver.manager.get_stats().lookups + 1000
    driver.serve(f"ask {number}", shared.keys(number))
    return not driver.manager.get_stats().tiers[1].up
