"""Pins, eviction and events."""

import random
from collections.abc import Callable

from kvcascade.testing import key_for
from kvcascade.types import LookupResult, MissReason

from .conftest import Stack

KEYS = [key_for(number) for number in range(64)]
Make = Callable[..., Stack]


def test_a_hit_stays_true_to_the_end_of_the_step(stack: Make) -> None:
    """Another request's store in between takes other chunks, and what is more is refused until then
    (vllm-project/vllm#39702)."""
    s = stack(slots=4)
    s.serve("fill", KEYS[:4])
    first, second = s.begin("r1"), s.begin("r2")
    assert s.manager.match_prefix(KEYS[:2], first).hits == 2
    offer = s.offer(second, KEYS[10:13])
    assert offer is not None and (offer.keys, offer.refused) == (KEYS[10:12], KEYS[12:13])
    assert s.manager.prepare_store(KEYS[12:13], second) is None
    s.load(first, KEYS[:2])
    s.finish(first)
    s.step()
    assert s.store(second, KEYS[12:13]) == KEYS[12:13]
    s.manager.complete_store(offer.keys, second)
    s.finish(second)


def test_of_an_offer_larger_than_primary_the_prefix_that_fits_is_granted(stack: Make) -> None:
    """The rest is refused, counted, and granted when it is offered again and there is room: so a prompt that comes
    as one offer keeps its head (vllm-project/vllm#26329)."""
    s = stack(slots=4, tiers=0)
    long, other = s.begin("long"), s.begin("other")
    offer = s.offer(long, KEYS[:10])
    assert offer is not None and (offer.keys, offer.refused) == (KEYS[:4], KEYS[4:10])
    assert s.manager.get_stats().tiers[0].refused == 6
    s.manager.complete_store(offer.keys, long)
    assert s.manager.prepare_store(KEYS[4:10], long) is None, "its own head does not go for its tail"
    assert s.manager.match_prefix(KEYS[:10], long).hits == 4
    s.finish(long)
    s.step()
    again = s.offer(other, KEYS[4:10])
    assert again is not None and (again.keys, again.refused) == (KEYS[4:8], KEYS[8:10])
    s.manager.complete_store(again.keys, other)
    assert s.manager.match_prefix(KEYS[4:10], other).hits == 4
    s.finish(other)


def test_of_an_offer_what_is_here_or_coming_is_neither_granted_nor_refused(stack: Make) -> None:
    s = stack(slots=6, tiers=0)
    s.serve("here", KEYS[1:2])
    coming, ctx = s.begin("coming"), s.begin("r")
    s.offer(coming, [KEYS[4], KEYS[6]])
    offer = s.offer(ctx, KEYS[:8])
    assert offer is not None and (offer.keys, offer.refused) == ([KEYS[0], *KEYS[2:4]], [KEYS[5], KEYS[7]])
    s.manager.complete_store(offer.keys, ctx)
    s.manager.complete_store([KEYS[4], KEYS[6]], coming, success=False)
    s.step()
    assert s.store(ctx, KEYS[:6]) == KEYS[4:6]
    nothing_new = s.manager.prepare_store(KEYS[:6], ctx)
    assert nothing_new is not None and (nothing_new.keys, nothing_new.refused) == ([], [])
    s.finish(coming)
    s.finish(ctx)


def test_an_offer_ends_before_a_chunk_whose_slot_is_still_used_since_a_reset(stack: Make) -> None:
    s = stack(slots=8, tiers=0)
    before, after = s.begin("before"), s.begin("after")
    s.offer(before, KEYS[2:3])
    s.manager.reset_cache()
    offer = s.offer(after, KEYS[:4])
    assert offer is not None and (offer.keys, offer.refused) == (KEYS[:2], KEYS[2:4])
    s.manager.complete_store(KEYS[2:3], before)
    assert s.store(after, KEYS[2:4]) == KEYS[2:4]
    s.manager.complete_store(offer.keys, after)
    s.finish(before)
    s.finish(after)


def test_lookups_keep_nothing_alive(stack: Make) -> None:
    """kvcache-ai/Mooncake#2187: eviction finds a victim however often all were asked for."""
    s = stack(slots=4)
    s.serve("fill", KEYS[:4])
    ctx = s.begin("asks and asks")
    for _ in range(1000):
        for key in KEYS[:4]:
            assert s.manager.lookup(key, ctx) is LookupResult.HIT
    s.step()
    other = s.begin("stores")
    assert s.store(other, KEYS[10:11]) == KEYS[10:11]
    s.finish(ctx)
    s.finish(other)


def test_nothing_stays_pinned_whatever_becomes_of_hits(stack: Make) -> None:
    """LMCache/LMCache#1034: a thousand hits, loaded, aborted or left alone."""
    s = stack(slots=16)
    rng = random.Random(7)
    prompts = [[key_for(100 * prompt + place) for place in range(4)] for prompt in range(8)]
    for number in range(1000):
        prompt = rng.choice(prompts)
        ctx = s.begin(f"r{number}")
        hits = s.match(ctx, prompt).hits
        fate = rng.random()
        if fate < 0.4:
            s.load(ctx, prompt[:hits])
        elif fate < 0.5 and hits:
            s.manager.prepare_load(prompt[:hits], ctx)
            s.finish(ctx)
            s.manager.complete_load(prompt[:hits], ctx, success=fate < 0.45)
            continue
        if hits < 4 and fate < 0.9:
            s.store(ctx, prompt[hits:])
        s.finish(ctx)
        s.step()
    s.check_at_rest()
    assert s.store(s.begin("all of it"), [key_for(9000 + place) for place in range(16)])
    s.finish(s.running["all of it"])


def test_the_tail_of_a_prompt_goes_before_its_head(stack: Make) -> None:
    """vllm-project/vllm#55461: in whatever order its loads complete."""
    s = stack(slots=4, tiers=0)
    s.serve("fill", KEYS[:4])
    ctx = s.begin("r")
    s.manager.match_prefix(KEYS[:4], ctx)
    s.manager.touch(KEYS[:4], ctx)
    s.manager.prepare_load(KEYS[:4], ctx)
    for key in reversed(KEYS[:4]):
        s.manager.complete_load([key], ctx)
    s.finish(ctx)
    s.step()
    other = s.begin("other")
    offer = s.manager.prepare_store(KEYS[10:12], other)
    assert offer is not None and offer.evicted == [KEYS[3], KEYS[2]]
    s.write(offer)
    s.manager.complete_store(offer.keys, other)
    s.finish(other)


def test_a_prompt_stored_piece_by_piece_loses_its_tail_first(stack: Make) -> None:
    s = stack(slots=8, tiers=0)
    ctx = s.begin("r")
    for start in range(0, 8, 2):
        s.store(ctx, KEYS[start : start + 2])
        s.step()
    assert s.manager.prepare_store(KEYS[8:10], ctx) is None, "a prompt larger than the pool keeps its head"
    s.finish(ctx)
    s.step()
    other = s.begin("other")
    offer = s.manager.prepare_store(KEYS[20:23], other)
    assert offer is not None and offer.evicted == [KEYS[7], KEYS[6], KEYS[5]]
    s.manager.complete_store(offer.keys, other, success=False)
    s.finish(other)


def test_a_store_succeeds_whenever_enough_can_be_evicted(stack: Make) -> None:
    """vllm-project/vllm#55461: pinned chunks at the cold end are passed over, and are cold again afterwards."""
    s = stack(slots=6, tiers=0)
    s.serve("cold", KEYS[:3])
    s.serve("warm", KEYS[3:6])
    holder = s.begin("holder")
    s.manager.match_prefix(KEYS[:3], holder)
    s.manager.prepare_load(KEYS[:3], holder)
    s.step()
    s.serve("needs three", KEYS[10:13])
    s.manager.complete_load(KEYS[:3], holder)
    s.step()
    other = s.begin("other")
    offer = s.manager.prepare_store(KEYS[20:22], other)
    assert offer is not None and offer.evicted == [KEYS[2], KEYS[1]]
    s.manager.complete_store(offer.keys, other, success=False)
    s.finish(other)
    s.finish(holder)


def test_a_full_secondary_tier_evicts_and_keeps_what_was_used(stack: Make) -> None:
    s = stack(slots=8, capacity=512 * 8)
    s.serve("a", KEYS[:4])
    s.serve("b", KEYS[4:8])
    s.serve("a again", KEYS[:4])
    s.serve("c", KEYS[8:12])
    assert [all(s.faults[0].inner.exists(part)) for part in (KEYS[:4], KEYS[4:8], KEYS[8:12])] == [
        True,
        False,
        True,
    ]
    tier = s.manager.get_stats().tiers[1]
    assert (tier.chunks, tier.evictions, tier.bytes) == (8, 4, 512 * 8)
    ctx = s.begin("asks for what is gone")
    s.manager.reset_cache("primary")
    assert s.manager.match_prefix(KEYS[4:8], ctx) == (0, False)
    assert s.manager.get_stats().tiers[1].misses[MissReason.EVICTED] == 1
    s.finish(ctx)


def test_each_tier_tells_its_own_events_after_they_happened(stack: Make) -> None:
    """vllm-project/vllm#47923: a chunk evicted from primary is still on the tier below."""
    s = stack(slots=4, tiers=1)
    s.serve("a", KEYS[:2])
    s.serve("fails", [])
    s.faults[0]._rates = {"failed": 1.0}
    s.serve("b", KEYS[10:14])
    where: dict[bytes, set[str]] = {}
    for event in s.manager.take_events():
        for key in event.keys:
            if event.removed:
                where[key].remove(event.tier)
            else:
                where.setdefault(key, set()).add(event.tier)
    assert where == {key: {"t0"} for key in KEYS[:2]} | {key: {"host"} for key in KEYS[10:14]}
    assert s.manager.take_events() == []


def test_every_chunk_asked_for_has_one_outcome(stack: Make) -> None:
    """LMCache hits that were never delivered (sgl-project/sglang#37503)."""
    s = stack(slots=8)
    s.serve("store", KEYS[:4])
    ctx = s.begin("r")
    for _ in range(50):  # engines repeat themselves while they wait
        s.manager.match_prefix(KEYS[:6], ctx)
    s.manager.prepare_load(KEYS[:3], ctx)
    s.manager.complete_load(KEYS[:2], ctx)
    s.manager.complete_load(KEYS[2:3], ctx, success=False)
    s.finish(ctx)
    stats = s.manager.get_stats()
    assert (stats.lookups, stats.hits, stats.failed, stats.unused) == (6, 2, 1, 1)
    assert stats.misses == {MissReason.NEVER_STORED: 2}
    assert stats.tiers[0].read_bytes == 2 * 512 and stats.tiers[0].written_bytes == 4 * 512
