"""When chunks move: write policies, promotion, admission, ttl."""

from collections.abc import Callable

import pytest

from kvcascade.testing import key_for
from kvcascade.types import LookupResult, MissReason

from .conftest import CHUNK, Stack

KEYS = [key_for(number) for number in range(400)]
Make = Callable[..., Stack]


def test_off_takes_nothing_new(stack: Make) -> None:
    s = stack(write="off")
    s.serve("r", KEYS[:4])
    assert s.manager.get_stats().tiers[1].chunks == 0
    assert not [call for call in s.gates[0].calls if call.verb == "write"]


def test_on_evict_writes_each_chunk_once_when_it_gets_cold(stack: Make) -> None:
    s = stack(slots=40, write="on_evict")
    s.serve("short", KEYS[:16])
    assert s.manager.get_stats().tiers[1].written == 0, "there is room above"
    for number, start in enumerate(range(16, 160, 16)):
        s.insist(f"r{number}", KEYS[start : start + 16])
    below = s.manager.get_stats().tiers[1]
    assert below.written == below.chunks >= 160 - 40
    assert s.manager.get_stats().tiers[0].dropped == 0
    for number, start in enumerate(range(0, 160, 16)):
        assert s.serve(f"again {number}", KEYS[start : start + 16]) == 16
    assert s.manager.get_stats().tiers[1].written <= 160, "what came up from below is not written again"


def test_a_chain_of_on_evict_loses_nothing_that_its_capacities_hold(stack: Make) -> None:
    """Host, then two tiers that each receive what the one above evicts; moves between them pass staging slots."""
    s = stack(
        slots=16,
        tiers=2,
        write="on_evict",
        each=[{"capacity": 48 * CHUNK}, {"capacity": 1 << 20}],
        host={"staging": 5 * 4096},
    )
    prompts = [KEYS[start : start + 8] for start in range(0, 320, 8)]
    for number, prompt in enumerate(prompts):
        s.insist(f"r{number}", prompt)
        s.step()
        s.settle()
    stats = s.manager.get_stats()
    assert [tier.dropped for tier in stats.tiers] == [0, 0, 0]
    assert [s.serve(f"again {number}", prompt) for number, prompt in enumerate(prompts)] == [8] * 40
    assert stats.tiers[1].bytes <= 48 * CHUNK


def test_what_is_free_is_granted_while_the_rest_of_an_offer_waits_for_a_demotion(stack: Make) -> None:
    s = stack(slots=8, write="on_evict")
    s.gates[0].shut()
    s.serve("first", KEYS[:7])
    second = s.begin("second")
    offer = s.offer(second, KEYS[10:14])
    assert offer is not None and (offer.keys, offer.refused) == (KEYS[10:11], KEYS[11:14])
    assert not offer.evicted
    s.manager.complete_store(offer.keys, second)
    s.gates[0].open()
    s.until(lambda: s.stored(second, KEYS[11:14]), "the store stays refused")
    assert s.manager.get_stats().tiers[0].dropped == 0
    s.finish(second)


def test_need_waits_for_a_demotion_under_way_and_drops_where_there_is_none(stack: Make) -> None:
    s = stack(slots=8, write="on_evict")
    s.gates[0].shut()
    first = s.begin("first")
    s.store(first, KEYS[:8])
    s.finish(first)
    s.step()
    s.gates[0].wait_for("write")
    second = s.begin("second")
    assert s.manager.prepare_store(KEYS[8:10], second) is None, "room will come"
    s.gates[0].open()
    s.until(lambda: s.stored(second, KEYS[8:10]), "the store stays refused")
    assert s.manager.get_stats().tiers[0].dropped == 0
    s.faults[0].down = True
    for _ in range(40):
        s.clock.advance(0.1)
        s.step()
        s.settle()
    s.until(lambda: not s.manager.get_stats().tiers[1].up, "the tier does not go down")
    s.until(lambda: s.stored(second, KEYS[20:26]), "the store stays refused")
    assert s.manager.get_stats().tiers[0].dropped > 0
    s.faults[0].down = False
    s.finish(second)


def test_a_chunk_demoted_and_touched_again_stays_in_both(stack: Make) -> None:
    s = stack(slots=20, write="on_evict")
    s.serve("a", KEYS[:10])
    s.serve("b", KEYS[10:20])
    s.step()
    s.settle()
    assert s.manager.get_stats().tiers[1].chunks > 0
    assert s.serve("a again", KEYS[:10]) == 10
    assert s.manager.get_stats().tiers[1].read == 0


def test_never_keeps_chunks_below(stack: Make) -> None:
    s = stack(slots=8, promote="never")
    s.serve("a", KEYS[:4])
    s.serve("b", KEYS[4:8])
    s.serve("c", KEYS[8:12])
    assert s.serve("a again", KEYS[:4]) == 0
    assert s.manager.get_stats().misses[MissReason.REFUSED] == 1


def test_promotion_from_the_second_use_on(stack: Make) -> None:
    s = stack(slots=8, promote={"after": 2})
    s.serve("a", KEYS[:4])
    for number in range(2):
        s.serve(f"push out {number}", KEYS[10 + 4 * number : 14 + 4 * number])
    assert s.serve("the second request that uses them", KEYS[:4]) == 4


@pytest.mark.parametrize("uses", [2, 3])
def test_admission_from_the_nth_use_on(stack: Make, uses: int) -> None:
    s = stack(slots=16, admit_after=uses)
    for use in range(1, uses + 1):
        s.serve(f"r{use}", KEYS[:4])
        assert s.manager.get_stats().tiers[1].chunks == (4 if use == uses else 0)
    s.serve("used once", KEYS[4:8])
    assert s.manager.get_stats().tiers[1].chunks == 4


def test_a_chunk_whose_time_is_over_is_a_miss_and_goes(stack: Make) -> None:
    s = stack(slots=8, ttl="1h")
    s.serve("a", KEYS[:4])
    s.manager.reset_cache("primary")
    s.clock.advance(3590)
    assert s.serve("just in time", KEYS[:4]) == 4
    s.manager.reset_cache("primary")
    s.clock.advance(20)
    s.step()
    ctx = s.begin("too late")
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.MISS
    s.finish(ctx)
    assert s.manager.get_stats().misses[MissReason.EXPIRED] == 1
    ctx = s.begin("stores anew")
    s.store(ctx, KEYS[:5])
    s.finish(ctx)
    s.settle()
    s.manager.reset_cache("primary")
    assert s.serve("fresh", KEYS[:4]) == 4
    assert s.manager.get_stats().tiers[1].chunks <= 5
