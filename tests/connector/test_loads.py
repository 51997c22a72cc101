"""What is found, and what is loaded of it."""

from collections.abc import Callable

import pytest

from kvcascade.connector import EndedLoad, GroupSpec
from kvcascade.connector.coverage import needed_chunks
from kvcascade.connector.transfers import Direction
from kvcascade.types import RequestContext

from .conftest import Bench, Request

Make = Callable[..., Bench]


def store(b: Bench, prompt: int, blocks: object, name: str = "first", step: int | None = None) -> Request:
    """A request that has come and gone, prefilled in steps of `step` tokens."""
    r = b.request(name, prompt)
    assert b.query(r) == 0
    b.step(b.run(r, step or prompt, blocks))
    for start in range(step or prompt, prompt, step or prompt):
        b.step(b.run(r, min(step or prompt, prompt - start)))
    r.say(900)
    b.finish(r)
    b.drain()
    return r


@pytest.mark.parametrize("batch", [True, False])
def test_a_prompt_that_was_stored_is_loaded(bench: Make, batch: bool) -> None:
    b = bench(batch=batch)
    store(b, 10, [1, 2, 3])
    assert b.serve(b.request("again", 10), [11, 12, 13]) == 8
    assert b.serve(b.request("whole chunks", 8), [14, 15]) == 8
    assert b.serve(b.request("other tail", [*range(4), 70, 71, 72, 73]), [16, 17]) == 4
    assert b.serve(b.request("other", range(60, 68)), [18, 19]) == 0


@pytest.mark.parametrize("batch", [True, False])
def test_the_batch_form_is_used_where_the_manager_has_it(bench: Make, batch: bool) -> None:
    b = bench(batch=batch)
    store(b, 8, [1, 2])
    b.manager.log.clear()
    b.query(b.request("again", 8))
    assert {verb for verb, _ in b.manager.verbs("match_prefix", "lookup")} == {
        "match_prefix" if batch else "lookup"
    }


def test_what_the_engine_has_itself_is_not_loaded(bench: Make) -> None:
    b = bench()
    store(b, 16, [1, 2, 3, 4])
    r = b.request("again", 16)
    assert b.query(r, 8) == 8
    r.num_computed_tokens = 8
    b.load(r, [1, 2, 13, 14], 8, cached=2)
    (transfer,) = b.step().loads
    assert [chunk.blocks for chunk in transfer.chunks] == [(13,), (14,)]
    b.deliver()
    b.check_device(r, 8, 16)


def test_a_block_whose_content_the_engine_has_is_not_written(bench: Make) -> None:
    """It may be another request's, too."""
    b = bench()
    store(b, 16, [1, 2, 3, 4])
    r = b.request("again", 16)
    assert b.query(r) == 16
    b.load(r, [11, 12, 3, 14], 16, held=[2])
    (transfer,) = b.step().loads
    assert [chunk.blocks for chunk in transfer.chunks] == [(11,), (12,), (14,)]
    b.deliver()
    b.check_device(r, 0, 16)


def test_what_was_loaded_is_not_offered(bench: Make) -> None:
    b = bench()
    store(b, 8, [1, 2])
    r = b.request("again", 12)
    assert b.serve(r, [11, 12, 13]) == 8
    before = len(b.offered())
    b.step(b.run(r, 4))
    assert b.offered()[before:] == b.keys(r)[2:]


def test_a_hit_of_the_engine_that_ends_inside_a_block_gets_nothing_on_top(bench: Make) -> None:
    b = bench()
    store(b, 16, [1, 2, 3, 4])
    assert b.query(b.request("again", 16), 6) == 0


@pytest.mark.parametrize("batch", [True, False])
def test_what_is_further_down_is_waited_for(bench: Make, batch: bool) -> None:
    b = bench(tiers=1, slots=8, batch=batch)
    store(b, 16, [1, 2, 3, 4])
    b.prefill("pusher", range(100, 132), list(range(21, 29)))
    b.step()
    b.deliver()
    b.finish(b.requests["pusher"])
    b.drain()
    again = b.request("again", 16)
    answers = [b.query(again)]
    while answers[-1] is None:
        b.step()
        answers.append(b.query(again))
    assert answers[0] is None and answers[-1] == 16
    b.load(again, [31, 32, 33, 34], 16)
    b.step()
    b.deliver()
    b.check_device(again, 0, 16)


def test_two_requests_do_not_load_one_chunk_at_once(bench: Make) -> None:
    """vllm-project/vllm#29087: the second waits, and then hits."""
    b = bench()
    store(b, 8, [1, 2])
    one, two = b.request("one", 8), b.request("two", [*range(8), 70])
    assert b.query(one) == 8
    b.load(one, [11, 12], 8)
    assert b.query(two) is None
    b.step()
    assert b.query(two) is None
    b.deliver()
    assert b.query(two) == 8 and b.query(two, 8) == 0


def test_an_engine_without_a_prefix_cache_loads_for_each(bench: Make) -> None:
    b = bench(share_loads=False)
    store(b, 8, [1, 2])
    one, two = b.request("one", 8), b.request("two", 8)
    for r, blocks in ((one, [11, 12]), (two, [13, 14])):
        assert b.query(r) == 8
        b.load(r, blocks, 8)
    b.step()
    b.deliver()
    b.check_device(one, 0, 8)
    b.check_device(two, 0, 8)


def test_a_wait_for_another_load_is_only_for_chunks_that_are_needed(bench: Make) -> None:
    b = bench()
    store(b, 8, [1, 2])
    one, two = b.request("one", 8), b.request("two", 8)
    b.query(one)
    b.load(one, [11, 12], 8)
    assert b.query(two, 8) == 0


# Chunks of several blocks


def test_a_hit_that_begins_inside_a_chunk_loads_the_rest_of_it(bench: Make) -> None:
    b = bench(GroupSpec(4, blocks_per_chunk=2))
    store(b, 16, [1, 2, 3, 4])
    r = b.request("again", 16)
    r.num_computed_tokens = 4
    assert b.query(r, 4) == 12
    b.load(r, [1, 12, 13, 14], 12, cached=1)
    (transfer,) = b.step().loads
    assert [(chunk.first, chunk.blocks) for chunk in transfer.chunks] == [(1, (12,)), (0, (13, 14))]
    b.deliver()
    b.check_device(r, 4, 16)


@pytest.mark.parametrize("more", [[], [34]])
def test_a_hit_that_ends_inside_a_coarser_groups_chunk_loads_its_first_blocks(
    bench: Make, more: list[int]
) -> None:
    """However many blocks the engine has allocated beyond."""
    b = bench(GroupSpec(4), GroupSpec(4, blocks_per_chunk=2, index=1))
    r = store(b, 16, [[1, 2, 3, 4], [21, 22, 23, 24]])
    b.real.reset_cache("primary")
    only = b.request("fine three", 16)
    b.query(only)
    b.manager.refuse = {b.keys(r, 0)[3]}
    b.step(b.run(only, 16, [[1, 2, 3, 4], [21, 22, 23, 24]]))
    b.finish(only)
    b.manager.refuse = {b.keys(r, 0)[3]}
    b.drain()
    again = b.request("again", 16)
    assert b.query(again) == 12
    b.load(again, [[11, 12, 13], [31, 32, 33, *more]], 12)
    (transfer,) = b.step().loads
    assert [chunk.blocks for chunk in transfer.chunks if chunk.group == 1] == [(31, 32), (33,)]
    b.deliver()
    b.check_device(again, 0, 12)


def test_less_than_a_chunk_is_not_worth_a_load(bench: Make) -> None:
    b = bench(GroupSpec(4, blocks_per_chunk=4))
    store(b, 32, list(range(1, 9)))
    assert b.query(b.request("again", 16), 8) == 0
    assert b.query(b.request("longer", 32), 8) == 24
    assert b.query(b.request("other tail", [*range(16), *range(70, 86)]), 8) == 0


# What bounds a load


def test_a_client_bounds_what_is_loaded_for_it(bench: Make) -> None:
    b = bench()
    store(b, 16, [1, 2, 3, 4])
    assert b.query(b.request("none", 16, max_load_tokens=0)) == 0
    assert b.query(b.request("within", 16, max_load_tokens=9)) == 8
    assert b.query(b.request("all", 16, max_load_tokens=10**9)) == 16
    assert b.query(b.request("after its own", 16, max_load_tokens=4), 8) == 4


def test_a_request_that_reads_no_cache_loads_nothing_and_stores(bench: Make) -> None:
    b = bench()
    store(b, 8, [1, 2])
    r = b.request("r", 12)
    r.skip_reading_prefix_cache = True  # type: ignore[attr-defined]
    assert b.query(r) == 0
    b.step(b.run(r, 12, [4, 5, 6]))
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2]


# Sliding windows


@pytest.mark.parametrize("window", [2, 4, 5, 9, 12, 64])
def test_of_a_window_what_a_hit_reads_is_loaded(bench: Make, window: int) -> None:
    b = bench(GroupSpec(4), GroupSpec(4, window=window, index=1))
    store(b, 24, [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]])
    r = b.request("again", 25)
    assert b.query(r) == 24
    skipped = max(0, 24 - window + 1) // 4
    b.load(r, [[21, 22, 23, 24, 25, 26], [0] * skipped + list(range(31 + skipped, 37))], 24)
    (transfer,) = b.step().loads
    assert len([chunk for chunk in transfer.chunks if chunk.group == 1]) == 6 - skipped
    b.deliver()
    b.check_device(r, 0, 24)


def test_a_window_finds_the_last_boundary_that_it_covers(bench: Make) -> None:
    """Of the window's chunks the last are missing: the hit ends earlier, for all groups."""
    b = bench(GroupSpec(4), GroupSpec(4, window=9, index=1))
    r = b.request("first", 24)
    b.query(r)
    b.manager.refuse = {b.keys(r, 1)[4]}
    b.step(b.run(r, 24, [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]]))
    b.step()
    b.deliver()
    assert b.query(b.request("again", 25)) == 16


@pytest.mark.parametrize(("taken", "left"), [(31, 31), (28, 0), (16, 16)])
def test_an_engine_that_takes_less_than_was_found_with_a_window(bench: Make, taken: int, left: int) -> None:
    """A smaller end needs other chunks of the window, which hits do not read and nobody has stored: then nothing
    is loaded, and nothing is raised."""
    b = bench(GroupSpec(4, blocks_per_chunk=4), GroupSpec(4, window=7, index=1))
    store(b, 32, [list(range(1, 9)), list(range(11, 19))])
    r = b.request("again", 32)
    assert b.query(r) == 31
    blocks = -(-taken // 4)
    passed = max(0, taken - 6) // 4
    window = [0] * passed + list(range(31 + passed, 31 + blocks))
    b.load(r, [list(range(21, 21 + blocks)), window], taken)
    b.step()
    b.deliver()
    assert b.ended[-1].valid_tokens == left
    if left:
        b.check_device(r, 0, left)
    else:
        assert b.ended[-1].invalid == (frozenset(range(21, 21 + blocks)), frozenset(window) - {0})
        r.num_computed_tokens = 0
        assert b.query(r) == 0
        b.step(b.run(r, 32, [list(range(41, 49)), list(range(51, 59))]))


def test_a_prompt_of_whole_chunks_leaves_the_window_of_its_last_token(bench: Make) -> None:
    """The engine computes the last token again; its window reaches one token further back."""
    b = bench(GroupSpec(4), GroupSpec(4, window=9, index=1))
    store(b, 24, [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]])
    r = b.request("again", 24)
    assert b.query(r) == 23
    b.load(r, [[21, 22, 23, 24, 25, 26], [0, 0, 0, 34, 35, 36]], 23)
    b.step()
    b.deliver()
    b.check_device(r, 0, 24)


@pytest.mark.parametrize("fine", [1, 4])
def test_only_reachable_chunks_of_a_window_are_stored_and_the_same_prompt_is_found(bench: Make, fine: int) -> None:
    """A hit ends at full attention's coarse chunks only; of the window what lies far before is of no use. In the
    last chunk that is of use, blocks that the window has released before it was full do no harm."""
    b = bench(GroupSpec(4, blocks_per_chunk=8), GroupSpec(4, blocks_per_chunk=fine, window=8, index=1))
    b.first_read = lambda group, chunk: 8 if group and fine == 4 else 0  # type: ignore[method-assign]
    r = store(b, 32, [list(range(1, 9)), list(range(11, 19))])
    assert b.stored(r, 1) == ([6, 7] if fine == 1 else [1])
    assert b.query(b.request("again", 33)) == 32


def test_a_window_chunk_whose_needed_block_is_gone_is_not_stored(bench: Make) -> None:
    b = bench(GroupSpec(4, blocks_per_chunk=2, window=8))
    r = b.request("r", 16)
    b.query(r)
    b.step(b.run(r, 16, [0, 2, 3, 4]))
    b.step()
    b.deliver()
    assert b.stored(r) == [1]


# Draft models


@pytest.mark.parametrize(
    "groups",
    [
        [GroupSpec(4)],
        [GroupSpec(4, draft=True)],
        [GroupSpec(4), GroupSpec(4, draft=True, index=1)],
        [GroupSpec(4), GroupSpec(4, draft=True, window=8, index=1)],
        [GroupSpec(4), GroupSpec(4, window=8, index=1)],
    ],
)
@pytest.mark.parametrize("generated", [1, 9])
def test_what_was_stored_is_found_again(bench: Make, groups: list[GroupSpec], generated: int) -> None:
    """vllm-project/vllm#52735: stores went up, and loads stayed at zero. Also where only a tier below has it."""
    b = bench(*groups, slots=80, tiers=1)
    tables = [list(range(1 + 20 * place, 14 + 20 * place)) for place in range(len(groups))]
    r = b.request("first", 40)
    b.query(r)
    b.step(b.run(r, 40, tables))
    for token in range(900, 900 + generated):
        r.say(token)
        b.step(b.run(r, 1))
        b.deliver()
    b.finish(r)
    b.drain()
    found = b.query(b.request("again", 40))
    assert found is not None and found >= 36
    assert b.real.reset_cache("primary").kept == ("t0",)
    below = b.request("from below", 40)
    while b.query(below) is None:
        b.step()
    assert b.serve(below, [fresh_blocks(group, found, 41 + 10 * at) for at, group in enumerate(groups)]) == found
    (transfer,) = b.meta.loads
    read = needed_chunks(groups[-1], 0, found)
    assert len([chunk for chunk in transfer.chunks if chunk.group == 0]) >= 9
    assert len([chunk for chunk in transfer.chunks if chunk.group == len(groups) - 1]) == len(read)


def fresh_blocks(group: GroupSpec, tokens: int, first: int) -> list[int]:
    """Ten blocks that nobody has written, from `first` on; before what a window reads there are none."""
    passed = 0 if group.window is None else max(0, tokens - group.window + 1) // group.tokens_per_block
    return [0] * passed + list(range(first + passed, first + 10))


@pytest.mark.parametrize("window", [None, 8])
def test_the_chunk_after_a_draft_models_hit_must_be_there_too(bench: Make, window: int | None) -> None:
    """What its layers hold for a chunk's last token depends on the token after it."""
    b = bench(GroupSpec(4), GroupSpec(4, draft=True, window=window, index=1))
    store(b, 16, [[1, 2, 3, 4], [11, 12, 13, 14]])
    assert b.query(b.request("same prompt", 16)) == 12
    assert b.query(b.request("other token after the second chunk", [*range(8), 70, 71, 72, 73])) == 4


# Failures


def fail_block(b: Bench, rank: int, *blocks: int, direction: Direction = Direction.LOAD) -> None:
    b.copiers[rank].fail = lambda piece, way: way is direction and piece.block in blocks


def test_a_failed_load_invalidates_exactly_its_blocks_and_the_rest_is_computed(bench: Make) -> None:
    """vllm-project/vllm#39732, LMCache/LMCache#3388."""
    b = bench(GroupSpec(4))
    store(b, 32, list(range(1, 9)))
    r = b.request("again", 32)
    assert b.query(r) == 32
    fail_block(b, 0, 24)
    b.load(r, [21, 23, 25, 24, 27, 29, 31, 33], 32)
    b.step()
    (load,) = b.deliver()
    assert load == EndedLoad("again", 12, (frozenset({24}),), (b.keys(r)[3],)) and not load.ok
    b.check_device(r, 0, 12)
    stats = b.adapter.get_stats()
    assert stats.failed_loads == 1
    r.num_computed_tokens = 12
    b.step(b.run(r, 20))
    b.finish(r)
    b.drain()
    assert b.stored(r) == list(range(8)) and b.real.get_stats().failed == 1


def test_failures_of_several_workers_add_up(bench: Make) -> None:
    """LMCache/LMCache#3388: one worker fails one block, the other another one."""
    b = bench(workers=2)
    store(b, 32, list(range(1, 9)))
    r = b.request("again", 32)
    b.query(r)
    fail_block(b, 0, 27)
    fail_block(b, 1, 31)
    b.load(r, [21, 23, 25, 27, 29, 31, 33, 35], 32)
    b.step()
    assert b.deliver(1) == []
    (load,) = b.deliver(0)
    assert load.invalid == (frozenset({27, 31}),) and load.valid_tokens == 12
    assert load.keys == (b.keys(r)[3], b.keys(r)[5])


def test_a_failed_load_is_not_tried_again_for_ever(bench: Make) -> None:
    """vllm-project/vllm#49176: hit, load fails, hit, load fails. The good prefix is still used."""
    b = bench()
    store(b, 16, [1, 2, 3, 4])
    r = b.request("again", 16)
    b.query(r)
    fail_block(b, 0, 25)
    b.load(r, [21, 23, 25, 27], 16)
    b.step()
    b.deliver()
    r.num_computed_tokens, r.tables = 0, []
    assert b.query(r) == 8
    assert b.query(b.request("another", 16)) == 16


def test_behind_a_sliding_window_a_failed_load_leaves_nothing(bench: Make) -> None:
    """The engine has allocated blocks for the window of the load's end only: at no earlier token can it go on."""
    b = bench(GroupSpec(4), GroupSpec(4, window=8, index=1))
    store(b, 24, [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]])
    r = b.request("again", 25)
    r.num_computed_tokens = 4
    assert b.query(r, 4) == 20
    fail_block(b, 0, 35)
    b.load(r, [[1, 22, 23, 24, 25, 26], [0, 0, 0, 0, 35, 36]], 20, cached=1)
    b.step()
    (load,) = b.deliver()
    assert load.invalid == (frozenset(), frozenset({35}))
    assert load.valid_tokens == 0


def test_a_failed_store_is_a_miss_and_the_others_of_its_job_are_stored(bench: Make) -> None:
    """vllm-project/vllm#39732: a store counts only if all workers have succeeded."""
    b = bench(workers=2)
    fail_block(b, 1, 3, direction=Direction.STORE)
    r = b.prefill("r", 20, [1, 3, 5, 7, 9])
    b.step()
    b.deliver()
    assert b.stored(r) == [0, 2, 3, 4] and b.adapter.get_stats().failed_stores == 1
    b.copiers[1].fail = lambda piece, way: False
    b.prefill("heals", 20, [11, 13, 15, 17, 19]) if b.query(b.request("x", 20)) == 0 else None
    ctx = RequestContext("check")
    b.real.on_new_request(ctx)
    assert b.real.match_prefix(b.keys(r), ctx).hits == 1
    b.real.on_request_finished(ctx)


def test_a_failed_store_is_healed_by_the_next_request(bench: Make) -> None:
    b = bench()
    fail_block(b, 0, 3, direction=Direction.STORE)
    r = b.prefill("r", 12, [1, 3, 5])
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 2]
    fail_block(b, 0)
    again = b.request("again", 12)
    assert b.serve(again, [11, 13, 15]) == 4
    again.num_computed_tokens = 4
    b.step(b.run(again, 8))
    b.finish(again)
    b.drain()
    assert b.stored(r) == [0, 1, 2]


def test_the_head_that_only_the_engine_had_is_offered_with_the_rest(bench: Make) -> None:
    """The manager has lost the first chunk, the engine has it: what is stored becomes a prefix again."""
    b = bench()
    r = b.request("first", 16)
    b.query(r)
    b.manager.refuse = {b.keys(r)[0]}
    b.step(b.run(r, 16, [1, 2, 3, 4]))
    b.step()
    b.deliver()
    assert b.stored(r) == [1, 2, 3]
    again = b.request("again", 17)
    assert b.serve(again, [1, 12, 13, 14], local=4) == 12
    b.step(b.run(again, 1, [15]))
    b.finish(again)
    b.drain()
    assert b.stored(r) == [0, 1, 2, 3]
