"""Histories that the simulation has found, shortened, each with what was wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvcascade.testing import key_for
from kvcascade.testing.engine.shape import EngineShape
from kvcascade.testing.engine.simulation import play
from kvcascade.testing.engine.stack import SimulatedStack, StackShape, TierShape
from kvcascade.testing.engine.workload import Action, Case, draw_actions, draw_case
from kvcascade.types import LookupResult, RequestContext

KEYS = [key_for(number) for number in range(5)]


def history(*actions: tuple[object, ...]) -> list[Action]:
    return [Action(str(name), args) for name, *args in actions for args in [tuple(args)]]


def steps(*seeds: int) -> list[tuple[object, ...]]:
    return [("step", seed) for seed in seeds]


def test_after_a_reset_nothing_is_stored_from_blocks_that_a_window_has_let_go() -> None:
    """vllm-project/vllm#42959, after a reset: chunks that had been stored are offered again, from blocks that
    belong to another request."""
    case = Case(
        42,
        EngineShape(blocks=23, windows=(9,), seqs=4, budget=9, asynchronous=True, ranks=3),
        StackShape(slots=14, tiers=(TierShape(chunks=6),), queue=1.0, concurrency=3, seed=42),
    )
    play(
        case,
        history(
            ("add", 3, 46, 0, 17, 3, None),
            *steps(2162477749, 4116773040, 1520527209, 151934487, 1194439221, 732700708),
            ("media", 0, 3, 5, 5, 3, 0, 3, 3, 4, 2, 4, 4),
            *steps(240455181, 2827134521),
            ("forget",),
            ("add", 3, 24, 2, 19, 3, "many"),
            ("add", 1, 44, None, 14, None, -1),
            ("add", 1, 42, 1, 6, None, 5),
            *steps(2298451668, 4065702427, 3991921173, 3800659168, 669764065, 2610259673, 2683354820),
            *steps(3265371955, 4185446887),
            ("reset", False, "primary", False),
            *steps(3181570977, 4268629224, 4270197824),
            ("settle",),
        ),
    )


@pytest.mark.parametrize("seed", [82, 86, 112])
def test_behind_a_sliding_window_a_failed_load_leaves_nothing(seed: int) -> None:
    """vllm-project/vllm#39732: the engine was told to go on at a token whose window it had let go of."""
    case = draw_case(seed, "faults")
    case = replace(case, engine=replace(case.engine, windows=(0, 5), blocks=104), copy_failures=0.3)
    play(case, draw_actions(case, 250))


def test_a_request_is_not_told_for_ever_that_its_prefix_is_not_known_yet(tmp_path: Path) -> None:
    """One group's chunks are HIT in every step, and leave no room in primary for that of the other group, which is
    further down: the request's patience ends all the same."""
    stack = SimulatedStack(StackShape(slots=4, queue=1.0), 512, tmp_path)
    manager, ctx = stack.manager, RequestContext("r")
    manager.on_new_request(ctx)
    for key in KEYS:
        if manager.prepare_store([key], ctx) is None:
            manager.on_request_finished(ctx)
            ctx = RequestContext("another")
            manager.on_new_request(ctx)
            assert manager.prepare_store([key], ctx)
        manager.complete_store([key], ctx)
        stack.run_all()
        manager.on_schedule_end()
    manager.on_request_finished(ctx)
    manager.on_schedule_end()
    asks = RequestContext("asks")
    manager.on_new_request(asks)
    here = [key for key in KEYS if manager._slots.find(key) >= 0]
    (below,) = set(KEYS) - set(here)
    answers = []
    for _ in range(40):
        assert manager.match_prefix(here, asks) == (4, False)
        answers.append(manager.lookup(below, asks))
        manager.on_schedule_end()
        stack.run_all()
        stack.clock.advance(0.1)
    assert answers[0] is LookupResult.HIT_PENDING and answers[-1] is LookupResult.MISS
    stack.close()


def test_a_move_between_tiers_that_a_reset_has_voided_leaves_the_next_one_alone() -> None:
    """A copy of before a reset ends while its chunk is read again, into a staging slot of its own."""
    case = Case(
        106,
        EngineShape(blocks=44, windows=(9,), seqs=3, budget=6, ranks=2, blocks_per_chunk=(2,)),
        StackShape(
            slots=60,
            tiers=(TierShape(chunks=5), TierShape(chunks=30, write="on_evict")),
            queue=0.125,
            concurrency=3,
            seed=106,
            faults={"failed": 0.2},
        ),
    )
    play(
        case,
        history(
            ("add", 2, 54, None, 13, 6, None),
            ("settle",),
            ("add", 3, 46, 1, 12, 1, None),
            *steps(1374942558, 2354066453, 3866798317, 527917716, 3383796870),
            ("media", 5, 2),
            ("reset", True, "primary", False),
            ("settle",),
        ),
    )
