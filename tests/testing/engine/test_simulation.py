"""Histories that must hold, and faults that must be found: each is planted, and the simulation has to see it."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from kvcascade.connector import GroupSpec, SchedulerAdapter, TransferWorker, coverage
from kvcascade.connector.fences import Fences
from kvcascade.connector.jobs import JobTable
from kvcascade.connector.lookup import _FullHits
from kvcascade.connector.plans import StorePlan
from kvcascade.manager import SecondaryTierManager
from kvcascade.manager.cascade import Cascade
from kvcascade.manager.chain import Chain
from kvcascade.manager.events import EventLog
from kvcascade.manager.promotion import Promotion
from kvcascade.manager.slots import SlotTable
from kvcascade.testing.engine.shrink import shrink
from kvcascade.testing.engine.simulation import Failure, play, shorten
from kvcascade.testing.engine.workload import PROFILES, Action, Case, draw_actions, draw_case


@pytest.mark.parametrize("profile", PROFILES)
def test_histories_hold(profile: str) -> None:
    for seed in range(4):
        case = draw_case(seed, profile)
        play(case, draw_actions(case, 150))


def test_a_seed_is_a_history() -> None:
    case = draw_case(7)
    assert draw_case(7) == case and draw_actions(case, 50) == draw_actions(draw_case(7), 50)
    assert draw_case(8) != case


def test_everything_is_drawn() -> None:
    """Of what the connector knows how to do nothing is left out of the histories."""
    cases = [draw_case(seed) for seed in range(200)]
    for drawn in (
        lambda case: len(set(case.engine.blocks_per_chunk)) > 1,
        lambda case: case.engine.draft_groups and case.engine.drafts and case.engine.windows[-1],
        lambda case: case.engine.draft_groups and not case.engine.windows[-1],
        lambda case: case.engine.asynchronous and case.engine.ranks > 1,
        lambda case: any(tier.shared for tier in case.stack.tiers) and case.stack.faults,
        lambda case: any(tier.write == "on_evict" for tier in case.stack.tiers),
        lambda case: any(tier.type == "disk" for tier in case.stack.tiers),
        lambda case: not case.batch,
        lambda case: not case.share_loads,
        lambda case: case.prompt_only,
        lambda case: case.hashes_late,
        lambda case: case.copy_failures,
    ):
        assert sum(map(bool, map(drawn, cases))) >= 4
    names = {action.name for action in draw_actions(cases[0], 500)}
    assert names == {"add", "abort", "step", "media", "time", "forget", "reset", "others", "faults", "settle"}


Patch = Callable[[pytest.MonkeyPatch], None]


def no_fences(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#29870: a store reads a block that was handed to somebody else."""
    patch.setattr(Fences, "end_step", lambda self: (self.allocated.clear(), self.flush.clear(), set())[2])


def all_tokens_at_finish(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#54193: a stored block has a place that no pass has written."""
    patch.setattr("kvcascade.connector.requests.written_tokens", lambda request, scheduled: request.num_tokens)


def drafts_count(patch: pytest.MonkeyPatch) -> None:
    """Drafts that may be rejected are taken for tokens."""
    patch.setattr(
        "kvcascade.connector.requests.written_tokens",
        lambda request, scheduled: min(request.num_computed_tokens + scheduled, len(request.block_hashes) * 4),
    )


def nothing_at_finish(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#41704: the last full block of a request is never stored."""
    written = coverage.written_tokens
    patch.setattr(
        "kvcascade.connector.requests.written_tokens",
        lambda request, scheduled: 0 if request.is_finished() else written(request, scheduled),
    )


def early_stores(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#45704: a copy starts before the writing is done."""
    start = TransferWorker.handle_preemptions

    def handle_preemptions(self: TransferWorker, metadata: Any) -> None:
        start(self, metadata)
        stores, metadata.stores = metadata.stores, []
        for transfer in stores:
            self._start(transfer, None)
            self._running[transfer.job].wait()

    patch.setattr(TransferWorker, "handle_preemptions", handle_preemptions)


def one_rank_is_enough(patch: pytest.MonkeyPatch) -> None:
    """A job is over when the first worker has reported it."""
    update = SchedulerAdapter.update_connector_output

    def update_connector_output(self: SchedulerAdapter, report: Any) -> Any:
        report.ended = {
            job: self._jobs._workers for job in report.ended if job in self._jobs._live or job in self._jobs._void
        }
        return update(self, report)

    patch.setattr(SchedulerAdapter, "update_connector_output", update_connector_output)


def failures_are_kept_quiet(patch: pytest.MonkeyPatch) -> None:
    """A chunk that one worker could not copy counts as stored."""
    update = SchedulerAdapter.update_connector_output

    def update_connector_output(self: SchedulerAdapter, report: Any) -> Any:
        report.failed.clear()
        return update(self, report)

    patch.setattr(SchedulerAdapter, "update_connector_output", update_connector_output)


def windows_keep_what_they_let_go(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#42959: a sliding window's block is stored after it was given to somebody else."""
    patch.setattr("kvcascade.connector.steps._disown", lambda running, grown, allocated: None)


def nobody_waits_for_jobs(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#46014: a preempted request comes back while its stores are running."""
    match = SchedulerAdapter.get_num_new_matched_tokens

    def get_num_new_matched_tokens(self: SchedulerAdapter, request: Any, computed: int) -> Any:
        state = self._state(request.request_id, "")
        jobs, state.jobs = state.jobs, set()
        try:
            return match(self, request, computed)
        finally:
            state.jobs = jobs

    patch.setattr(SchedulerAdapter, "get_num_new_matched_tokens", get_num_new_matched_tokens)


def finish_comes_before_the_last_offer(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#49635: the manager is told of the finish, and then offered the last chunk."""
    finish = SchedulerAdapter.request_finished

    def request_finished(self: SchedulerAdapter, request: Any) -> bool:
        state = self._running.get(request.request_id)
        answer = finish(self, request)
        if state:
            self._manager.on_request_finished(state.context)
        return answer

    patch.setattr(SchedulerAdapter, "request_finished", request_finished)


def reset_forgets_the_manager(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#57727: after a change of weights, old KV is served."""
    reset = SchedulerAdapter.reset_cache

    def reset_cache(self: SchedulerAdapter, scope: Any = None, *args: Any, **kwargs: Any) -> Any:
        return reset(self, "primary", *args, **kwargs)

    patch.setattr(SchedulerAdapter, "reset_cache", reset_cache)


def stores_take_more_than_their_share(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#26329: what waits for a slow tier fills primary."""
    patch.setattr(Cascade, "_room", lambda self, level, keys: len(keys) if level.up else 0)


def promotions_take_all_of_primary(patch: pytest.MonkeyPatch) -> None:
    init = Promotion.__init__

    def all_of_it(self: Promotion, primary: Any, *others: Any) -> None:
        init(self, primary, *others)
        self._limit = primary.slots.capacity

    patch.setattr(Promotion, "__init__", all_of_it)


def what_is_being_stored_is_found(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#53498: findable is not readable."""
    patch.setattr(SlotTable, "hit", lambda self, key: self.find(key) >= 0)


def hits_do_not_last(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#39702: what was found is gone before it is loaded."""
    patch.setattr(SlotTable, "_busy", lambda self, slot: bool(self._pins[slot]))


def a_pin_is_not_released(patch: pytest.MonkeyPatch) -> None:
    release = SlotTable.unpin
    released = count()
    patch.setattr(SlotTable, "unpin", lambda self, slot: next(released) % 20 and release(self, slot))


def deadlines_do_not_pass(patch: pytest.MonkeyPatch) -> None:
    poll = Chain.poll
    patch.setattr(Chain, "poll", lambda self, now, overdue: poll(self, 0.0, overdue))


def tiers_are_not_told_of_a_finish(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chain, "finish", lambda self, owner: None)


def the_engine_may_sleep_too_early(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#45595: the last transfers never complete, since the engine has stopped stepping."""
    patch.setattr(SecondaryTierManager, "has_pending_work", lambda self: False)


def an_eviction_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EventLog, "removed", lambda self, tier, keys: None)


def refused_chunks_are_passed_over(patch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#54415: of an offer that is granted in part the rest is never offered again."""
    patch.setattr(StorePlan, "stop_at", lambda self, refused: None)


def two_may_load_one_chunk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobTable, "loading", lambda self, keys: False)


def what_a_voided_copy_uses_is_offered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobTable, "voided", lambda self, key: False)


def a_voided_load_is_good(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobTable, "is_void", lambda self, job: False)


def a_reset_drops_the_flush_list(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fences, "reset", lambda self, jobs: self._jobs.clear())


def the_manager_is_reset_before_requests_are_finished(patch: pytest.MonkeyPatch) -> None:
    """The last offers of a request that has finished are void, and the manager takes it for one that goes on."""
    reset = SchedulerAdapter.reset_cache

    def reset_cache(self: SchedulerAdapter, scope: Any = None, weights: str = "", timeout: float = 10.0) -> Any:
        self._manager.reset_cache(scope, weights, timeout)
        return reset(self, scope, weights, timeout)

    patch.setattr(SchedulerAdapter, "reset_cache", reset_cache)


@pytest.mark.parametrize(
    "plant",
    [
        two_may_load_one_chunk,
        what_a_voided_copy_uses_is_offered,
        a_voided_load_is_good,
        a_reset_drops_the_flush_list,
        the_manager_is_reset_before_requests_are_finished,
        no_fences,
        all_tokens_at_finish,
        drafts_count,
        nothing_at_finish,
        early_stores,
        one_rank_is_enough,
        failures_are_kept_quiet,
        windows_keep_what_they_let_go,
        nobody_waits_for_jobs,
        finish_comes_before_the_last_offer,
        reset_forgets_the_manager,
        stores_take_more_than_their_share,
        promotions_take_all_of_primary,
        what_is_being_stored_is_found,
        hits_do_not_last,
        a_pin_is_not_released,
        deadlines_do_not_pass,
        tiers_are_not_told_of_a_finish,
        the_engine_may_sleep_too_early,
        an_eviction_is_not_told,
        refused_chunks_are_passed_over,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert next(failures(), None) is not None


def drafts_hold_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """A draft model's newest chunk is stored, and written again after a draft was rejected."""
    storable = coverage.storable
    patch.setattr("kvcascade.connector.requests.storable", lambda *args: storable(*args[:4]))


def drafts_go_on_at_the_last_hit(patch: pytest.MonkeyPatch) -> None:
    """A draft model goes on behind a chunk whose last token was stored with another successor."""

    def needed(spec: GroupSpec, local: int, boundary: int, margin: int = 0) -> range:
        return coverage.needed_chunks(spec, local, boundary)

    hits = _FullHits.__init__

    def full_hits(self: _FullHits, manager: Any, group: Any, state: Any, limit: int) -> None:
        spec, group.spec = group.spec, replace(group.spec, draft=False)
        hits(self, manager, group, state, limit)
        group.spec = spec

    patch.setattr("kvcascade.connector.lookup.needed_chunks", needed)
    patch.setattr(_FullHits, "__init__", full_hits)


@pytest.mark.parametrize("plant", [drafts_hold_nothing_back, drafts_go_on_at_the_last_hit])
def test_a_fault_with_draft_models_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Failure):
        for seed in range(20):
            case = draw_case(seed, "drafts")
            play(case, draw_actions(case, 200))


def tight(seed: int) -> Case:
    """A case in which the device's blocks are scarce; and slots too, and hashes late, or many workers report."""
    case = draw_case(seed, "calm")
    window, blocks, ranks = ((5,), 26, case.engine.ranks) if seed % 4 else ((0,), 34, 3)
    engine = replace(
        case.engine,
        windows=window,
        blocks=blocks,
        ranks=ranks,
        seqs=5,
        drafts=0,
        draft_groups=(),
        blocks_per_chunk=(),
    )
    return replace(
        case,
        engine=engine,
        stack=replace(case.stack, slots=4 if seed % 4 else 40),
        hashes_late=3 if seed % 4 else 0,
    )


def failures() -> Iterator[tuple[Case, Failure]]:
    for seed in range(60):
        case = draw_case(seed) if seed % 2 else tight(seed)
        try:
            play(case, draw_actions(case, 200))
        except Failure as failure:
            yield case, failure


def test_a_failure_is_shortened_to_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_at_finish(monkeypatch)
    case, failure = next(failures())
    shortest = shorten(case, failure)
    assert shortest.kind == failure.kind
    assert len(shortest.actions) < len(failure.actions) / 2
    with pytest.raises(Failure):
        play(case, shortest.actions)
    for place in range(len(shortest.actions)):
        rest = shortest.actions[:place] + shortest.actions[place + 1 :]
        assert kind_of(case, rest) != failure.kind, "an action that is not needed"


def kind_of(case: Case, actions: list[Action]) -> tuple[str, str] | None:
    try:
        play(case, actions)
    except Failure as failure:
        return failure.kind
    return None


def test_shrinking_finds_the_smallest_part() -> None:
    assert shrink(range(100), lambda part: {3, 57} <= set(part)) == [3, 57]
    assert shrink([1], lambda part: True) == [1]
