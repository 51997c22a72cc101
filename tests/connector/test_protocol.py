"""Engines that break the protocol, and clients that send anything."""

import logging
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvcascade.connector import GroupSpec, SchedulerAdapter
from kvcascade.connector.transfers import WorkerReport
from kvcascade.errors import ConfigError, ProtocolError

from .conftest import Bench, Request

Make = Callable[..., Bench]


def stored_prompt(b: Bench) -> Request:
    r = b.prefill("first", 8, [1, 2, 3])
    b.finish(r)
    b.drain()
    return r


def test_a_request_that_nobody_announced(bench: Make) -> None:
    b = bench()
    stranger: Any = Request("stranger", range(8), 4)
    with pytest.raises(ProtocolError, match=r"'stranger' is not running; on_new_request must come before"):
        b.adapter.get_num_new_matched_tokens(stranger, 0)
    with pytest.raises(ProtocolError, match="stranger"):
        b.adapter.update_state_after_alloc(stranger, SimpleNamespace(blocks=[[]]), 4)
    with pytest.raises(ProtocolError, match="stranger"):
        b.step(b.run(stranger, 4, [1]))


def test_a_request_announced_twice(bench: Make) -> None:
    b = bench()
    r = b.request("r", 8)
    with pytest.raises(ProtocolError, match="'r' is in use"):
        b.adapter.on_new_request(r)
    b.finish(r)
    with pytest.raises(ProtocolError, match="until the step that lists it as finished"):
        b.adapter.on_new_request(r)
    with pytest.raises(ProtocolError, match="has finished already"):
        b.adapter.request_finished(r)
    b.step()
    b.request("r", 8)


def test_a_request_that_has_finished_and_is_not_listed(bench: Make) -> None:
    """Its blocks would be written by others before its last chunks are offered."""
    b = bench()
    r = b.prefill("r", 8, [1, 2])
    b.finish(r)
    listed, b._finished = b._finished, set()
    with pytest.raises(ProtocolError, match="'r' has finished; it was expected in finished_req_ids"):
        b.step()
    b._finished = listed
    b.drain()


def test_a_block_that_holds_nothing_is_not_loaded_into(bench: Make) -> None:
    b = bench()
    stored_prompt(b)
    r = b.request("again", 8)
    found = b.query(r)
    blocks = [SimpleNamespace(block_id=block, is_null=False, block_hash=None) for block in (0, 9)]
    with pytest.raises(
        ProtocolError, match="'again' was given block 0 in group 0; that is the id of the block that"
    ):
        b.adapter.update_state_after_alloc(r, SimpleNamespace(blocks=[blocks]), found)
    b.load(r, [8, 9], found)
    b.step()
    b.deliver()
    b.check_device(r, 0, found)


def test_a_hit_of_an_earlier_step(bench: Make) -> None:
    b = bench()
    stored_prompt(b)
    r = b.request("again", 8)
    assert b.query(r) == 8
    b.step()
    with pytest.raises(ProtocolError, match="8 tokens to load for 'again'; at most 0 were found"):
        b.load(r, [8, 9], 8)
    b.plan()
    assert b.serve(r, [8, 9]) == 8


def test_a_job_that_nobody_began(bench: Make) -> None:
    b = bench()
    with pytest.raises(ProtocolError, match="job 7: reported by 1 workers; 0 of 1 were expected"):
        b.adapter.update_connector_output(WorkerReport({7: 1}))


def test_a_job_that_more_workers_report_than_there_are(bench: Make) -> None:
    b = bench(workers=2)
    b.prefill("r", 8, [1, 2])
    (transfer,) = b.meta.stores
    with pytest.raises(ProtocolError, match="reported by 3 workers; 2 of 2 were expected"):
        b.adapter.update_connector_output(WorkerReport({transfer.job: 3}))
    b.step()
    b.deliver()
    with pytest.raises(ProtocolError, match="0 of 2"):
        b.adapter.update_connector_output(WorkerReport({transfer.job: 1}))


@pytest.mark.parametrize(
    ("ended", "failed", "message"),
    [
        ({99: 1}, {}, "job 99: reported by 1 workers; 0 of 1 were expected"),
        ({-1: 1}, {}, "job -1: reported by 1 workers; 0 of 1 were expected"),
        ({}, {"load": {2}}, r"chunks \[2\] have failed; it has chunks 0 to 1"),
        ({}, {"load": {0, -1}}, r"chunks \[-1, 0\] have failed; it has chunks 0 to 1"),
        ({}, {99: {0}}, "job 99: chunks have failed, but it is not among those that have ended"),
    ],
)
def test_of_a_wrong_report_nothing_is_applied(
    bench: Make, ended: dict[int, int], failed: dict[Any, set[int]], message: str
) -> None:
    """The load that it names too is not lost: it ends with the next report that is right."""
    b = bench()
    r = b.request("r", stored_prompt(b).tokens)
    assert b.query(r) == 8
    b.load(r, [11, 12], 8)
    (load,) = b.step().loads
    right = b.reports()
    places = {load.job if job == "load" else job: chunks for job, chunks in failed.items()}
    with pytest.raises(ProtocolError, match=message):
        b.adapter.update_connector_output(WorkerReport({**right.ended, **ended}, places))
    (done,) = b.adapter.update_connector_output(right)
    assert done.ok and (done.req_id, done.valid_tokens) == ("r", 8)


def test_fewer_blocks_than_the_engine_says(bench: Make) -> None:
    b = bench()
    r = b.request("r", stored_prompt(b).tokens)
    assert b.query(r) == 8
    with pytest.raises(ProtocolError, match="has 1 blocks in group 0; 8 tokens take 2"):
        b.load(r, [11], 8)
    b.query(r)
    with pytest.raises(ProtocolError, match="12 tokens to load for 'r'; at most 8 were found"):
        b.load(r, [11, 12, 13], 12)


def test_block_lists_that_lack_a_group(bench: Make) -> None:
    b = bench(GroupSpec(4), GroupSpec(4, index=1))
    r = b.request("r", 8)
    output = b._output((), ())
    output.scheduled_new_reqs = [SimpleNamespace(req_id="r", block_ids=([1, 2],), num_computed_tokens=0)]
    with pytest.raises(ProtocolError, match="block lists of 1 groups; group 1 was expected"):
        b.adapter.build_connector_meta(output)
    assert r.request_id in b.requests


def test_of_a_wrong_step_nothing_is_taken_over(bench: Make) -> None:
    """The step that comes after it in its place gives the same blocks once, not twice."""
    b = bench(GroupSpec(4), GroupSpec(4, index=1))
    right, wrong = b.request("right", 8), b.request("wrong", range(50, 58))
    runs = b.run(right, 8, [[1, 2], [11, 12]]), b.run(wrong, 8, [[3, 4], [13, 14]])
    output = b._output(runs, ())
    lists = output.scheduled_new_reqs[1].block_ids
    output.scheduled_new_reqs[1].block_ids = lists[:1]
    with pytest.raises(ProtocolError, match="'wrong' has block lists of 1 groups; group 1 was expected"):
        b.adapter.build_connector_meta(output)
    assert b.adapter.reset_cache().ok  # no step is under way
    output.scheduled_new_reqs[1].block_ids = lists
    b.meta = b.adapter.build_connector_meta(output)
    b.work(*runs)
    b.step()
    b.deliver()
    assert b.stored(right) == b.stored(wrong, 1) == [0, 1]


def test_a_request_that_is_listed_as_finished_and_was_not(bench: Make) -> None:
    """It would be kept for ever."""
    b = bench()
    b.prefill("r", 8, [1, 2])
    output = b._output((), ())
    output.finished_req_ids = {"r"}
    with pytest.raises(ProtocolError, match="'r' is listed as finished; request_finished must come before"):
        b.adapter.build_connector_meta(output)


@pytest.mark.parametrize("known", [True, False])
def test_a_name_may_be_used_again_before_the_step_that_lists_it_where_it_is_over(bench: Make, known: bool) -> None:
    """A reset ends what has finished; of a request that was never announced nothing is kept."""
    b = bench()
    if known:
        b.finish(b.prefill("r", 8, [1, 2]))
        b.adapter.reset_cache()
    else:
        r: Any = Request("r", range(8), 4)
        b.adapter.request_finished(r)
        b._finished.add("r")
    b.request("r", 8)
    b.step()
    assert b.adapter.requests_known == 1


@pytest.mark.parametrize("lists", ["req_ids", "new_block_ids", "num_computed_tokens"])
def test_lists_of_a_step_that_are_not_parallel(bench: Make, lists: str) -> None:
    b = bench()
    r = b.prefill("r", 8, [1, 2, 3])
    output = b._output([b.run(r, 1)], ())
    getattr(output.scheduled_cached_reqs, lists).clear()
    with pytest.raises(
        ProtocolError, match=r"have \[[01], [01], [01]\] entries; one for each request was expected"
    ):
        b.adapter.build_connector_meta(output)


@pytest.mark.parametrize("preempted", [True, False])
def test_a_request_that_is_scheduled_without_blocks(bench: Make, preempted: bool) -> None:
    b = bench()
    r = b.prefill("r", 8, [1, 2]) if preempted else b.request("r", 8)
    output = b._output((), [r] if preempted else [])
    output.num_scheduled_tokens = {"r": 8}
    with pytest.raises(
        ProtocolError, match="'r' is scheduled and has no blocks; it was expected in scheduled_new"
    ):
        b.adapter.build_connector_meta(output)


def test_a_step_with_fewer_blocks_than_tokens_is_no_error(bench: Make) -> None:
    """vllm-project/vllm#52170: what has no block yet is stored when it has one."""
    b = bench()
    r = b.prefill("r", 8, [1])
    assert b.offered() == b.keys(r)[:1]
    r.num_computed_tokens = 4
    b.step(b.run(r, 4, [2]))
    b.finish(r)
    b.drain()
    assert b.stored(r) == [0, 1]


def test_a_load_that_was_not_asked_for_or_twice(bench: Make) -> None:
    b = bench()
    r = b.request("r", stored_prompt(b).tokens)
    with pytest.raises(ProtocolError, match="at most 0 were found"):
        b.load(r, [11, 12], 8)
    b.query(r)
    b.load(r, [11, 12], 8)
    with pytest.raises(ProtocolError, match="at most 0 were found"):
        b.load(r, [13, 14], 8)


def test_a_request_that_is_scheduled_while_it_loads(bench: Make) -> None:
    b = bench()
    r = b.request("r", stored_prompt(b).tokens)
    b.query(r)
    b.load(r, [11, 12], 8)
    with pytest.raises(ProtocolError, match="'r' is scheduled, but its load has not ended"):
        b.step(b.run(r, 1, [13]))
    b.step()
    b.deliver()


@pytest.mark.parametrize("name", ["max_load_tokens", "max_offload_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "8", True, [], {}, float("nan")])
def test_nonsense_from_a_client_is_ignored_with_one_warning(
    bench: Make, caplog: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    b = bench()
    first = stored_prompt(b)
    with caplog.at_level(logging.WARNING):
        r = b.request("r", first.tokens, **{name: value})
        assert b.serve(r, [11, 12]) == 8
        r.say(100, 101, 102, 103)
        b.step(b.run(r, 4, [13]))
        b.finish(r)
        b.drain()
    assert b.stored(r) == [0, 1, 2]
    (record,) = caplog.records
    assert name in record.getMessage() and "integer of at least 0" in record.getMessage()


@pytest.mark.parametrize("params", [None, [], "max_load_tokens", 7, {"other": 1}, {"max_load_tokens": None}])
def test_parameters_of_any_kind_do_no_harm(bench: Make, caplog: pytest.LogCaptureFixture, params: object) -> None:
    b = bench()
    r = Request("r", range(8), 4)
    r.kv_transfer_params = params  # type: ignore[assignment]
    b.requests["r"] = r
    b.adapter.on_new_request(r)
    assert b.query(r) == 0 and not caplog.records


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([], {}, "at least one group"),
        ([GroupSpec(4), GroupSpec(4)], {}, "each with an index of its own"),
        ([GroupSpec(4)], {"tokens_per_hash": 3}, "must be a multiple"),
        ([GroupSpec(4)], {"tokens_per_hash": -4}, "must be a multiple"),
        ([GroupSpec(4)], {"workers": 0}, "at least 1"),
    ],
)
def test_settings_that_cannot_be(groups: list[GroupSpec], options: dict[str, Any], message: str) -> None:
    manager: Any = None
    with pytest.raises(ConfigError, match=message):
        SchedulerAdapter(manager, groups, **options)


@pytest.mark.parametrize(
    "numbers",
    [{"tokens_per_block": 0}, {"blocks_per_chunk": 0}, {"window": 1}, {"index": -1}, {"blocks_per_chunk": True}],
)
def test_groups_that_cannot_be(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"groups\[.*\]\.{next(iter(numbers))}: .*an integer of at least"):
        GroupSpec(**{"tokens_per_block": 4, **numbers})


def test_importing_the_connector_loads_no_torch() -> None:
    code = "import sys, kvcascade.connector; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
