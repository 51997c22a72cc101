"""What is stored of a request, to the last chunk and no further."""

from collections.abc import Callable

import pytest

from kvcascade.connector import GroupSpec

from .conftest import Bench

Make = Callable[..., Bench]


@pytest.mark.parametrize(
    ("prompt", "generated", "end", "stored"),
    [
        pytest.param(8, 1, "FINISHED_STOPPED", [0, 1], id="stops at the first token"),
        pytest.param(6, 3, "FINISHED_STOPPED", [0, 1], id="full in the step of the end"),
        pytest.param(6, 3, "FINISHED_LENGTH_CAPPED", [0, 1], id="full in the step of the end, by length"),
        pytest.param(2, 2, "FINISHED_STOPPED", [], id="the last token has no KV"),
        pytest.param(2, 3, "FINISHED_STOPPED", [0], id="one more token has"),
        pytest.param(4, 1, "FINISHED_STOPPED", [0], id="a prompt of exactly one chunk"),
        pytest.param(6, 0, "FINISHED_ABORTED", [0], id="abort"),
        pytest.param(6, 0, "FINISHED_ERROR", [0], id="an error counts as an abort"),
    ],
)
def test_all_that_was_written_is_stored_and_no_more(
    bench: Make, prompt: int, generated: int, end: str, stored: list[int]
) -> None:
    """vllm-project/vllm#41704, vllm-project/vllm#54193."""
    b = bench()
    r = b.request("r", prompt)
    b.query(r)
    b.step(b.run(r, prompt, [1, 2, 3]))
    for token in range(100, 100 + generated):
        r.say(token)
        if token < 100 + generated - 1:
            b.step(b.run(r, 1))
    b.finish(r, end)
    b.drain()
    assert b.stored(r) == stored


def test_an_abort_in_the_middle_of_a_prompt_stores_what_was_computed(bench: Make) -> None:
    """vllm-project/vllm#41704: at abort the count is what was computed, whatever was allocated and keyed."""
    b = bench()
    r = b.request("r", 16)
    b.query(r)
    b.step(b.run(r, 6, [1, 2, 3, 4]))
    b.finish(r, "FINISHED_ABORTED")
    b.drain()
    assert b.stored(r) == [0]


@pytest.mark.parametrize("end", ["FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"])
def test_the_slot_of_a_rejected_draft_is_never_stored(bench: Make, end: str) -> None:
    """Generation ends on a chunk's boundary, and the slot of its last token holds a rejected draft
    (vllm-project/vllm#54193)."""
    b = bench()
    r = b.prefill("r", 2, [1, 2])
    r.say(100)
    b.step(b.run(r, 3))  # one token and two drafts, which are rejected; the next step has been planned upon them
    r.say(101)
    b.finish(r, end)
    b.drain()
    assert (r.num_tokens, r.num_computed_tokens) == (4, 5) and b.stored(r) == []


def test_drafts_and_placeholders_do_not_count_while_running(bench: Make) -> None:
    b = bench()
    r = b.prefill("r", 3, [1, 2])
    b.step(b.run(r, 3))  # planned before the result of the step before: three tokens that nobody knows
    b.drain()
    assert b.offered() == []
    r.num_computed_tokens = 3
    r.say(100)
    b.step(b.run(r, 3))
    b.step()
    b.deliver()
    assert b.stored(r) == [0]


def test_drafts_do_not_end_the_hold_back(bench: Make) -> None:
    b = bench(GroupSpec(4, draft=True))
    r = b.prefill("r", 4, [1, 2, 3, 4])
    for token in range(100, 104):
        r.say(token)
        b.step(b.run(r, 5))  # one token and four drafts
        r.num_computed_tokens = r.num_tokens
    assert b.offered() == b.keys(r)[:1]


def test_the_last_chunk_whose_hash_comes_late_is_offered_before_the_finish(bench: Make) -> None:
    """vllm-project/vllm#49635: the store of the last block is built in the step after the end."""
    b = bench()
    r = b.request("r", 2)
    r.late = 1
    b.query(r)
    b.step(b.run(r, 2, [1, 2]))
    for token in (100, 101, 102):
        r.say(token)
        b.step(b.run(r, 1)) if token < 102 else None
    b.finish(r)
    r.late = 0
    b.step()
    assert b.manager.verbs("prepare_store", "on_request_finished") == [
        ("prepare_store", b.keys(r)),
        ("on_request_finished", "r"),
    ]
    b.drain()
    assert b.stored(r) == [0]


def test_a_refusal_of_the_last_offer_is_lost_and_counted_and_the_finish_still_comes_once(bench: Make) -> None:
    """vllm-project/vllm#49635, the variant in which nothing is granted."""
    b = bench()
    r = b.request("r", 8)
    r.late = 2
    b.query(r)
    b.step(b.run(r, 8, [1, 2]))
    b.manager.refuse_all = 1
    r.late = 0
    b.finish(r)
    b.drain()
    assert b.manager.verbs("prepare_store", "on_request_finished") == [
        ("prepare_store", b.keys(r)),
        ("on_request_finished", "r"),
    ]
    assert (b.adapter.get_stats().lost_chunks, b.adapter.get_stats().refused_offers) == (2, 1)
    assert b.stored(r) == []


def test_a_refused_range_is_offered_again_from_its_first_chunk(bench: Make) -> None:
    """vllm-project/vllm#54415: refused keys leave no hole."""
    b = bench()
    r = b.request("r", 24)
    b.query(r)
    keys = b.keys(r)
    b.manager.refuse = set(keys[2:4])
    b.step(b.run(r, 16, [1, 2, 3, 4]))
    b.step(b.run(r, 8, [5, 6]))
    assert [offer for _, offer in b.manager.verbs("prepare_store")] == [keys[:4], keys[2:]]
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2, 3, 4, 5]


def test_an_offer_that_has_no_room_is_made_again(bench: Make) -> None:
    """vllm-project/vllm#26329: a refusal is a normal answer."""
    b = bench()
    b.manager.refuse_all = 2
    r = b.prefill("r", 8, [1, 2, 3])
    for token in range(100, 103):
        r.say(token)
        b.step(b.run(r, 1))
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1]
    assert [keys for _, keys in b.manager.verbs("prepare_store")] == [b.keys(r)[:2]] * 3
    assert b.adapter.get_stats().refused_offers == 2 and b.adapter.get_stats().lost_chunks == 0


def test_chunks_are_stored_without_a_hole_through_chunked_prefill_and_hold_back(bench: Make) -> None:
    """vllm-project/vllm#46971: a draft model's newest chunk waits while decoding, and is not jumped over."""
    b = bench(GroupSpec(4, draft=True))
    r = b.request("r", 128)
    b.query(r)
    for part in range(4):
        b.step(b.run(r, 32, range(1 + 8 * part, 9 + 8 * part)))
    assert b.offered() == b.keys(r)
    for token in range(100, 106):
        r.say(token)
        b.step(b.run(r, 1, [40] if token == 100 else [41] if token == 104 else None))
        b.deliver()
    assert b.stored(r) == list(range(32))  # of chunk 32, full by now, nothing
    b.finish(r)
    b.drain()
    assert b.stored(r) == list(range(33)) and b.offered() == b.keys(r)


def test_a_draft_group_holds_back_nothing_of_the_prompt_and_one_chunk_of_the_output(bench: Make) -> None:
    b = bench(GroupSpec(4), GroupSpec(4, draft=True, index=1))
    r = b.prefill("r", 8, [[1, 2, 3, 4], [11, 12, 13, 14]])
    for token in range(100, 109):
        r.say(token)
        b.step(b.run(r, 1))
        b.deliver()
    b.step()
    b.deliver()
    assert (b.stored(r, 0), b.stored(r, 1)) == ([0, 1, 2, 3], [0, 1, 2])
    b.finish(r)
    b.drain()
    assert (b.stored(r, 0), b.stored(r, 1)) == ([0, 1, 2, 3], [0, 1, 2, 3])


def test_a_long_prompt_is_stored_to_its_last_block(bench: Make) -> None:
    """vllm-project/vllm#53498: 217 blocks, four a step, then decoding."""
    b = bench(GroupSpec(1), slots=220)
    r = b.request("r", 217)
    b.query(r)
    for start in range(0, 217, 4):
        count = min(4, 217 - start)
        b.step(b.run(r, count, [1 + (start + at) % 60 for at in range(count)]))
        b.deliver()
    r.say(500)
    b.finish(r)
    b.drain()
    assert len(b.stored(r)) == 217 and b.real.get_stats().tiers[0].written == 217


def test_the_least_of_tokens_blocks_and_keys_counts(bench: Make) -> None:
    """vllm-project/vllm#52170: six blocks by tokens, four allocated, five keyed."""
    b = bench()
    r = b.request("r", 24)
    r.late = 1
    b.query(r)
    b.step(b.run(r, 24, [1, 2, 3, 4]))
    assert [keys for _, keys in b.manager.verbs("prepare_store")] == [b.keys(r)[:4]]
    b.step()
    b.deliver()
    r.late, r.num_computed_tokens = 0, 16
    b.step(b.run(r, 8, [5, 6]))
    assert [keys for _, keys in b.manager.verbs("prepare_store")] == [b.keys(r)[:4], b.keys(r)[4:]]
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("computed", [0, 8])
def test_a_request_that_was_never_scheduled_stores_nothing(bench: Make, computed: int) -> None:
    """vllm-project/vllm#49118: its hashes are there, its blocks are not."""
    b = bench()
    r = b.request("r", 16)
    r.num_computed_tokens = computed
    b.finish(r, "FINISHED_ABORTED")
    b.step()
    assert b.manager.verbs("on_new_request", "prepare_store", "on_request_finished") == [
        ("on_new_request", "r"),
        ("on_request_finished", "r"),
    ]


def test_a_preempted_request_that_is_aborted_stores_nothing_more(bench: Make) -> None:
    """vllm-project/vllm#49118, with blocks that it has lost."""
    b = bench()
    r = b.request("r", 16)
    b.query(r)
    b.step(b.run(r, 10, [1, 2, 3, 4]))
    b.step(preempt=[r])
    r.num_computed_tokens = 16  # whatever the engine says of it now
    b.finish(r, "FINISHED_ABORTED")
    b.drain()
    assert b.offered() == b.keys(r)[:2]


def test_a_request_that_asks_again_has_no_blocks_whether_or_not_its_preemption_was_listed(bench: Make) -> None:
    """vllm-project/vllm#49118: somebody else's data is in the blocks that it had."""
    b = bench()
    r = b.request("r", 16)
    b.query(r)
    b.step(b.run(r, 10, [1, 2, 3, 4]))
    assert b.query(r) is None
    r.num_computed_tokens = 16  # whatever the engine says of it now
    b.finish(r, "FINISHED_ABORTED")
    b.drain()
    assert b.offered() == b.keys(r)[:2]


def test_a_request_that_was_preempted_and_finishes_at_once_stores_nothing_of_its_lost_blocks(bench: Make) -> None:
    """Both are listed in the same step; somebody else's data is in the blocks."""
    b = bench()
    r = b.prefill("r", 14, [1, 2, 3, 4])
    r.say(100, 101, 102)
    b.finish(r)
    b.step(preempt=[r])
    assert b.offered() == b.keys(r)[:3]


def test_only_prompts_are_stored_where_that_is_asked(bench: Make) -> None:
    b = bench(prompt_only=True)
    r = b.prefill("r", 10, [1, 2, 3, 4])
    for token in range(100, 106):
        r.say(token)
        b.step(b.run(r, 1))
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1] and b.offered() == b.keys(r)[:2]


def test_a_client_bounds_what_is_stored_of_it(bench: Make) -> None:
    b = bench()
    r = b.prefill("r", 16, [1, 2, 3, 4], max_offload_tokens=11)
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1]


@pytest.mark.parametrize(("priority", "written"), [("low", False), ("normal", True)])
def test_the_stack_hears_what_a_client_wishes(bench: Make, priority: str, written: bool) -> None:
    b = bench(tiers=1)
    r = b.prefill("r", 8, [1, 2, 3], kvcascade={"priority": priority})
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1]
    assert any(call.verb == "write" for call in b.gates[0].calls) == written


def test_hashes_that_the_engine_takes_back_leave_no_key(bench: Make) -> None:
    """An engine may replace its newest tokens; what is stored afterwards is stored under their own keys."""
    b = bench()
    r = b.request("r", 10)
    b.query(r)
    b.step(b.run(r, 10, [1, 2, 3]))
    r.say(100, 101)
    b.step(b.run(r, 0))
    r.tokens[9:] = [200, 201, 202, 203]
    r.num_computed_tokens = 9
    b.step(b.run(r, 4, [4]))
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2]


def test_a_prompt_larger_than_primary_keeps_the_prefix_that_fits(bench: Make) -> None:
    """One offer of six chunks meets four slots: the first four are granted, the rest is offered again until there
    is room, or the request has ended (vllm-project/vllm#26329, vllm-project/vllm#54415)."""
    b = bench(slots=4)
    r = b.prefill("r", 24, [1, 2, 3, 4, 5, 6])
    assert [len(transfer.chunks) for transfer in b.meta.stores] == [4]
    b.step()
    b.deliver()
    assert b.stored(r) == [0, 1, 2, 3]
    r.say(100)
    assert b.step(b.run(r, 1, [7])).stores == [], "its own head does not go for its tail"
    assert b.offered()[6:] == b.keys(r)[4:]
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2, 3]
    assert b.adapter.get_stats().lost_chunks == 2 and b.adapter.get_stats().refused_offers == 3
    assert b.serve(b.request("again", 24), [11, 12, 13, 14, 15, 16]) == 16


def test_what_was_refused_for_lack_of_room_is_stored_when_there_is_some(bench: Make) -> None:
    b = bench(slots=4)
    b.copiers[0].gate.clear()
    other = b.prefill("other", range(50, 58), [11, 12])
    r = b.prefill("r", 16, [1, 2, 3, 4])
    assert [len(transfer.chunks) for transfer in b.meta.stores] == [2]
    b.copiers[0].gate.set()
    b.finish(other)
    b.step()
    b.deliver()
    r.say(100)
    (store,) = b.step(b.run(r, 1, [5])).stores
    assert [chunk.blocks for chunk in store.chunks] == [(3,), (4,)]
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2, 3] and b.adapter.get_stats().lost_chunks == 0


def test_at_a_requests_end_the_prefix_that_fits_is_stored(bench: Make) -> None:
    """Its hashes have come late, and all it has is offered in one last offer."""
    b = bench(slots=4)
    r = b.request("r", 24)
    r.late = 6
    b.query(r)
    b.step(b.run(r, 24, [1, 2, 3, 4, 5, 6]))
    r.late = 0
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2, 3] and b.adapter.get_stats().lost_chunks == 2
