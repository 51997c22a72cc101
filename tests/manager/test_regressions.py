"""Histories that the state machine has found: each broke one promise once. `StackWorld` checks all of them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcascade.manager.eviction.arc import ArcPolicy
from kvcascade.testing.stack_world import PROMPTS, Shape, StackWorld, TierShape

World = Callable[..., StackWorld]
FIRST, OTHER = PROMPTS[0], PROMPTS[4]


@pytest.fixture
def world() -> Iterator[World]:
    """Makes a world with tiers of these capacities; at the end everything settles in it."""
    made: list[StackWorld] = []

    def make(*capacities: int, **shape: Any) -> StackWorld:
        made.append(StackWorld(Shape(**{"tiers": [TierShape(chunks) for chunks in capacities]} | shape)))
        return made[-1]

    yield make
    for one in made:
        one.settle()
        one.close()


def test_a_completion_of_another_request_ends_no_store(world: World) -> None:
    """It made chunks readable that nobody had written."""
    w = world(5)
    w.begin("r", FIRST)
    w.offer("r", 0, 2)
    w.complete_nothing(FIRST[0], load=False)
    w.lookup("r", 0)


def test_a_completion_of_another_request_ends_no_load(world: World) -> None:
    """It released the pin of a load that was running."""
    w = world(5)
    w.begin("r", FIRST)
    w.store("r", 2)
    w.match("r")
    w.load("r", 2)
    w.complete_nothing(FIRST[0], load=True)


def test_a_completion_releases_no_slot_that_a_cascade_reads_after_a_reset(world: World) -> None:
    """It released the pin of the cascade: its slot was granted again, other bytes written under the old key."""
    w = world(5, slots=4)
    w.begin("r", FIRST)
    w.store("r", 2)
    w.advance(0, 0)
    w.reset("primary", patient=False)
    w.complete_nothing(FIRST[0], load=False)
    w.begin("other", OTHER)
    w.store("other", 4)


def test_a_completion_releases_no_slot_that_another_copy_uses_after_a_reset(world: World) -> None:
    w = world(5, slots=4)
    w.begin("r", FIRST)
    w.offer("r", 0, 2)
    w.reset("primary", patient=True)
    w.complete_nothing(FIRST[0], load=True)
    w.begin("other", OTHER)
    w.store("other", 4)


def test_no_event_tells_of_a_write_that_a_reset_has_voided(world: World) -> None:
    w = world(5)
    w.begin("r", FIRST)
    w.store("r", 2)
    w.advance(0, 0)
    w.reset("all", patient=False)
    w.drain(0)
    w.step()
    assert not w.holds["t0"]


def test_victims_that_a_withdrawn_write_has_spared_are_told_as_there(world: World) -> None:
    w = world(4, slots=9)
    w.begin("r", FIRST)
    w.store("r", 4)
    w.drain(0)
    w.step()
    w.begin("other", OTHER)
    w.store("other", 4)
    w.reset("primary", patient=True)
    assert w.holds["t0"] == set(FIRST)


def test_the_finish_of_an_old_request_is_not_that_of_a_new_one_of_its_id(world: World) -> None:
    w = world(5)
    w.begin("r", FIRST)
    w.offer("r", 0, 2)
    w.finish("r")
    w.begin("r", OTHER)
    w.write(0)
    w.complete_store(0, True)
    w.store("r", 2)


def test_a_request_whose_own_chunks_are_the_coldest_can_store_more(world: World) -> None:
    """vllm-project/vllm#55461: an offer is not refused while others' chunks can go."""
    w = world(slots=6)
    w.begin("r", FIRST)
    w.store("r", 2)
    w.begin("other", OTHER)
    w.store("other", 4)
    w.step()
    w.store("r", 4)
    assert set(FIRST) <= w.holds["host"]


def test_a_chunk_chosen_to_go_after_its_lookup_is_not_read(world: World) -> None:
    """The read left a mark behind on a chunk that came later, which then could not be evicted."""
    w = world(4, slots=9, concurrency=1)
    w.begin("r", FIRST)
    w.store("r", 4)
    w.drain(0)
    w.reset("primary", patient=True)
    w.match("r")
    w.begin("other", OTHER)
    w.store("other", 4)
    w.step()
    assert w.lanes[0].queued == 1, "the write, and no read"


def test_reads_past_their_deadline_count_against_the_half_of_primary(world: World) -> None:
    w = world(4, 4, slots=4)
    w.begin("r", FIRST)
    w.store("r", 2)
    w.drain(0)
    w.reset("primary", patient=True)
    w.match("r")
    w.step()
    w.advance(0, 0)
    w.pass_time(3.0)
    w.begin("other", FIRST)
    w.match("other")
    w.step()


def test_a_reset_is_not_kept_by_a_fill_of_its_own(world: World) -> None:
    """A promotion that ended during the reset began to fill the tier above with what had just become void."""
    w = world(4, 9, slots=9)
    w.begin("r", FIRST)
    w.begin("other", OTHER)
    for name in ("r", "other"):
        w.store(name, 4)
        w.drain(0)
        w.drain(1)
        w.step()
    w.reset("primary", patient=True)
    w.match("r")
    w.step()
    assert w.lanes[1].queued == 1, "only the lower tier still holds the first prompt"
    w.advance(1, 0)
    w.reset("all", patient=True)


def test_a_chunk_stored_while_it_leaves_a_tier_gets_there_when_it_is_used_again(world: World) -> None:
    w = world(4, slots=9)
    w.begin("r", FIRST)
    w.begin("other", OTHER)
    w.store("r", 4)
    w.drain(0)
    w.step()
    w.reset("primary", patient=True)
    w.store("other", 4)
    w.store("r", 4)
    for _ in range(2):
        w.step()
        w.drain(0)
        w.step()
        w.touch("r", 4)
    w.drain(0)
    w.step()
    w.step()
    assert w.holds["t0"] == set(FIRST)


def test_nobody_is_asked_for_a_chunk_that_can_not_come_into_primary_now(world: World) -> None:
    """A copy of before a reset still uses its slot: that was RETRY, and then MISS in any case."""
    w = world(tiers=[TierShape(shared=True)])
    w.begin("r", FIRST)
    w.offer("r", 0, 2)
    w.reset("primary", patient=True)
    w.begin("other", FIRST)
    w.lookup("other", 0)
    w.step()
    assert not w.lanes[0].submitted


def test_chunks_that_were_passed_over_come_back_at_the_cost_of_their_number() -> None:
    """Three prompts, HIT in one step in which room was made, held the end of that step up for seconds."""
    policy, prompts = ArcPolicy(3000), [range(start, start + 1000) for start in range(0, 3000, 1000)]
    stamps = policy._order._stamps = _CountingList([0] * len(policy._order._stamps))
    for prompt in prompts:
        for entry in reversed(prompt):
            policy.insert([entry], [entry.to_bytes(4, "big")])
    assert policy.victims(1, lambda entry: True) == []
    stamps.reads = 0
    for prompt in prompts:
        for entry in prompt:
            policy.release(entry)
    assert stamps.reads < 10 * 3000
    assert policy.victims(3000, lambda entry: False) == [entry for prompt in prompts for entry in reversed(prompt)]


class _CountingList(list[int]):
    reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.reads += 1
        return super().__getitem__(place)
