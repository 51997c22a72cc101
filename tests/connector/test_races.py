"""Jobs that outlive a step, a preemption, an abort or their request's end; and blocks that are given to others."""

from collections.abc import Callable
from itertools import permutations

import pytest

from kvcascade.connector import GroupSpec
from kvcascade.connector.transfers import WorkerReport

from .conftest import Bench, Request

Make = Callable[..., Bench]
EIGHT = list(range(1, 9))


def stored_prompt(b: Bench, tokens: int, name: str = "first") -> Request:
    """A request that has come and gone; its prompt is in primary."""
    r = b.prefill(name, tokens, list(range(1, tokens // 4 + 2)))
    b.finish(r)
    b.drain()
    return r


def test_the_finish_is_signalled_once_after_the_last_offer_and_cascades_follow_the_store(bench: Make) -> None:
    """vllm-project/vllm#45823: a tier gets no store of a request after its finish."""
    b = bench(tiers=1)
    gate = b.gates[0]
    gate.shut()
    r = b.prefill("r", 8, [1, 2, 3])
    b.finish(r)
    b.step()
    assert [verb for verb, _ in b.manager.verbs("prepare_store", "on_request_finished")] == [
        "prepare_store",
        "on_request_finished",
    ]
    assert b.adapter.has_pending_work()
    b.deliver()
    b.step()
    assert set(gate.wait_for("write").keys) == set(b.keys(r))
    assert b.adapter.has_pending_work()
    gate.open()
    b.drain()
    assert b.stored(r) == [0, 1]


def test_a_readmitted_request_waits_for_its_own_store_and_then_gets_its_true_hit(bench: Make) -> None:
    """vllm-project/vllm#46014."""
    b = bench()
    b.copiers[0].gate.clear()
    r = b.prefill("r", 16, [1, 2, 3, 4])
    r.say(100)
    b.step(preempt=[r])
    assert b.query(r) is None and b.manager.verbs("lookup", "match_prefix", "prepare_load")[1:] == []
    b.copiers[0].gate.set()
    b.deliver()
    assert b.serve(r, [5, 6, 7, 8, 9]) == 16
    assert len(b.manager.verbs("prepare_load")) == 1


def test_a_last_chunk_offered_while_its_blocks_are_handed_out_is_flushed_at_once(bench: Make) -> None:
    """Its blocks are written by another request in the very step that offers it (vllm-project/vllm#41704)."""
    b = bench()
    r = b.request("r", 8)
    r.late = 2
    b.query(r)
    b.step(b.run(r, 8, [1, 2]))
    r.late = 0
    b.finish(r)
    other = b.request("other", range(50, 58))
    b.query(other)
    meta = b.step(b.run(other, 8, [1, 2]))
    assert meta.flush == {transfer.job for transfer in meta.stores if transfer.req_id == "r"} != set()
    b.drain()
    assert b.stored(r) == [0, 1]


def test_a_block_that_is_given_away_while_a_store_reads_it_is_fenced(bench: Make) -> None:
    """vllm-project/vllm#29870: preempted, its blocks are another's in the next step, and the store has not
    begun."""
    b = bench()
    r = b.prefill("r", 16, [1, 2, 3, 4])
    job = b.meta.stores[0].job
    other = b.request("other", range(50, 58))
    b.query(other)
    meta = b.step(b.run(other, 8, [4, 9]), preempt=[r])
    assert meta.flush == {job}
    b.deliver()
    assert b.stored(r) == [0, 1, 2, 3]


def test_a_block_that_a_running_request_grows_into_is_fenced(bench: Make) -> None:
    b = bench()
    other = b.prefill("other", range(50, 58), [11, 12])
    b.step()
    b.deliver()
    r = b.prefill("r", 8, [1, 2])
    job = b.meta.stores[0].job
    b.finish(r)
    other.say(100)
    assert b.step(b.run(other, 1, [2])).flush == {job}
    b.deliver()
    assert b.stored(r) == [0, 1]


def test_a_block_that_is_given_away_for_a_load_is_fenced(bench: Make) -> None:
    """vllm-project/vllm#29870: the new owner's data comes from the host."""
    b = bench()
    first = stored_prompt(b, 8)
    r = b.prefill("r", range(50, 66), [11, 12, 13, 14])
    job = b.meta.stores[0].job
    b.finish(r, "FINISHED_ABORTED")
    again = b.request("again", first.tokens)
    assert b.query(again) == 8
    b.load(again, [13, 14], 8)
    assert b.step().flush == {job}
    b.deliver()
    b.check_device(again, 0, 8)
    assert b.stored(r) == [0, 1, 2, 3]


def test_blocks_that_a_load_still_fills_are_fenced_even_where_the_engine_does_not_keep_them(bench: Make) -> None:
    """vllm-project/vllm#29870, the other way round: what is written there comes after the load, not under it."""
    b = bench()
    first = stored_prompt(b, 8)
    r = b.request("r", first.tokens)
    assert b.query(r) == 8
    b.load(r, [21, 22], 8)
    (load,) = b.step().loads
    b.finish(r, "FINISHED_ABORTED")
    other = b.request("other", range(50, 58))
    b.query(other)
    assert b.step(b.run(other, 8, [31, 22])).flush == {load.job}
    b.check_device(other, 0, 8)
    b.step()
    b.deliver()
    assert b.stored(other) == [0, 1]


@pytest.mark.parametrize("aborts", [False, True])
def test_what_was_found_is_loaded_whatever_else_is_stored_in_the_step(bench: Make, aborts: bool) -> None:
    """vllm-project/vllm#39702: primary is full, and between lookup and load another request stores. It gets the
    room that is left, and the rest once the load has ended, or its request has gone."""
    b = bench(slots=4)
    first = stored_prompt(b, 16)
    other = b.request("other", range(50, 62))
    b.query(other)
    r = b.request("r", first.tokens[:8])
    assert b.query(r) == 8
    b.load(r, [21, 22], 8)
    meta = b.step(b.run(other, 12, [31, 32, 33]))
    assert len(meta.loads[0].chunks) == 2 and len(meta.stores[0].chunks) == 2
    if aborts:
        b.finish(r, "FINISHED_ABORTED")
    b.step()
    assert [(load.req_id, load.ok) for load in b.deliver()] == [("r", True)]
    if not aborts:
        b.check_device(r, 0, 8)
        b.finish(r)
    other.say(100)
    b.step(b.run(other, 1, [34]))
    b.step()
    b.deliver()
    assert b.stored(other) == [0, 1, 2]


def test_what_was_found_in_a_step_and_not_loaded_in_it_may_go(bench: Make) -> None:
    """vllm-project/vllm#39702: the engine had no blocks for it; in the next step less is there, and that is what
    is said."""
    b = bench(slots=4)
    first = stored_prompt(b, 16)
    other = b.request("other", range(50, 62))
    b.query(other)
    r = b.request("r", first.tokens)
    assert b.query(r) == 16
    assert b.step(b.run(other, 12, [31, 32, 33])).stores == [], "what was found stays to the end of the step"
    assert b.query(b.request("asks no more", range(70, 74))) == 0
    other.say(100)
    b.step(b.run(other, 1, [34]))
    b.step()
    b.deliver()
    assert b.stored(other) == [0, 1, 2]
    assert b.query(r) == 4
    b.load(r, [21], 4)
    b.step()
    b.deliver()
    b.check_device(r, 0, 4)


def test_a_copy_between_blocks_is_fenced(bench: Make) -> None:
    b = bench()
    r = b.prefill("r", 8, [1, 2])
    job = b.meta.stores[0].job
    b.finish(r)
    copied = type("Copy", (), {"dst_block_id": 2})()
    output = b._output((), ())
    output.kv_cache_block_copies = [copied]
    assert b.adapter.build_connector_meta(output).flush == {job}
    for worker in b.workers:
        worker.handle_preemptions(b.meta)


def test_blocks_that_are_shared_and_not_written_are_not_fenced(bench: Make) -> None:
    """A request that finds a prefix on the device reads its blocks as the store does: nobody waits."""
    b = bench()
    b.copiers[0].gate.clear()
    r = b.prefill("r", 8, [1, 2, 3])
    other = b.request("other", [*range(8), 50, 51, 52])
    other.num_computed_tokens = 8
    assert b.query(other, 8) == 0
    assert b.step(b.run(r, 0), b.run(other, 3, [1, 2, 4])).flush == set()


def test_a_block_allocated_and_filled_in_one_step_is_not_flushed_before_it_is_filled(bench: Make) -> None:
    b = bench()
    r = b.request("r", 16)
    b.query(r)
    assert b.step(b.run(r, 8, [1, 2])).flush == set()
    assert b.step(b.run(r, 8, [3, 4])).flush == set()
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", list(permutations([0, 1])))
def test_an_abort_with_jobs_in_flight_frees_blocks_after_the_last(bench: Make, order: tuple[int, int]) -> None:
    """vllm-project/vllm#56089: two workers end the load in either order; the blocks are named once, after both."""
    b = bench(workers=2)
    first = stored_prompt(b, 8)
    r = b.request("r", first.tokens)
    assert b.query(r) == 8
    b.load(r, [11, 12], 8)
    b.step()
    assert b.finish(r, "FINISHED_ABORTED") is True
    b.step()
    assert b.deliver(order[0]) == []
    assert [load.req_id for load in b.deliver(order[1])] == ["r"]
    b.drain()
    assert [load.req_id for load in b.ended] == ["r"]


def test_an_abort_with_only_stores_in_flight_lets_the_blocks_go_at_once(bench: Make) -> None:
    b = bench()
    b.copiers[0].gate.clear()
    r = b.prefill("r", 8, [1, 2, 3])
    b.step()
    assert b.finish(r, "FINISHED_ABORTED") is False


def test_stores_of_several_steps_complete_in_any_order(bench: Make) -> None:
    b = bench(workers=2)
    r = b.request("r", 16)
    b.query(r)
    jobs = []
    for part in range(4):
        b.step(b.run(r, 4, [1 + part]))
        jobs += [transfer.job for transfer in b.meta.stores]
    b.step()
    first, second = b.reports(0), b.reports(1)
    for job in reversed(jobs):
        assert b.adapter.update_connector_output(WorkerReport({job: first.ended[job] + second.ended[job]})) == []
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2, 3]


def test_a_job_is_done_when_every_worker_has_reported_it(bench: Make) -> None:
    b = bench(workers=3)
    r = b.prefill("r", 8, [1, 2])
    b.step()
    b.deliver(0)
    b.step(b.run(r, 0))
    b.deliver(2)
    assert b.manager.verbs("complete_store") == [] and b.stored(r) == []
    b.deliver(1)
    assert b.stored(r) == [0, 1]


def test_a_window_that_lets_a_block_go_no_longer_stores_it(bench: Make) -> None:
    """vllm-project/vllm#29870: released by the window before it was stored, since the manager refused."""
    b = bench(GroupSpec(4, window=8))
    b.manager.refuse_all = 1
    r = b.prefill("r", 16, [1, 2, 3, 4])
    other = b.request("other", range(50, 54))
    b.query(other)
    r.say(100)
    b.step(b.run(other, 4, [1]), b.run(r, 1, [5]))
    b.step()
    b.deliver()
    assert b.stored(r) == [1, 2, 3]


def test_pending_work_lasts_exactly_as_long_as_something_is_to_come(bench: Make) -> None:
    """vllm-project/vllm#45595."""
    b = bench()
    assert not b.adapter.has_pending_work()
    r = b.prefill("r", 8, [1, 2, 3])
    b.finish(r)
    assert b.adapter.has_pending_work()
    b.step()
    assert b.adapter.has_pending_work()
    b.deliver()
    assert not b.adapter.has_pending_work()


def test_a_request_that_finishes_waits_for_the_step_that_lists_it(bench: Make) -> None:
    b = bench()
    r = b.request("r", 3)
    b.finish(r)
    assert b.adapter.has_pending_work()
    b.step()
    assert not b.adapter.has_pending_work()


def test_a_request_never_seen_begins_and_ends_at_once(bench: Make) -> None:
    b = bench()
    stranger = Request("stranger", range(8), 4)
    assert b.adapter.request_finished(stranger) is False  # type: ignore[arg-type]
    assert b.manager.log == [("on_new_request", "stranger"), ("on_request_finished", "stranger")]
    b._finished.add("stranger")
    b.step()


def test_a_thousand_aborts_at_any_point_leave_nothing(bench: Make) -> None:
    """vllm-project/vllm#49118, sgl-project/sglang#9927."""
    b = bench(workers=2)
    for number in range(200):
        r = b.request(f"r{number}", [*range(8), number])
        stage = number % 5
        found = b.query(r) if stage else None
        if found and stage > 1:
            b.load(r, [11, 12], found)
        elif stage > 1 and found == 0:
            b.step(b.run(r, 9, [21, 22, 23]))
        if stage > 2:
            b.step()
        if stage > 3:
            b.deliver(number % 2)
        b.finish(r, "FINISHED_ABORTED")
    b.drain()


def test_what_was_computed_from_blocks_that_somebody_else_has_not_filled_is_not_kept(bench: Make) -> None:
    """Another connector was to load the first block, and it has turned out that it did not: what the steps
    computed after it is wrong, also for a request that has found its block in the engine's own cache, and was
    being stored. Nobody stores any of it, whoever is given it by the engine's cache, until it is written anew."""
    b = bench(tiers=1)
    r, other = b.request("r", 16), b.request("other", 20)
    assert b.query(r) == b.query(other) == 0
    r.num_computed_tokens = 4
    b.step(b.run(r, 12, [1, 2, 3, 4]))
    other.num_computed_tokens = 16
    b.manager.refuse_all = 1
    b.step(b.run(other, 4, [1, 2, 3, 4, 5]))  # planned before anything of the step before is known
    b.finish(other, "FINISHED_ABORTED")
    b.adapter.distrust_stores()
    b.deliver()
    r.num_computed_tokens = 0
    r.say(100, 101, 102, 103)
    b.step(b.run(r, 20, [7]))
    b.drain()
    assert b.stored(r) == b.stored(other) == []
    late = b.request("late", 20)
    assert b.query(late, 20) == 0
    late.num_computed_tokens = 16
    b.step(b.run(late, 4, [1, 2, 3, 4, 5]))
    b.drain()
    assert b.stored(late) == []
    b.finish(late)
    fresh = b.prefill("fresh", 20, [5, 4, 3, 2, 1])
    b.drain()
    assert b.stored(fresh) == [0, 1, 2, 3, 4]
