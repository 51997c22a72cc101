"""The verbs of the manager in the order in which engines call them."""

from collections.abc import Callable
from threading import Thread

import pytest

from kvcascade.errors import ClosedError, ProtocolError
from kvcascade.testing import bytes_for, key_for
from kvcascade.types import LookupResult, MissReason, PrefixMatch, RequestContext

from .conftest import Stack

KEYS = [key_for(number) for number in range(64)]
Make = Callable[..., Stack]


def test_a_store_is_a_hit_when_it_has_completed_and_not_before(stack: Make) -> None:
    """Findable means readable (vllm-project/vllm#53498)."""
    s = stack()
    ctx = s.begin("r")
    offer = s.offer(ctx, KEYS[:2])
    assert offer is not None and offer.keys == KEYS[:2]
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.HIT_PENDING
    s.manager.complete_store(KEYS[:2], ctx)
    assert s.manager.match_prefix(KEYS[:3], ctx) == PrefixMatch(2, pending=False)
    s.load(ctx, KEYS[:2])
    s.finish(ctx)


def test_a_failed_store_is_a_miss_and_frees_its_slot(stack: Make) -> None:
    """vllm-project/vllm#39732."""
    s = stack(slots=4)
    ctx = s.begin("r")
    s.offer(ctx, KEYS[:4])
    s.manager.complete_store(KEYS[:4], ctx, success=False)
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.MISS
    assert s.store(ctx, KEYS[4:8]) == KEYS[4:8]
    s.finish(ctx)
    s.settle()
    assert not [call for call in s.gates[0].calls if call.verb == "write" and KEYS[0] in call.keys]


def test_keys_that_are_there_or_on_their_way_are_not_granted_again(stack: Make) -> None:
    s = stack()
    first, second = s.begin("r1"), s.begin("r2")
    s.store(first, KEYS[:2])
    s.offer(first, KEYS[2:3])
    offer = s.manager.prepare_store([*KEYS[:4], KEYS[3]], second)
    assert offer is not None and offer.keys == [KEYS[3]]
    s.write(offer)
    s.manager.complete_store(KEYS[2:3], first)
    s.manager.complete_store(KEYS[3:4], second)
    s.finish(first)
    s.finish(second)


def test_what_is_evicted_from_primary_is_promoted_from_below(stack: Make) -> None:
    """Every chunk of three prompts that exceed primary is found again (kvcache-ai/Mooncake#3331)."""
    s = stack(slots=16)
    prompts = [KEYS[:8], KEYS[8:16], KEYS[16:24]]
    for number, prompt in enumerate(prompts):
        assert s.serve(f"store {number}", prompt) == 0
    for number, prompt in enumerate(prompts):
        assert s.serve(f"load {number}", prompt) == 8
    host, below = s.manager.get_stats().tiers
    assert host.hits + below.hits == 24 and below.hits >= 8
    assert host.misses[MissReason.EVICTED] >= 8 and below.misses.total() == 3


def test_a_chain_of_any_length_serves_from_its_lowest_tier_and_fills_those_between(stack: Make) -> None:
    s = stack(slots=8, tiers=3)
    s.serve("store", KEYS[:4])
    s.serve("push out", KEYS[4:12])
    for upper in s.faults[:2]:
        upper.inner.delete(KEYS[:4])
    assert s.serve("the upper tiers have lost them", KEYS[:4]) == 4
    s.settle()
    assert [all(tier.inner.exists(KEYS[:4])) for tier in s.faults] == [True, True, True]


def test_a_cascade_goes_before_the_finish_and_the_finish_after_the_last_store(stack: Make) -> None:
    """vllm-project/vllm#45823, #46284: a store that completes after the engine's finish still cascades."""
    s = stack()
    told: list[tuple[str, object]] = []
    lane = s.manager._chain.levels[0].lane
    submit, finish = lane.submit, lane.finish
    lane.submit = lambda job: (told.append(("submit", list(job.keys))), submit(job))[1]  # type: ignore[method-assign]
    lane.finish = lambda owner: (told.append(("finish", owner)), finish(owner))[1]  # type: ignore[method-assign]
    ctx = s.begin("r")
    s.offer(ctx, KEYS[:2])
    s.finish(ctx)
    assert told == [] and s.manager.has_pending_work()
    s.manager.complete_store(KEYS[:2], ctx)
    assert told == [("submit", KEYS[:2]), ("finish", "r")]
    s.settle()
    assert s.manager.requests_known == 0

    told.clear()
    ctx = s.begin("r2")
    s.offer(ctx, KEYS[4:6])
    s.finish(ctx)
    s.manager.complete_store(KEYS[4:6], ctx, success=False)
    assert told == [("finish", "r2")]


def test_an_id_may_be_used_again_while_the_first_request_of_it_is_ending(stack: Make) -> None:
    s = stack()
    old = s.begin("r")
    s.offer(old, KEYS[:1])
    s.finish(old)
    new = s.begin("r")
    s.offer(new, KEYS[1:2])
    s.manager.complete_store(KEYS[:2], new)
    s.load(new, KEYS[:2])
    s.finish(new)


def test_loads_and_stores_of_a_request_end_in_any_order_after_its_finish(stack: Make) -> None:
    """vllm-project/vllm#56089."""
    for number, order in enumerate((("load", "store"), ("store", "load"))):
        s = stack()
        ctx = s.begin("r")
        s.store(ctx, KEYS[:2])
        s.manager.lookup(KEYS[0], ctx)
        s.manager.prepare_load(KEYS[:1], ctx)
        s.offer(ctx, KEYS[2:3])
        s.finish(ctx)
        for what in order:
            assert s.manager.requests_known == 1, number
            if what == "load":
                s.manager.complete_load(KEYS[:1], ctx)
            else:
                s.manager.complete_store(KEYS[2:3], ctx)
        assert s.manager.requests_known == 0


def test_has_pending_work_exactly_while_a_job_has_not_been_reported(stack: Make) -> None:
    """vllm-project/vllm#45595: and no step waits for it."""
    s = stack()
    s.gates[0].shut()
    ctx = s.begin("r")
    s.store(ctx, KEYS[:1])
    s.finish(ctx)
    for _ in range(20):
        assert s.manager.has_pending_work()
        s.step()
    other = s.begin("a new request is served meanwhile")
    assert s.manager.lookup(KEYS[0], other) is LookupResult.HIT
    s.load(other, KEYS[:1])
    s.finish(other)
    s.gates[0].wait_for("write").release()
    s.settle()
    assert not s.manager.has_pending_work()


def test_callers_mistakes_are_named(stack: Make) -> None:
    s = stack()
    stranger = RequestContext("stranger")
    with pytest.raises(ProtocolError, match="lookup: request 'stranger' is not running"):
        s.manager.lookup(KEYS[0], stranger)
    ctx = s.begin("r")
    with pytest.raises(ProtocolError, match="is running already"):
        s.manager.on_new_request(ctx)
    with pytest.raises(ProtocolError, match="is not HIT"):
        s.manager.prepare_load(KEYS[:1], ctx)
    s.manager.complete_load(KEYS[:1], ctx)
    s.manager.complete_store(KEYS[:1], ctx)
    s.finish(ctx)
    with pytest.raises(ProtocolError, match="on_request_finished"):
        s.manager.on_request_finished(ctx)


def test_after_shutdown_every_verb_says_so(stack: Make) -> None:
    s = stack()
    s.serve("r", KEYS[:2])
    s.manager.shutdown()
    s.manager.shutdown()
    with pytest.raises(ClosedError):
        s.manager.on_new_request(RequestContext("late"))
    s.check_at_rest = lambda: None  # type: ignore[method-assign]  # the fixture's own check steps


def test_every_chunk_stored_by_a_long_request_is_found_again(stack: Make) -> None:
    """217 chunks, four a step and then one: no hole, nothing of the backlog dropped (vllm-project/vllm#53498)."""
    s = stack(slots=256)
    keys = [key_for(number) for number in range(217)]
    ctx = s.begin("r")
    for start in range(0, 200, 4):
        s.store(ctx, keys[start : start + 4])
        s.settle()
    for key in keys[200:]:
        s.store(ctx, [key])
        s.settle()
    s.finish(ctx)
    s.settle()
    assert s.manager.get_stats().tiers[1].chunks == 217
    assert s.serve("again", keys) == 217


def test_stats_may_be_read_from_another_thread(stack: Make) -> None:
    s = stack()
    seen: list[int] = []
    thread = Thread(target=lambda: seen.extend(s.manager.get_stats().requests for _ in range(50)))
    thread.start()
    for number in range(20):
        s.serve(f"r{number}", KEYS[:4])
    thread.join()
    assert seen == sorted(seen)


def test_slots_hold_exactly_a_chunk(stack: Make) -> None:
    s = stack()
    ctx = s.begin("r")
    offer = s.offer(ctx, KEYS[:1])
    assert offer is not None
    assert bytes(s.manager.pool.slot(offer.slots[0])) == bytes_for(KEYS[0], 512)
    s.manager.complete_store(offer.keys, ctx)
    s.finish(ctx)
