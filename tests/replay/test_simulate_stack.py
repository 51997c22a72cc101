"""The plain simulation of a stack, on examples that can be followed by hand, and against that of one cache."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.replay.simulate import lru
from kvcascade.replay.simulate_stack import StackHits, TierModel, simulate_stack

AT_NEED = (1.0, 0.999)
"""Watermarks with which nothing is copied ahead of need."""


def hits(prompts, first, *below):
    models = [TierModel("host", first, watermarks=AT_NEED)]
    models += [TierModel(str(place), **model) for place, model in enumerate(below)]
    return simulate_stack(prompts, models).tiers


def test_no_tier_finds_nothing():
    assert simulate_stack([(1, 2)], []) == StackHits([], 2, [])


def test_a_hit_counts_for_the_topmost_tier():
    assert hits([(1,), (2,), (2, 1)], 2, {}) == [2, 0]
    assert hits([(1,), (2,), (3,), (2, 1)], 2, {}) == [1, 1]


def test_through_has_a_chunk_from_its_store_on_and_on_evict_from_its_eviction_on():
    prompts = [(1,), (2,), (3,), (1,)]
    assert hits(prompts, 2, {"write": "through", "chunks": 2}) == [0, 0], "2 and 3 have pushed it out there, too"
    assert hits(prompts, 2, {"write": "on_evict", "chunks": 2}) == [0, 1]
    assert hits(prompts, 2, {"write": "off"}) == [0, 0]


def test_ahead_of_need_the_coldest_are_copied_down():
    models = [TierModel("host", 10, watermarks=(0.7, 0.5)), TierModel("disk", None, "on_evict")]
    # 1 to 8 fill it above 0.7: the coldest 3 are copied, so that half of it is free or copied.
    prompts = [*((chunk,) for chunk in range(1, 9)), (1, 2, 3)]
    assert simulate_stack(prompts, models).tiers == [3, 0]
    bounded = [models[0], TierModel("disk", 2, "on_evict")]
    prompts = [*((chunk,) for chunk in range(1, 15)), *((chunk,) for chunk in range(1, 5))]
    assert simulate_stack(prompts, bounded).tiers == [0, 0], "the copies of 5 to 9 have pushed 1 to 4 out"


def test_a_soft_capacity_is_held_between_its_marks():
    soft = {"chunks": 10, "soft": (0.8, 0.5)}
    prompts = [(chunk,) for chunk in range(1, 10)]
    # The ninth finds eight there: the coldest go until five are left.
    assert hits([*prompts, (3,)], 1, soft) == [0, 0]
    assert hits([*prompts, (4,)], 1, soft) == [0, 1]
    assert hits([*prompts[:-1], (1,)], 1, soft) == [0, 1]
    assert hits([*prompts[:6], (1,), *prompts[6:], (1,)], 1, soft) == [0, 2], "what was used stays"


def test_a_chunk_that_is_stored_again_counts_as_used_where_nobody_knows_what_is_there():
    disk = {"chunks": 1, "write": "on_evict"}
    soft = {"chunks": 4, "soft": (1.0, 0.5), "write": "on_evict"}
    # 1 is found there, and comes down again after 2 and 3: so it is these that go.
    prompts = [(chunk,) for chunk in (1, 2, 3, 1, 4, 5, 6, 7)]
    assert hits([*prompts, (1,)], 1, disk, soft) == [0, 0, 2]
    assert hits([*prompts, (2,)], 1, disk, soft) == [0, 0, 1]


def test_a_chain_of_on_evict_keeps_what_its_tiers_hold_together():
    below = {"chunks": 2, "write": "on_evict"}
    prompts = [(chunk,) for chunk in range(6)]
    assert hits([*prompts, (0,)], 2, below, below) == [0, 0, 1]
    assert hits([*prompts, (2,)], 2, below, below) == [0, 1, 0]
    assert hits([*prompts, (6,), (0,)], 2, below, below) == [0, 0, 0]


def test_each_policy_writes_what_it_says():
    models = [TierModel("host", 2, watermarks=AT_NEED), TierModel("through"), TierModel("off", None, "off")]
    prompts = [(1,), (2,), (3,), (1,)]
    assert simulate_stack(prompts, models).written == [4, 3, 0]
    models = [models[0], TierModel("on_evict", None, "on_evict"), TierModel("seldom", admit_after=2)]
    assert simulate_stack(prompts, models).written == [4, 2, 1]


def test_what_comes_up_fills_the_tiers_between():
    # 1 is pushed out of both bounded tiers, comes up from the last one, and is pushed out of the first again.
    prompts = [(1,), (2,), (3,), (4,), (1,), (5,), (1,)]
    last = {"write": "through"}
    assert hits(prompts, 1, {"chunks": 2, "fill": True}, last) == [0, 1, 1]
    assert hits(prompts, 1, {"chunks": 2, "fill": False}, last) == [0, 0, 2]
    assert hits(prompts, 1, {"chunks": 2, "write": "off"}, last) == [0, 0, 2]


def test_never_gives_nothing_and_after_n_gives_from_the_nth_use_on():
    prompts = [(1,), (2,)] * 4
    assert hits(prompts, 1, {"promote_after": inf}) == [0, 0]
    assert hits(prompts, 1, {"promote_after": 1}) == [0, 6]
    assert hits(prompts, 1, {"promote_after": 2}) == [0, 6], "asking a second time is the second use"
    assert hits(prompts, 1, {"promote_after": 3}) == [0, 4]


def test_where_the_tier_above_does_not_give_the_one_below_does():
    assert hits([(1,), (2,), (1,)], 1, {"promote_after": inf}, {}) == [0, 0, 1]


def test_admission_from_the_nth_use_on():
    prompts = [(1,), (2,), (1,), (2,), (1,)]
    assert hits(prompts, 1, {"admit_after": 2}) == [0, 1], (
        "1 is stored below at its second use, found at the third"
    )
    assert hits(prompts, 1, {"admit_after": 3}) == [0, 0]
    # Used once when it is evicted, it does not move down; used twice, it does.
    assert hits([(1,), (2,), (1,)], 1, {"admit_after": 2, "write": "on_evict"}) == [0, 0]
    prompts = [(1,), (1,), (2,), (1,), (2,)]
    assert hits(prompts, 1, {"admit_after": 2, "write": "on_evict"}) == [1, 1]
    # In the first tier all the while: stored below when it is used again, not when it is stored.
    assert hits([(1,), (1,), (2,), (1,)], 1, {"admit_after": 2}) == [1, 1]


def test_a_prompt_larger_than_the_first_tier_keeps_its_head():
    assert hits([(1, 2, 3), (1, 2, 3)], 2, {}) == [2, 0]
    # What did not fit into it did not go through it either: 4 is nowhere.
    assert hits([(1, 2, 3, 4), (5,), (6,), (7,), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], 3, {}) == [6, 3]


def test_half_of_the_first_tier_may_come_up_for_one_prompt():
    assert hits([(1, 2, 3, 4), (5, 6, 7, 8), (1, 2, 3, 4)], 4, {}) == [0, 2]


def trees(longest):
    """Prompts whose equal ids are equal prefixes, as in a trace: ids are prefixes, numbered."""
    paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=longest), max_size=40)
    return paths.map(_number)


def _number(paths):
    ids = {}
    return [
        tuple(ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path))) for path in paths
    ]


@given(trees(5), st.integers(1, 12))
def test_the_first_tier_finds_what_a_cache_of_its_size_finds_whatever_lies_below(prompts, capacity):
    alone = hits(prompts, capacity)[0]
    assert alone == lru(prompts, capacity).hits
    assert hits(prompts, capacity, {"chunks": 3}, {"write": "on_evict"})[0] == alone


@given(trees(4), st.integers(8, 12), st.integers(1, 6))
def test_through_a_larger_tier_the_stack_finds_what_a_cache_of_its_size_finds(prompts, capacity, more):
    found = hits(prompts, capacity, {"chunks": capacity + more})
    assert sum(found) == lru(prompts, capacity + more).hits


@pytest.mark.parametrize("write", ["through", "on_evict"])
@given(trees(4), st.integers(8, 12))
def test_without_a_bound_below_nothing_is_lost(write, prompts, capacity):
    assert sum(hits(prompts, capacity, {"write": write})) == lru(prompts, None).hits
