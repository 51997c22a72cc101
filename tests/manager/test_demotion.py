"""Moves from a tier into the one below it, where something is in their way."""

from collections.abc import Callable

import pytest

from kvcascade.testing import key_for
from kvcascade.types import Changes, LookupResult

from .conftest import CHUNK, Stack

KEYS = [key_for(number) for number in range(400)]
Make = Callable[..., Stack]


def test_primary_waits_for_room_that_is_made_further_down(stack: Make) -> None:
    """Its chunks were dropped while the tier below was full of chunks that were just moving on."""
    s = stack(slots=16, tiers=2, write="on_evict", each=[{"capacity": 16 * CHUNK}, {}], host={"staging": 5 * 4096})
    prompts = [KEYS[start : start + 8] for start in range(0, 40, 8)]
    for number in range(4):
        s.insist(f"r{number}", prompts[number])
    s.gates[1].shut()
    ctx = s.begin("waits")
    assert not s.stored(ctx, prompts[4])
    s.until(lambda: bool(s.gates[1].waiting), "nothing moves on")
    for _ in range(20):
        assert not s.stored(ctx, prompts[4]), "there is no room yet"
        s.step()
    s.gates[1].open()
    s.until(lambda: s.stored(ctx, prompts[4]), "the store stays refused")
    s.finish(ctx)
    s.settle()
    assert [tier.dropped for tier in s.manager.get_stats().tiers] == [0, 0, 0]
    assert [s.serve(f"again {number}", prompt) for number, prompt in enumerate(prompts)] == [8] * 5


def test_a_copy_that_hangs_keeps_room_from_being_made_no_longer_than_its_deadline(stack: Make) -> None:
    s = stack(slots=8, write="on_evict", concurrency=2, deadline="2s", breaker={"failures": 100})
    s.insist("a", KEYS[:8])
    s.gates[0].shut()
    ctx = s.begin("waits")
    assert not s.stored(ctx, KEYS[8:12])
    hung = s.gates[0].wait_for("write")
    s.clock.advance(2.1)
    s.step()
    assert s.stored(ctx, KEYS[8:12])
    assert s.manager.get_stats().tiers[0].dropped == 4
    hung.release()
    s.gates[0].open()
    s.until(lambda: not s.manager.get_stats().pinned_slots, "the late copy keeps its slots")
    s.finish(ctx)
    s.settle()


@pytest.mark.parametrize("slots", [8, 40])
def test_what_moves_down_stays_in_its_order(stack: Make, slots: int) -> None:
    """The tail of a prompt is of no use without its head: of one that moves down the tail is the first to go."""
    s = stack(slots=slots, write="on_evict", capacity=(slots + 2) * CHUNK)
    s.insist("first", KEYS[:8])
    for number, start in enumerate(range(100, 100 + 2 * slots, 4)):
        s.insist(f"r{number}", KEYS[start : start + 4])
        there = [key for key in KEYS[:8] if s.manager._chain.levels[0].holds(key)]
        assert there == KEYS[: len(there)] or s.manager._slots.find(KEYS[0]) >= 0


def test_what_was_used_too_seldom_for_the_tier_below_is_not_moved_there(stack: Make) -> None:
    s = stack(slots=8, write="on_evict", admit_after=2)
    for number in range(2):
        s.serve(f"twice {number}", KEYS[:2])
        s.step()
    for number, start in enumerate(range(10, 40, 4)):
        s.insist(f"once {number}", KEYS[start : start + 4])
    stats = s.manager.get_stats()
    assert (stats.tiers[0].dropped, stats.tiers[1].written) == (0, 2)
    assert s.serve("a third time", KEYS[:2]) == 2


def test_a_store_into_a_tier_waits_for_room_that_is_being_made_there(stack: Make) -> None:
    """It was shed, and its chunk was in no tier at all when primary evicted it."""
    s = stack(
        slots=16,
        tiers=2,
        each=[{"write": "through", "capacity": 8 * CHUNK}, {"write": "on_evict"}],
        host={"staging": 5 * 4096},
    )
    s.insist("first", KEYS[:8])
    s.gates[1].shut()
    ctx = s.begin("second")
    s.store(ctx, KEYS[8:16])
    s.finish(ctx)
    s.step(5)
    assert s.manager.get_stats().tiers[1].shed == 0
    s.gates[1].open()
    s.until(lambda: s.manager._chain.levels[0].holds(KEYS[15]), "the store is forgotten")
    s.manager.reset_cache("primary")
    assert s.serve("first again", KEYS[:8]) == 8
    assert s.serve("second again", KEYS[8:16]) == 8
    assert [tier.dropped + tier.shed for tier in s.manager.get_stats().tiers] == [0, 0, 0]


def test_what_waits_for_room_in_a_tier_and_leaves_primary_meanwhile_is_shed(stack: Make) -> None:
    s = stack(
        slots=16,
        tiers=2,
        each=[{"write": "through", "capacity": 8 * CHUNK}, {"write": "on_evict", "deadline": "1h"}],
        host={"staging": 5 * 4096},
    )
    s.insist("first", KEYS[:8])
    s.gates[1].shut()
    for start in range(8, 64, 8):
        ctx = s.begin(f"r{start}")
        s.store(ctx, KEYS[start : start + 8])
        s.finish(ctx)
        s.step()
    assert s.manager.get_stats().tiers[1].shed >= 32
    s.gates[1].open()
    s.settle()


@pytest.mark.parametrize("fault", ["refused", "failed"])
@pytest.mark.parametrize("tiers", [1, 2])
def test_a_tier_that_takes_nothing_keeps_nobody_waiting(stack: Make, fault: str, tiers: int) -> None:
    """Each chunk was offered to it again and again, and no room was ever made."""
    s = stack(
        slots=16,
        tiers=tiers,
        each=[{"write": "on_evict", "capacity": 16 * CHUNK}] * (tiers - 1) + [{"write": "on_evict"}],
        shared=[tiers - 1],
        host={"staging": 5 * 4096},
    )
    s.faults[-1]._rates = {fault: 1.0}
    for number in range(8):
        s.insist(f"r{number}", KEYS[8 * number : 8 * number + 8])
        s.step()
        s.settle()
    stats = s.manager.get_stats()
    assert stats.tiers[tiers - 1].dropped > 0
    assert stats.tiers[tiers - 1].dropped <= 64
    s.faults[-1]._rates = {}


def test_a_tier_that_holds_less_than_is_moved_into_it_comes_to_rest(stack: Make) -> None:
    """What it had evicted was moved there again, and pushed out what was moved there meanwhile, for ever."""
    s = stack(slots=40, write="on_evict", capacity=4 * CHUNK, host={"watermarks": {"high": 0.8, "low": 0.5}})
    for start in range(0, 80, 8):
        s.insist(f"r{start}", KEYS[start : start + 8])
    s.step(50)
    s.settle()
    assert s.manager.get_stats().tiers[1].written <= 80


def test_copies_under_way_count_as_room_so_that_no_more_is_copied_than_the_watermarks_ask_for(stack: Make) -> None:
    """Each step began to copy more, for as long as the first copies took."""
    s = stack(slots=40, write="on_evict", deadline="1h")
    for start in range(0, 32, 8):
        s.insist(f"r{start}", KEYS[start : start + 8])
    s.gates[0].shut()
    ctx = s.begin("fills it")
    s.store(ctx, KEYS[32:40])
    s.finish(ctx)
    s.step(50)
    assert s.manager._chain.levels[0].pinned == 4, "a tenth of primary"
    s.gates[0].open()
    s.settle()
    s.step(5)
    assert s.manager.get_stats().tiers[1].written == 4


@pytest.mark.parametrize("how", ["it vanished", "its time was over"])
def test_what_the_tier_below_has_lost_is_copied_again_before_it_goes(stack: Make, how: str) -> None:
    """It went from primary as one that is held below, and was in no tier at all."""
    s = stack(slots=8, write="on_evict", ttl="10s")
    s.insist("a", KEYS[:8])
    s.step()
    s.settle()
    below = s.manager._chain.levels[0]
    assert [key for key in KEYS if below.holds(key)] == KEYS[7:8], "copied ahead of need"
    if how == "it vanished":
        s.faults[0].inner.delete(KEYS[7:8])
        vars(below.lane)["_changes"].append(Changes(vanished=(KEYS[7],)))
    else:
        s.later(11.0)
    s.insist("b", KEYS[10:18])
    assert [key for key in KEYS[:8] if below.holds(key)] == KEYS[:8]
    assert s.manager.get_stats().tiers[0].dropped == 0


def test_what_the_tier_below_has_evicted_is_not_copied_again(stack: Make) -> None:
    s = stack(slots=8, write="on_evict", capacity=4 * CHUNK)
    s.insist("a", KEYS[:8])
    s.insist("b", KEYS[8:16])
    s.insist("a again", KEYS[:8])
    assert s.manager.get_stats().tiers[1].written <= 24


def test_a_chunk_that_is_gone_before_it_is_moved_leaves_nothing_behind(stack: Make) -> None:
    s = stack(
        slots=16,
        tiers=2,
        each=[{"write": "through", "capacity": 8 * CHUNK}, {"write": "on_evict"}],
        host={"staging": 5 * 4096},
    )
    ctx = s.begin("a")
    s.store(ctx, KEYS[:8])
    s.finish(ctx)
    s.until(lambda: s.manager.get_stats().tiers[1].chunks == 8, "the cascade does not end")
    s.manager.reset_cache("primary")
    s.faults[0].inner.delete(KEYS[:8])
    s.step()
    s.settle()
    s.insist("b", KEYS[8:16])
    (pair,) = s.manager._demotion._pairs.values()
    assert not pair._failed and not pair._under_way


def test_a_staging_slot_is_not_lent_again_before_a_late_read_into_it_has_ended(stack: Make) -> None:
    """The chunk went down from primary meanwhile; another one that got the slot was stored with its bytes."""
    s = stack(
        slots=16,
        tiers=2,
        write="on_evict",
        deadline="2s",
        concurrency=3,
        breaker={"failures": 100},
        each=[{"capacity": 16 * CHUNK}, {}],
        host={"staging": 5 * 4096},
    )
    upper, lower = s.manager._chain.levels
    pair = s.manager._demotion._pairs[upper]
    for number in range(4):
        s.insist(f"r{number}", KEYS[8 * number : 8 * number + 8])
    s.gates[0].shut()
    ctx = s.begin("more")
    s.until(lambda: s.stored(ctx, KEYS[32:40]) or bool(s.gates[0].waiting), "nothing moves on")
    hung = s.gates[0].wait_for("read")
    key, slot = hung.keys[0], pair._staged[hung.keys[0]]
    s.clock.advance(2.1)
    s.step()

    def passes(done: Callable[[], bool]) -> bool:
        for call in s.gates[0].waiting:
            if call is not hung:
                call.release()
        return done()

    again = s.begin("again")
    s.until(lambda: passes(lambda: s.manager.lookup(key, again) is LookupResult.HIT), "it is not promoted")
    pair._to_copy.append(key)  # as it may have been chosen before
    s.until(lambda: passes(lambda: lower.holds(key)), "it does not go down from primary")
    assert slot not in pair._shelf
    hung.release()
    s.gates[0].open()
    s.finish(ctx)
    s.finish(again)
    s.until(lambda: slot in pair._shelf, "the late read keeps its slot")
    s.settle()
