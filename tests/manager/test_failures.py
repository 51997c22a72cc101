"""What a medium does wrong is a miss: never an exception, never a stuck request, never wrong bytes."""

from collections.abc import Callable

import pytest

from kvcascade.testing import key_for
from kvcascade.types import LookupResult, MissReason, Outcome

from .conftest import Stack

KEYS = [key_for(number) for number in range(64)]
Make = Callable[..., Stack]


def _only_below(s: Stack, keys: list[bytes]) -> None:
    """Brings these chunks into the tier below and out of primary."""
    half = s.manager.pool.slots // 2
    for start in range(0, len(keys), half):
        s.serve(f"store {start}", keys[start : start + half])
    for start in range(0, 2 * half, half):
        s.serve(f"push out {start}", [key_for(1000 + start + number) for number in range(half)])


def test_a_bad_chunk_is_read_once_and_its_neighbours_are_served(stack: Make) -> None:
    """No loop of hit and failed load (vllm-project/vllm#49176); a later store heals it."""
    s = stack()
    _only_below(s, KEYS[:4])
    ctx = s.begin("r")
    s.gates[0].shut()
    assert s.manager.match_prefix(KEYS[:4], ctx).pending
    s.step()
    read = s.gates[0].wait_for("read")
    s.faults[0].inner.delete([KEYS[2]])
    read.release()
    s.gates[0].open()
    assert s.match(ctx, KEYS[:4]).hits == 2
    s.load(ctx, KEYS[:2])
    assert s.manager.lookup(KEYS[2], ctx) is LookupResult.MISS
    assert s.lookup(ctx, KEYS[3]) is LookupResult.HIT
    assert sum(KEYS[2] in call.keys for call in s.gates[0].calls if call.verb == "read") == 1
    s.store(ctx, KEYS[2:4])
    s.finish(ctx)
    s.settle()
    assert s.serve("healed", KEYS[:4]) == 4


def test_a_tier_that_never_answers_costs_a_request_no_more_than_the_deadline(stack: Make) -> None:
    """vllm-project/vllm#49829: and the slot is not used again before the read has really ended."""
    s = stack(slots=8, deadline="200ms")
    _only_below(s, KEYS[:2])
    s.gates[0].shut()
    ctx = s.begin("r")
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.HIT_PENDING
    s.step()
    read = s.gates[0].wait_for("read")
    s.clock.advance(0.19)
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.HIT_PENDING
    s.step()
    s.clock.advance(0.02)
    s.step()
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.MISS
    assert s.manager.get_stats().tiers[1].timed_out == 1
    assert s.manager.get_stats().pinned_slots == 1
    assert s.store(ctx, KEYS[10:17]) == KEYS[10:17]
    assert s.manager.prepare_store(KEYS[17:18], ctx) is None, "one slot belongs to the read that has not ended"
    s.finish(ctx)
    read.release()
    s.gates[0].open()
    s.settle()
    s.check_at_rest()
    assert s.manager.get_stats().misses[MissReason.TIMED_OUT] == 1
    assert s.serve("later", KEYS[:2]) == 2


@pytest.mark.parametrize("kind", ["failed", "missing", "corrupt", "raises"])
def test_a_read_that_goes_wrong_is_a_miss_and_the_engine_goes_on(stack: Make, kind: str) -> None:
    """vllm-project/vllm#39732; LMCache/LMCache#3388: nothing is delivered that was not read."""
    s = stack()
    _only_below(s, KEYS[:4])
    s.faults[0]._rates = {kind: 1.0}
    assert s.serve("r", KEYS[:4]) == 0
    s.faults[0]._rates = {}
    s.settle()
    stats = s.manager.get_stats()
    assert stats.tiers[1].failed_reads == 4 and stats.tiers[1].hits == 0
    assert stats.tiers[1].corrupt == (4 if kind == "corrupt" else 0)
    s.serve("push out again", [key_for(2000 + number) for number in range(8)])
    assert s.serve("healed", KEYS[:4]) == 4


@pytest.mark.parametrize("kind", ["failed", "refused", "raises"])
def test_a_write_that_goes_wrong_fails_its_keys_only_and_is_tried_again(stack: Make, kind: str) -> None:
    s = stack(slots=8)
    s.faults[0]._rates = {kind: 1.0}
    s.serve("r", KEYS[:4])
    assert s.manager.get_stats().tiers[1].chunks == 0
    s.faults[0]._rates = {}
    s.serve("used again", KEYS[:4])
    assert s.manager.get_stats().tiers[1].chunks == (0 if kind == "refused" else 4)


def test_other_tiers_serve_while_one_is_stuck(stack: Make) -> None:
    """A slow tier harms only itself: its threads are all stuck, it is down until they return."""
    s = stack(slots=16, tiers=2, concurrency=1, deadline="100ms")
    s.gates[0].shut()
    ctx = s.begin("r")
    s.store(ctx, KEYS[:4])
    s.finish(ctx)
    s.gates[0].wait_for("write")
    s.clock.advance(0.2)
    s.settle()
    upper, lower = s.manager.get_stats().tiers[1:]
    assert (upper.up, lower.up) == (False, True)
    s.serve("stored below only", KEYS[20:24])
    s.serve("push out", KEYS[30:36])
    s.serve("push out more", KEYS[40:46])
    assert s.serve("promoted", KEYS[20:24]) == 4
    assert s.manager.get_stats().tiers[2].hits == 4
    s.gates[0].open()
    s.until(lambda: s.manager.get_stats().tiers[1].up, "the tier does not come back")


def test_what_was_shed_is_stored_when_it_is_next_used(stack: Make) -> None:
    """Beyond its share of primary a tier's stores are shed (kvcache-ai/Mooncake#3331)."""
    s = stack(slots=16, queue=0.25)
    ctx = s.begin("r")
    s.store(ctx, KEYS[:10])
    assert s.manager.get_stats().tiers[1].shed == 6
    s.settle()
    s.manager.touch(KEYS[:10], ctx)
    s.settle()
    assert s.manager.get_stats().tiers[1].chunks == 8
    s.finish(ctx)
    s.settle()
    assert s.manager.get_stats().tiers[1].chunks == 10
    assert s.manager.get_stats().tiers[1].shed == 8


def test_what_was_shed_is_tried_again_once_however_often_it_is_named(stack: Make) -> None:
    s = stack(slots=16, queue=0.25)
    ctx = s.begin("r")
    s.store(ctx, KEYS[:8])
    s.settle()
    s.manager.touch(KEYS[4:8] * 2, ctx)
    s.finish(ctx)
    s.settle()
    assert s.manager.get_stats().tiers[1].written == 8


def test_stores_waiting_for_slow_tiers_pin_at_most_half_of_primary(stack: Make) -> None:
    s = stack(slots=16, tiers=2)
    for gate in s.gates:
        gate.shut()
    ctx = s.begin("r")
    s.store(ctx, KEYS[:12])
    assert s.manager.get_stats().pinned_slots == 8
    assert [tier.shed for tier in s.manager.get_stats().tiers[1:]] == [4, 4]
    other = s.begin("others are served")
    assert s.store(other, KEYS[20:28]) == KEYS[20:28]
    s.finish(ctx)
    s.finish(other)


def test_an_exhausted_pool_refuses_and_recovers(stack: Make) -> None:
    """600 requests against a pinned pool: each a refusal, counted, none an exception (vllm-project/vllm#26329)."""
    s = stack(slots=4)
    holder = s.begin("holder")
    assert s.offer(holder, KEYS[:4])
    for number in range(600):
        ctx = s.begin(f"r{number}")
        assert s.manager.prepare_store([key_for(100 + 2 * number), key_for(101 + 2 * number)], ctx) is None
        s.finish(ctx)
    assert s.manager.get_stats().tiers[0].refused == 1200
    s.manager.complete_store(KEYS[:4], holder)
    s.finish(holder)
    s.settle()
    assert s.serve("after", KEYS[4:6]) == 0
    assert s.serve("again", KEYS[4:6]) == 2


def test_a_refused_range_leaves_no_hole(stack: Make) -> None:
    """The same range may be offered again (vllm-project/vllm#54415)."""
    s = stack(slots=8)
    holder, ctx = s.begin("holder"), s.begin("r")
    s.offer(holder, KEYS[10:16])
    s.store(ctx, KEYS[:2])
    s.settle()
    assert s.manager.prepare_store(KEYS[2:4], ctx) is None
    s.manager.complete_store(KEYS[10:16], holder, success=False)
    s.store(ctx, KEYS[2:4])
    s.finish(holder)
    s.finish(ctx)
    s.settle()
    assert s.serve("again", KEYS[:4]) == 4


def test_abort_while_a_promotion_runs_frees_its_slot_once(stack: Make) -> None:
    """A thousand times without drift (sgl-project/sglang#9927)."""
    s = stack(slots=8)
    _only_below(s, KEYS[:4])
    for number in range(1000):
        s.gates[0].shut()
        ctx = s.begin(f"r{number}")
        s.manager.match_prefix(KEYS[:4], ctx)
        s.step()
        s.finish(ctx)
        if s.manager.has_pending_work():
            s.gates[0].wait_for("read")
            other = s.begin("the rest of the pool is used meanwhile")
            s.store(other, KEYS[20:24])
            assert s.manager.prepare_store(KEYS[24:25], other) is None
            s.finish(other)
        s.gates[0].open()
        s.settle()
        s.serve(f"push out {number}", [key_for(3000 + 8 * number + place) for place in range(8)])
        s.faults[0].inner.delete([key_for(3000 + 8 * number + place) for place in range(8)])
    stats = s.manager.get_stats()
    assert stats.pinned_slots == 0 and stats.free_slots + stats.tiers[0].chunks == 8
    assert s.serve("still right", KEYS[:4]) == 4


def test_requests_that_share_a_prefix_read_it_once(stack: Make) -> None:
    """vllm-project/vllm#29087: eight requests, four reads, each of them served."""
    s = stack(slots=16)
    _only_below(s, KEYS[:4])
    before = s.manager.get_stats().tiers[1].read
    requests = [s.begin(f"r{number}") for number in range(8)]
    for ctx in requests:
        assert s.manager.match_prefix(KEYS[:4], ctx).pending
    for ctx in requests:
        assert s.match(ctx, KEYS[:4]).hits == 4
        s.load(ctx, KEYS[:4])
    assert s.manager.get_stats().tiers[1].read - before == 4
    for ctx in requests:
        s.finish(ctx)
    assert s.manager.get_stats().tiers[1].hits == 4 * 8


def test_a_prompt_larger_than_half_of_primary_gets_the_prefix_that_fits(stack: Make) -> None:
    s = stack(slots=16)
    for start in range(0, 24, 8):
        s.serve(f"store {start}", KEYS[start : start + 8])
    s.serve("push out", [key_for(1000 + number) for number in range(16)])
    ctx = s.begin("r")
    assert s.match(ctx, KEYS[:24]).hits == 8
    assert s.manager.get_stats().pinned_slots == 8
    s.load(ctx, KEYS[:8])
    s.finish(ctx)


def test_waiting_requests_do_not_thrash(stack: Make) -> None:
    """Twenty requests whose chunks exceed primary many times read each chunk once (vllm-project/vllm#49902)."""
    s = stack(slots=16)
    prompts = [[key_for(100 * prompt + place) for place in range(6)] for prompt in range(20)]
    for number, prompt in enumerate(prompts):
        s.serve(f"store {number}", prompt)
    s.serve("push out", [key_for(9000 + number) for number in range(16)])
    before = s.manager.get_stats().tiers[1].read
    waiting = {s.begin(f"r{number}"): prompt for number, prompt in enumerate(prompts)}
    while waiting:
        for ctx, prompt in list(waiting.items()):
            found = s.manager.match_prefix(prompt, ctx)
            if not found.pending:
                assert found.hits == 6
                s.load(ctx, prompt)
                s.finish(ctx)
                del waiting[ctx]
        s.step()
        s.settle()
    assert s.manager.get_stats().tiers[1].read - before <= 1.2 * 120


def test_a_request_waits_for_room_without_reading_until_its_deadline(stack: Make) -> None:
    s = stack(slots=8, deadline="1s")
    _only_below(s, KEYS[:8])
    first = s.begin("holds what was promoted for it")
    assert s.match(first, KEYS[:4]).hits == 4
    second = s.begin("waits")
    reads = s.manager.get_stats().tiers[1].read
    for _ in range(5):
        assert s.manager.match_prefix(KEYS[4:8], second).pending
        s.settle()
        s.step()
    assert s.manager.get_stats().tiers[1].read == reads
    s.clock.advance(1.1)
    assert s.manager.match_prefix(KEYS[4:8], second) == (0, False)
    s.step()
    assert s.manager.get_stats().pinned_slots == 0, "who does not come for its chunks holds them no longer"
    s.finish(first)
    s.finish(second)


def test_of_those_that_wait_for_room_only_one_holds_pins(stack: Make) -> None:
    """Two requests that each hold what the other one needs the room of would wait for each other until their
    deadlines: the second gets what it has at once, and the first the room that it leaves."""
    s = stack(slots=8, deadline="1s")
    _only_below(s, KEYS[:6])
    first, second = s.begin("waits for room"), s.begin("gets what it has")
    assert s.match(first, KEYS[:2]).hits == 2
    assert s.match(second, KEYS[3:5]).hits == 2
    assert s.manager.match_prefix(KEYS[:3], first) == (2, True)
    assert s.manager.match_prefix(KEYS[3:6], second) == (2, True)
    s.step()
    assert s.manager.match_prefix(KEYS[:3], first) == (2, True), "half of primary is pinned: there is no room"
    assert s.manager.match_prefix(KEYS[3:6], second) == (2, False)
    s.load(second, KEYS[3:5])
    s.finish(second)
    assert s.match(first, KEYS[:3]).hits == 3
    s.load(first, KEYS[:3])
    s.finish(first)


def test_who_holds_pins_and_waits_for_room_goes_before_those_that_need_what_it_holds(stack: Make) -> None:
    s = stack(slots=8, deadline="1s")
    _only_below(s, KEYS[:8])
    holds, needs = s.begin("holds two and wants a third"), s.begin("wants four")
    assert s.match(holds, KEYS[:2]).hits == 2
    for _ in range(3):  # who needs more asks first in each step
        assert s.manager.match_prefix(KEYS[4:8], needs) == (0, True)
        found = s.manager.match_prefix(KEYS[:3], holds)
        s.step()
        s.settle()
    assert found == (3, False)
    s.load(holds, KEYS[:3])
    s.finish(holds)
    assert s.match(needs, KEYS[4:8]).hits == 4
    s.load(needs, KEYS[4:8])
    s.finish(needs)


def test_a_tier_with_a_wrong_number_of_answers_fails_that_job(stack: Make) -> None:
    s = stack()
    _only_below(s, KEYS[:2])
    s.gates[0].shut()
    ctx = s.begin("r")
    s.manager.match_prefix(KEYS[:2], ctx)
    s.step()
    s.gates[0].wait_for("read").release([Outcome.OK])
    s.gates[0].open()
    assert s.match(ctx, KEYS[:2]).hits == 0
    s.finish(ctx)


def test_shutdown_stops_every_tier_and_raises_the_first_error(stack: Make) -> None:
    """vllm-project/vllm#52290."""
    s = stack(tiers=3)
    s.serve("r", KEYS[:4])
    s.faults[1].close = lambda: (_ for _ in ()).throw(RuntimeError("will not close"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="will not close"):
        s.manager.shutdown()
    assert [gate.calls[-1].verb for gate in s.gates] == ["close"] * 3
    s.manager.shutdown()
    s.check_at_rest = lambda: None  # type: ignore[method-assign]


def test_shutdown_leaves_memory_mapped_that_a_stuck_thread_still_uses(stack: Make) -> None:
    s = stack()
    s.gates[0].shut()
    ctx = s.begin("r")
    s.store(ctx, KEYS[:1])
    s.finish(ctx)
    write = s.gates[0].wait_for("write")
    s.manager.shutdown(timeout=0.05)
    assert s.manager.pool.slot(0) is not None, "the pool is still there"
    write.release()
    write.wait_done()
    s.manager.pool.close()
    s.gates[0].open()
    s.check_at_rest = lambda: None  # type: ignore[method-assign]


def test_stores_that_wait_reach_their_tier_before_shutdown_ends(stack: Make) -> None:
    s = stack()
    ctx = s.begin("r")
    s.store(ctx, KEYS[:4])
    s.finish(ctx)
    inner = s.faults[0].inner
    held: list[bool] = []
    close = inner.close
    inner.close = lambda: (held.extend(inner.exists(KEYS[:4])), close())[1]  # type: ignore[method-assign]
    s.manager.shutdown()
    assert held == [True] * 4
    s.check_at_rest = lambda: None  # type: ignore[method-assign]
