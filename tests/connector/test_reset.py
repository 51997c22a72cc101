"""A reset between two steps, with anything in flight."""

from collections.abc import Callable

import pytest

from kvcascade.connector import GroupSpec, WorkerReport
from kvcascade.errors import ProtocolError

from .conftest import Bench, Request

Make = Callable[..., Bench]


def stored_prompt(b: Bench, tokens: int) -> Request:
    r = b.prefill("first", tokens, list(range(1, tokens // 4 + 2)))
    b.finish(r)
    b.drain()
    return r


def test_a_live_request_is_not_deferred_after_a_reset_and_stores_all_again(bench: Make) -> None:
    """vllm-project/vllm#48102."""
    b = bench()
    b.copiers[0].gate.clear()
    r = b.prefill("r", 16, [1, 2, 3, 4])
    b.step()
    assert b.adapter.reset_cache().ok
    assert b.query(r) == 0
    b.copiers[0].gate.set()
    b.deliver()
    assert b.stored(r) == []
    r.num_computed_tokens, r.resumed, r.tables = 0, True, []
    b.step(b.run(r, 16, [5, 6, 7, 8]))
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2, 3]


def test_a_running_request_offers_again_from_its_first_chunk(bench: Make) -> None:
    b = bench()
    r = b.prefill("r", 12, [1, 2, 3, 4])
    b.step()
    b.deliver()
    assert b.stored(r) == [0, 1, 2]
    b.adapter.reset_cache()
    assert b.stored(r) == []
    r.say(100)
    b.step(b.run(r, 1))
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2]


def test_chunks_whose_old_copy_still_runs_are_offered_when_it_has_ended(bench: Make) -> None:
    """vllm-project/vllm#48102: their slots are out of use until then; no hole is left."""
    b = bench()
    b.copiers[0].gate.clear()
    r = b.prefill("r", 12, [1, 2, 3, 4])
    b.step()
    report = b.adapter.reset_cache()
    assert report.quarantined == 3
    r.say(100)
    b.plan(late := b.run(r, 1))
    assert len(b.offered()) == 3
    b.copiers[0].gate.set()
    b.work(late)
    b.deliver()
    r.say(101)
    b.step(b.run(r, 1))
    assert b.offered()[3:] == b.keys(r)
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1, 2]


def test_jobs_in_flight_are_flushed_in_the_step_after_a_reset(bench: Make) -> None:
    """vllm-project/vllm#41956: no copy of before runs on beside what comes after."""
    b = bench()
    first = stored_prompt(b, 8)
    storing = b.prefill("storing", range(50, 58), [11, 12])
    jobs = {transfer.job for transfer in b.meta.stores}
    loading = b.request("loading", first.tokens)
    b.query(loading)
    b.load(loading, [21, 22], 8)
    jobs |= {transfer.job for transfer in b.step().loads}
    b.adapter.reset_cache()
    assert b.step().flush == jobs
    b.finish(storing, "FINISHED_ABORTED")


def test_two_resets_in_a_row_keep_the_flush_list(bench: Make) -> None:
    b = bench()
    b.prefill("r", 8, [1, 2])
    jobs = {transfer.job for transfer in b.meta.stores}
    b.adapter.reset_cache()
    b.adapter.reset_cache()
    assert b.step().flush == jobs


def test_the_store_of_a_voided_job_does_not_bring_its_chunk_back(bench: Make) -> None:
    """vllm-project/vllm#41956, vllm-project/vllm#44541: a completion re-validates a dropped block."""
    b = bench()
    b.copiers[0].gate.clear()
    r = b.prefill("r", 8, [1, 2])
    b.step()
    b.adapter.reset_cache()
    b.copiers[0].gate.set()
    b.step()
    b.deliver()
    assert b.stored(r) == [] and b.manager.verbs("complete_store") != []
    assert b.real.get_stats().free_slots == b.real.pool.slots


def test_a_load_of_before_a_reset_comes_back_as_not_loaded(bench: Make) -> None:
    """vllm-project/vllm#48102: the request that waits for it goes on, and computes all."""
    b = bench()
    first = stored_prompt(b, 8)
    r = b.request("r", first.tokens)
    assert b.query(r) == 8
    b.load(r, [21, 22], 8)
    b.step()
    b.adapter.reset_cache()
    (load,) = b.deliver()
    assert (load.req_id, load.valid_tokens, load.invalid) == ("r", 0, (frozenset({21, 22}),))
    r.num_computed_tokens, r.tables = 0, []
    assert b.query(r) == 0
    b.step(b.run(r, 8, [21, 22]))
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1]


def load_and_store(b: Bench) -> tuple[Request, int, int]:
    """A request with a load in flight, and a store of before a reset: their jobs, in this order."""
    first = stored_prompt(b, 8)
    r = b.request("r", [*first.tokens, *range(70, 78)])
    assert b.serve(r, [11, 12]) == 8
    (store,) = b.step(b.run(r, 8, [13, 14])).stores
    b.step(preempt=[r])
    b.adapter.reset_cache("primary")
    while (found := b.query(r)) is None:
        b.step()
    b.load(r, [21, 22], found)
    (load,) = b.step().loads
    assert b.reports().ended == {store.job: 1, load.job: 1}
    return r, load.job, store.job


@pytest.mark.parametrize("load_first", [True, False])
def test_a_load_and_a_store_of_one_request_end_in_one_report(bench: Make, load_first: bool) -> None:
    """vllm-project/vllm#56089: each ends as what it is."""
    b = bench(tiers=1)
    r, load, store = load_and_store(b)
    order = [load, store] if load_first else [store, load]
    (done,) = b.adapter.update_connector_output(WorkerReport(dict.fromkeys(order, 1)))
    assert done.ok and (done.req_id, done.valid_tokens) == ("r", 8)
    b.check_device(r, 0, 8)
    assert b.stored(r) == [0, 1] and b.adapter.jobs_known == 0


@pytest.mark.parametrize("load_first", [True, False])
def test_an_abort_with_a_load_and_a_store_in_flight_frees_its_blocks_once(bench: Make, load_first: bool) -> None:
    """vllm-project/vllm#56089: by the load's end, whenever the store ends; and nothing is raised for the other."""
    b = bench(tiers=1)
    r, load, store = load_and_store(b)
    assert b.finish(r, "FINISHED_ABORTED") is True
    b.step()
    freed = [
        [done.req_id for done in b.adapter.update_connector_output(WorkerReport({job: 1}))]
        for job in ((load, store) if load_first else (store, load))
    ]
    assert freed == ([["r"], []] if load_first else [[], ["r"]])
    b.step()
    assert (b.adapter.jobs_known, b.adapter.requests_known, len(b.adapter._fences)) == (0, 0, 0)


def test_keys_that_were_being_loaded_do_not_hold_others_back(bench: Make) -> None:
    b = bench()
    first = stored_prompt(b, 8)
    r = b.request("r", first.tokens)
    b.query(r)
    b.load(r, [21, 22], 8)
    b.step()
    b.adapter.reset_cache()
    assert b.query(b.request("other", first.tokens)) == 0


def test_finished_requests_are_finalised_before_the_manager_is_reset(bench: Make) -> None:
    b = bench()
    r = b.prefill("r", 8, [1, 2, 3])
    b.finish(r)
    b.adapter.reset_cache()
    b.step()
    assert [verb for verb, _ in b.manager.verbs("on_request_finished", "reset_cache")] == [
        "on_request_finished",
        "reset_cache",
    ]


def test_late_reports_of_jobs_of_before_change_nothing(bench: Make) -> None:
    """vllm-project/vllm#48102: they are ignored without touching what came after."""
    b = bench()
    r = b.prefill("r", 8, [1, 2, 3])
    b.step()
    report = b.reports()
    b.adapter.update_connector_output(report)
    b.adapter.reset_cache()
    r.say(100)
    b.step(b.run(r, 1))
    assert b.adapter.update_connector_output(report) == []
    assert b.adapter.get_stats().late_reports == 1 and b.stored(r) == []
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1]


def test_a_reset_in_the_middle_of_a_step_is_refused(bench: Make) -> None:
    b = bench()
    first = stored_prompt(b, 8)
    r = b.request("r", first.tokens)
    b.query(r)
    b.load(r, [21, 22], 8)
    with pytest.raises(ProtocolError, match="middle of a step"):
        b.adapter.reset_cache()
    b.step()
    b.deliver()
    assert b.adapter.reset_cache().ok


def test_a_reset_after_an_allocation_that_loads_nothing_is_refused_too(bench: Make) -> None:
    """The request's blocks are in no plan yet."""
    b = bench()
    r = b.request("r", 8)
    assert b.query(r) == 0
    b.load(r, [1, 2], 0)
    with pytest.raises(ProtocolError, match="middle of a step"):
        b.adapter.reset_cache()
    r.tables = []
    b.step(b.run(r, 8, [1, 2]))
    assert b.adapter.reset_cache().ok


def test_what_was_found_before_a_reset_is_not_loaded_after_it(bench: Make) -> None:
    b = bench()
    first = stored_prompt(b, 8)
    r = b.request("r", first.tokens)
    assert b.query(r) == 8
    b.adapter.reset_cache()
    with pytest.raises(ProtocolError, match="at most 0"):
        b.load(r, [21, 22], 8)


def test_blocks_that_a_window_had_let_go_of_are_not_stored_again(bench: Make) -> None:
    """Stored once, released by the window, somebody else's by now: a reset makes everything unstored again."""
    b = bench(GroupSpec(4, window=8))
    r = b.prefill("r", 24, [1, 2, 3, 4, 5, 6])
    other = b.request("other", range(50, 54))
    b.query(other)
    r.say(100)
    b.step(b.run(other, 4, [1]), b.run(r, 1, [7]))
    b.step()
    b.deliver()
    b.adapter.reset_cache()
    r.say(101)
    b.step(b.run(r, 1))
    b.step()
    b.deliver()
    assert b.stored(r) == [4, 5]


def test_the_answer_of_a_reset_is_the_managers(bench: Make) -> None:
    """vllm-project/vllm#57727: the reply says which tiers were kept."""
    b = bench(tiers=1)
    r = stored_prompt(b, 8)
    assert b.adapter.reset_cache("primary").kept == ("t0",)
    again = b.request("again", r.tokens)
    while (found := b.query(again)) is None:
        b.step()
    assert found == 8
    assert b.adapter.reset_cache("all").cleared == ("host", "t0")
    assert b.query(again) == 0


@pytest.mark.parametrize("groups", [[GroupSpec(4)], [GroupSpec(4), GroupSpec(4, window=8, index=1)]])
@pytest.mark.parametrize("workers", [1, 2])
def test_resets_at_any_point_leave_nothing(bench: Make, groups: list[GroupSpec], workers: int) -> None:
    b = bench(*groups, workers=workers, slots=24)
    tables = [[20 * place + at for at in range(1, 4)] for place in range(len(groups))]
    for number in range(60):
        r = b.request(f"r{number}", [*range(8), number % 7])
        found = b.query(r)
        if found == 0:
            b.step(b.run(r, 9, tables))
        elif found:
            b.load(r, [table[: -(-found // 4)] for table in tables], found)
            b.step()
        if number % 4 == 0:
            b.step()
        if number % 3 == 0:
            b.deliver(number % workers)
        if number % 5 == 0:
            b.adapter.reset_cache()
        b.finish(r, "FINISHED_ABORTED" if number % 2 else "FINISHED_STOPPED")
    b.drain()
