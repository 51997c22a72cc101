"""The policies of stacks, driven by traces: they hold what the plain caches hold, and LHD is worth its name."""

from functools import partial
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.configs import parse_stack
from kvcascade.configs.registry import EVICTION, resolve
from kvcascade.manager.eviction.lhd import LhdPolicy
from kvcascade.replay.caches import CACHES
from kvcascade.replay.compare import models_of
from kvcascade.replay.driven import Driven
from kvcascade.replay.playback import Playback, replay
from kvcascade.replay.simulate import POLICIES, simulate
from kvcascade.replay.simulate_stack import simulate_stack
from kvcascade.replay.trace import BUNDLED, Trace

CHUNK = 4096


@pytest.fixture(scope="module")
def prompts():
    return {name: [request.hash_ids for request in Trace(name)] for name in BUNDLED}


def share(prompts, percent):
    return len({chunk for prompt in prompts for chunk in prompt}) * percent // 100


@pytest.mark.parametrize("policy", CACHES)
@given(
    prompts=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8, unique=True), max_size=60),
    capacity=st.integers(1, 20),
)
def test_a_policy_holds_what_its_plain_cache_holds(policy, prompts, capacity):
    plain, driven = CACHES[policy](capacity), Driven(resolve(EVICTION, policy), capacity)
    for prompt in prompts:
        plain.admit(prompt)
        driven.admit(prompt)
        assert [chunk for chunk in range(31) if chunk in driven] == [
            chunk for chunk in range(31) if chunk in plain
        ]


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
@pytest.mark.parametrize("trace", BUNDLED)
def test_a_policy_finds_what_its_plain_cache_finds(prompts, trace, policy):
    first = prompts[trace][:3000]
    capacity = share(first, 5)
    assert simulate(partial(Driven, resolve(EVICTION, policy)), first, capacity) == POLICIES[policy](
        first, capacity
    )


@pytest.mark.parametrize(
    ("trace", "percent", "ahead"),
    [("conversation", 1, 0.03), ("conversation", 10, 0.005), ("synthetic", 5, 0.004), ("synthetic", 20, 0.015)],
)
def test_lhd_finds_more_than_all_others(prompts, trace, percent, ahead):
    capacity = share(prompts[trace], percent)
    best = max(simulate(cache, prompts[trace], capacity).rate for cache in CACHES.values())
    assert simulate(partial(Driven, LhdPolicy), prompts[trace], capacity).rate > best + ahead


@pytest.mark.parametrize("half", [0, 1])
def test_lhd_learns_from_half_a_trace(prompts, half):
    part = prompts["conversation"][half * 6000 :][:6000]
    capacity = share(part, 2)
    best = max(simulate(cache, part, capacity).rate for cache in CACHES.values())
    assert simulate(partial(Driven, LhdPolicy), part, capacity).rate > best + 0.02


@pytest.mark.parametrize("write", ["through", "on_evict"])
@pytest.mark.parametrize("policy", ["arc", "s3fifo", "lhd"])
def test_a_stack_finds_what_its_simulation_finds(policy, write):
    tiers = [
        {"type": "host", "capacity": 257 * CHUNK, "eviction": policy},
        {"type": "memory", "capacity": 1024 * CHUNK, "eviction": policy, "write": write},
    ]
    stack = parse_stack({"version": 1, "log_every": "0s", "tiers": tiers})
    report = replay(Trace("conversation"), stack, Playback(CHUNK, limit=800))
    first = [request.hash_ids for request in islice(Trace("conversation"), 800)]
    expected = simulate_stack(first, models_of(stack, CHUNK))
    assert report.tally.hit_rate == pytest.approx(expected.rate, abs=0.005)
    assert expected.tiers[1] > 0
