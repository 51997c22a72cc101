"""Nothing of before a reset is moved, and nobody waits for what it overtook."""

from collections.abc import Callable

from kvcascade.testing import LatencyTier, key_for
from kvcascade.types import LookupResult

from .conftest import CHUNK, Stack

KEYS = [key_for(number) for number in range(64)]
Make = Callable[..., Stack]


def test_what_a_tier_holds_is_not_moved_down_while_it_is_being_voided(stack: Make) -> None:
    """The tier above is down until its mark is written; below, its old chunks would be of the new epoch."""
    s = stack(
        slots=16,
        tiers=2,
        each=[{"write": "through", "capacity": 8 * CHUNK, "concurrency": 3}, {"write": "on_evict"}],
        host={"staging": 5 * 4096},
    )
    s.gates[0]._hold = frozenset({"move_to"})
    ctx = s.begin("r")
    s.store(ctx, KEYS[:8])
    s.until(lambda: s.manager.get_stats().tiers[1].written == 8, "the cascade does not end")
    s.gates[0].shut()
    assert list(s.manager.reset_cache("all", timeout=0.05).failed) == ["t0"]
    s.epoch = "new"
    s.finish(ctx)
    for _ in range(20):
        s.step()
        s.settle()
    assert not list(s.faults[1].inner.entries())
    s.gates[0].open()
    s.until(lambda: s.manager.get_stats().tiers[1].up, "the tier does not come back")
    assert s.serve("nothing of before", KEYS[:8]) == 0


def test_a_key_is_probed_again_after_a_reset_that_overtook_its_probe(stack: Make) -> None:
    s = stack(slots=8, shared=[0], deadline="2s", concurrency=3)
    s.gates[0].shut()
    ctx = s.begin("r")
    s.manager.match_prefix(KEYS[:4], ctx)
    s.step()
    s.gates[0].wait_for("exists")
    s.manager.reset_cache("all", timeout=0.05)
    s.finish(ctx)
    s.gates[0].open()
    s.until(lambda: s.manager.get_stats().tiers[1].up, "the tier does not come back")
    s.later(60)
    ctx = s.begin("asks anew")
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.RETRY
    assert s.lookup(ctx, KEYS[0]) is LookupResult.MISS, "without a moment's wait on the clock"
    s.finish(ctx)


def test_a_probe_that_hangs_keeps_only_those_waiting_who_asked_first(stack: Make) -> None:
    s = stack(slots=8, shared=[0], deadline="2s", concurrency=3)
    s.gates[0].shut()
    first = s.begin("first")
    s.manager.lookup(KEYS[0], first)
    s.step()
    hung = s.gates[0].wait_for("exists")
    s.gates[0]._opened = True
    s.later(2.1)
    assert s.manager.lookup(KEYS[0], first) is LookupResult.MISS
    second = s.begin("second")
    assert s.manager.lookup(KEYS[0], second) is LookupResult.MISS, "known to be unknown, for a second"
    s.later(1.1)
    third = s.begin("third")
    assert s.lookup(third, KEYS[0]) is LookupResult.MISS, "by a probe of its own"
    for ctx in (first, second, third):
        s.finish(ctx)
    hung.release()


def test_moves_leave_a_tier_alone_that_is_down(stack: Make) -> None:
    s = stack(
        slots=16,
        tiers=2,
        each=[{"write": "through", "capacity": 8 * CHUNK}, {"write": "on_evict"}],
        host={"staging": 5 * 4096},
        breaker={"failures": 3, "probe_every": "5s"},
    )
    ctx = s.begin("r")
    s.store(ctx, KEYS[:8])
    s.until(lambda: s.manager.get_stats().tiers[1].written == 8, "the cascade does not end")
    s.manager.reset_cache("primary")
    s.faults[0].down = True
    for _ in range(100):
        s.later(0.01)
        s.settle()
    assert sum(call.verb == "read" for call in s.gates[0].calls) < 10
    s.faults[0].down = False
    s.later(5.1)
    s.until(lambda: s.manager.get_stats().tiers[1].up, "the tier does not come back")
    s.finish(ctx)


def test_a_reset_that_finds_another_one_under_way_is_done_when_it_says_so(stack: Make) -> None:
    """The mark that the first one was still writing was taken for a transfer of before."""
    s = stack(slots=8, shared=[0], concurrency=3)
    s.faults[0].inner = LatencyTier(s.faults[0].inner, {"move_to": 0.05})
    ctx = s.begin("r")
    s.gates[0].shut()
    s.store(ctx, KEYS[:2])
    s.finish(ctx)
    s.gates[0].wait_for("write")
    assert list(s.manager.reset_cache("all", timeout=0.05).failed) == ["t0"]
    s.step()
    s.gates[0].open()
    assert s.manager._chain.levels[0].lane.wait(30.0)
    assert s.manager.reset_cache("all").ok
    assert s.manager.get_stats().tiers[1].up
