"""Whole stacks on one directory, as engines have them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcascade.configs import parse_stack
from kvcascade.stack import build
from kvcascade.testing import Driver, GateTier
from kvcascade.tiers import Tier
from kvcascade.types import Namespace

CHUNK = 4096
Engine = Callable[..., Driver]


@pytest.fixture
def engine(shared: Any) -> Iterator[Engine]:
    """Makes an engine on the directory: host memory of 16 chunks, then the fs tier."""
    made: list[Driver] = []

    def make(epoch: str = "", weights_version: str = "", wrap: Callable[[Tier], Tier] | None = None) -> Driver:
        host = {"type": "host", "capacity": 17 * CHUNK}
        fs = {"type": "fs", "path": str(shared.path), "queue": 1.0}
        settings = parse_stack(
            {"version": 1, "weights_version": weights_version, "log_every": "0s", "tiers": [host, fs]}
        )
        manager = build(
            settings, Namespace.of(model="m"), CHUNK, wrap=lambda _, tier: wrap(tier) if wrap else tier
        )
        made.append(Driver(manager, epoch))
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


def test_a_transfer_that_outlives_a_reset_reaches_nobody(shared: Any, engine: Engine) -> None:
    """It brings bytes of the old weights when the tier is in the new epoch already, which others share by its
    name."""
    gates: list[GateTier] = []

    def gated(tier: Tier) -> Tier:
        gates.append(GateTier(tier))
        return gates[-1]

    one, prompt = engine("old", wrap=gated), shared.keys(*range(4))
    ctx = one.begin("a")
    one.store(ctx, prompt)
    one.step()
    held = gates[0].wait_for("write")
    report = one.manager.reset_cache("all", "v2", timeout=0.2)
    assert "fs" in report.failed
    two = engine("v2", weights_version="v2")
    assert two.serve("a", []) == 0
    held.release()
    gates[0].open()
    one.finish(ctx)
    one.until(lambda: one.manager.get_stats().tiers[1].up, "the tier does not come back")
    one.epoch = "v2"
    assert two.serve("b", prompt) == 0
    assert one.serve("c", prompt) == 4
