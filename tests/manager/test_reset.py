"""Reset is honest: it says what it did, and nothing of before comes back."""

from collections.abc import Callable
from threading import Thread
from typing import Literal

import pytest

from kvcascade.manager import ResetReport
from kvcascade.testing import key_for
from kvcascade.types import LookupResult

from .conftest import Stack

KEYS = [key_for(number) for number in range(64)]
Make = Callable[..., Stack]


def test_all_means_all_tiers_and_primary_means_primary(stack: Make) -> None:
    """vllm-project/vllm#57727, #57810: the scope is explicit, and the answer names what was kept."""
    s = stack(tiers=2)
    s.serve("r", KEYS[:4])
    assert s.manager.reset_cache("primary") == ResetReport(cleared=("host",), kept=("t0", "t1"))
    assert s.serve("promoted", KEYS[:4]) == 4
    report = s.manager.reset_cache("all")
    assert report == ResetReport(cleared=("host", "t0", "t1")) and report.ok
    assert s.serve("gone", KEYS[:4]) == 0
    assert not any(s.faults[0].inner.exists(KEYS[4:8]))


def test_a_reset_waits_for_running_jobs_and_leaves_no_pins(stack: Make) -> None:
    """vllm-project/vllm#41956: one cascade and one promotion run, another waits."""
    s = stack(slots=8)
    s.serve("store", KEYS[:4])
    s.serve("push out", KEYS[10:18])
    s.gates[0].shut()
    ctx = s.begin("r")
    s.manager.match_prefix(KEYS[:2], ctx)
    s.step()
    s.gates[0].wait_for("read")
    s.store(ctx, KEYS[20:22])
    s.gates[0].wait_for("write")
    reports: list[ResetReport] = []
    thread = Thread(target=lambda: reports.append(s.manager.reset_cache("primary")))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "both jobs still run"
    s.gates[0].open()
    thread.join(30)
    assert reports[0].ok and reports[0].quarantined == 0
    stats = s.manager.get_stats()
    assert (stats.free_slots, stats.pinned_slots) == (8, 0)
    assert not s.manager.has_pending_work()
    assert s.store(ctx, KEYS[30:38]) == KEYS[30:38]
    s.load(ctx, KEYS[30:38])
    s.finish(ctx)


def test_slots_under_a_copy_of_the_engine_are_quarantined(stack: Make) -> None:
    """A reset between submit and completion: neither is the slot used again, nor does the chunk come back
    (vllm-project/vllm#41956, #48102)."""
    s = stack(slots=8)
    ctx = s.begin("r")
    s.store(ctx, KEYS[:2])
    s.manager.lookup(KEYS[0], ctx)
    s.manager.prepare_load(KEYS[:1], ctx)
    s.offer(ctx, KEYS[2:4])
    report = s.manager.reset_cache()
    assert report.quarantined == 3 and s.manager.get_stats().free_slots == 5
    assert s.manager.match_prefix(KEYS[:4], ctx) == (0, False), "a number, not 'wait'"
    assert s.offer(ctx, KEYS[:4]) is None, "keys under a copy can't be stored again yet"
    offer = s.offer(ctx, KEYS[1:2])
    assert offer is not None and offer.keys == KEYS[1:2]
    s.manager.complete_store(KEYS[2:4], ctx)
    s.manager.complete_load(KEYS[:1], ctx)
    assert s.manager.lookup(KEYS[2], ctx) is LookupResult.MISS
    s.manager.complete_store(offer.keys, ctx)
    s.step()
    assert s.store(ctx, [KEYS[0], *KEYS[2:4]]) == [KEYS[0], *KEYS[2:4]]
    assert s.manager.match_prefix(KEYS[:4], ctx) == (4, False)
    s.finish(ctx)


def test_a_completion_twice_does_nothing(stack: Make) -> None:
    s = stack(slots=4)
    ctx = s.begin("r")
    s.offer(ctx, KEYS[:2])
    s.manager.reset_cache()
    for _ in range(3):
        s.manager.complete_store(KEYS[:2], ctx)
    assert s.manager.get_stats().free_slots == 4
    s.finish(ctx)


def test_a_finished_request_whose_store_a_reset_voids_is_over(stack: Make) -> None:
    s = stack()
    ctx = s.begin("r")
    s.offer(ctx, KEYS[:2])
    s.finish(ctx)
    assert s.manager.requests_known == 1
    s.manager.reset_cache()
    assert s.manager.requests_known == 0 and not s.manager.has_pending_work()
    s.manager.complete_store(KEYS[:2], ctx)


def test_a_late_write_of_the_old_epoch_is_not_served(stack: Make) -> None:
    s = stack(slots=8, concurrency=2)
    ctx = s.begin("r")
    s.gates[0].shut()
    s.store(ctx, KEYS[:2])
    write = s.gates[0].wait_for("write")
    report = s.manager.reset_cache("all", timeout=0.05)
    assert report.failed == {"t0": "a transfer that was begun before has not ended"}
    s.finish(ctx)
    s.epoch = "new"
    meanwhile = s.begin("meanwhile the tier is down")
    assert s.manager.match_prefix(KEYS[:2], meanwhile) == (0, False)
    assert s.offer(meanwhile, KEYS[:2]) is None, "the write still reads their slots"
    s.finish(meanwhile)
    write.release()
    s.gates[0].open()
    write.wait_done()
    s.until(lambda: s.manager.get_stats().tiers[1].up, "the tier does not come back")
    assert not any(s.faults[0].inner.exists(KEYS[:2])), "the late write is gone again"
    for number in range(2):
        assert s.serve(f"r{number}", KEYS[:2]) == (2 if number else 0)
        s.serve(f"push out {number}", KEYS[10:14])
        s.serve(f"push out more {number}", KEYS[14:18])
    assert s.serve("the new bytes, from below", KEYS[:2]) == 2
    assert s.manager.get_stats().tiers[1].hits >= 4


def test_a_tier_that_cannot_be_voided_is_down_until_it_can(stack: Make) -> None:
    s = stack(tiers=2)
    s.serve("r", KEYS[:4])
    s.faults[0].down = True
    report = s.manager.reset_cache()
    assert list(report.failed) == ["t0"] and report.cleared == ("host", "t1") and not report.ok
    assert s.serve("gone", KEYS[:4]) == 0
    assert [tier.up for tier in s.manager.get_stats().tiers] == [True, False, True]
    s.faults[0].down = False

    def back() -> bool:
        s.clock.advance(1.0)
        return s.manager.get_stats().tiers[1].up

    s.until(back, "the tier does not come back")
    assert s.manager.get_stats().tiers[1].chunks == 0
    s.serve("stored again", KEYS[10:14])
    assert s.manager.get_stats().tiers[1].chunks >= 4


@pytest.mark.parametrize("scope", ["all", "primary"])
def test_counters_only_grow(stack: Make, scope: str) -> None:
    """vllm-project/vllm#44008."""
    s = stack()
    s.serve("a", KEYS[:4])
    s.serve("b", KEYS[:4])
    before = s.manager.get_stats()
    s.manager.reset_cache(scope)  # type: ignore[arg-type]
    after = s.manager.get_stats()
    assert after.hits == before.hits == 4 and after.tiers[1].written == before.tiers[1].written == 4


@pytest.mark.parametrize("scope", ["primary", "all"])
def test_one_reset_says_what_is_left_of_a_running_job(stack: Make, scope: Literal["primary", "all"]) -> None:
    """What was in use kept the first call from it, so that a second was needed (vllm-project/vllm#39726): here one
    is enough, and where it can't be done in time the report says what is left."""
    s = stack(slots=8, concurrency=3)
    s.serve("before", KEYS[:2])
    s.gates[0].shut()
    ctx = s.begin("r")
    s.store(ctx, KEYS[2:4])
    held = s.gates[0].wait_for("write")
    s.gates[0]._hold = frozenset()
    report = s.manager.reset_cache(scope, timeout=0.05)
    assert report.cleared == ("host",) and report.quarantined == 2
    assert list(report.failed) == (["t0"] if scope == "all" else [])
    assert report.ok == (scope == "primary")
    asks = s.begin("asks")
    below = LookupResult.MISS if scope == "all" else LookupResult.HIT_PENDING
    assert [s.manager.lookup(key, asks) for key in KEYS[:4]] == [
        below,
        below,
        LookupResult.MISS,
        LookupResult.MISS,
    ]
    s.finish(asks)
    held.release()
    s.finish(ctx)
    s.until(lambda: s.manager.get_stats().tiers[1].up and s.manager.get_stats().free_slots > 5, "it is not done")
    s.settle()
    assert s.manager.reset_cache(scope).quarantined == 0
