"""Histories drawn by a seed: over lanes that move by hand, and over the threads that really do the work.

Longer with KVCASCADE_EXAMPLES, as the state machine: that many histories by hand (500 by default).
"""

import os
import random
from collections.abc import Callable

import pytest

from kvcascade.testing import forbid_io
from kvcascade.testing.stack_world import PROMPTS, Shape, StackWorld, ThreadedStackWorld, TierShape
from kvcascade.types import Key

EXAMPLES = int(os.environ.get("KVCASCADE_EXAMPLES", "500"))
FAULTS = [{}, {"failed": 0.1, "missing": 0.1, "corrupt": 0.1, "refused": 0.1, "raises": 0.05}]
TIERS: list[list[TierShape]] = [
    [TierShape(5)],
    [TierShape(4), TierShape(9)],
    [TierShape(4, eviction="s3fifo"), TierShape(4, write="on_evict", admit_after=2)],
    [TierShape(4, write="on_evict", eviction="arc"), TierShape(5, write="on_evict"), TierShape(9, promote=2)],
    [TierShape(5, ttl=2.0, eviction="lhd"), TierShape(shared=True)],
    [TierShape(4, write="on_evict"), TierShape(shared=True, write="on_evict"), TierShape(5, write="off")],
]
Move = Callable[[StackWorld, random.Random], object]


def _name(world: StackWorld, draw: random.Random) -> str:
    return draw.choice(list(world.running))


def _key(draw: random.Random) -> Key:
    return draw.choice(draw.choice(PROMPTS))


# What may happen, how often, and what it needs.
ANY: list[tuple[float, Move]] = [
    (3, lambda world, draw: world.begin(f"r{draw.randrange(4)}", draw.choice(PROMPTS))),
    (4, lambda world, draw: world.step()),
    (1, lambda world, draw: world.pass_time(draw.choice([0.1, 1.0, 3.0]))),
    (0.5, lambda world, draw: world.switch_faults(draw.random() < 0.5)),
]
OF_REQUESTS: list[tuple[float, Move]] = [
    (1.5, lambda world, draw: world.finish(_name(world, draw))),
    (2, lambda world, draw: world.lookup(_name(world, draw), draw.randrange(6))),
    (4, lambda world, draw: world.match(_name(world, draw))),
    (1, lambda world, draw: world.touch(_name(world, draw), draw.randrange(6))),
    (3, lambda world, draw: world.load(_name(world, draw), 1 + draw.randrange(6))),
    (2, lambda world, draw: world.offer(_name(world, draw), draw.randrange(6), 1 + draw.randrange(6))),
    (3, lambda world, draw: world.store(_name(world, draw), 1 + draw.randrange(6))),
]
OF_LOADS: list[tuple[float, Move]] = [
    (3, lambda world, draw: world.complete_load(draw.randrange(6), draw.random() < 0.7)),
]
OF_STORES: list[tuple[float, Move]] = [
    (2, lambda world, draw: world.write(draw.randrange(6))),
    (3, lambda world, draw: world.complete_store(draw.randrange(6), draw.random() < 0.7)),
]
OF_LANES: list[tuple[float, Move]] = [
    (6, lambda world, draw: world.advance(draw.randrange(3), draw.randrange(6))),
    (1, lambda world, draw: world.drain(draw.randrange(3))),
    (0.5, lambda world, draw: world.store_elsewhere(draw.randrange(3), _key(draw), draw.choice(["", "w1", "w2"]))),
]


def play(world: StackWorld, draw: random.Random, moves: int) -> None:
    """So many moves; then all that was begun ends, and each job must have been reported once."""
    for _ in range(moves):
        possible = [*ANY]
        possible += OF_REQUESTS * bool(world.running) + OF_LOADS * bool(world.loads)
        possible += OF_STORES * bool(world.stores) + OF_LANES * bool(world.lanes)
        (move,) = draw.choices([move for _, move in possible], [weight for weight, _ in possible])
        move(world, draw)
        if draw.random() < 0.01:
            weights = draw.choice(["", "w1", "w2"])
            world.reset(draw.choice(["all", "primary"]), patient=draw.random() < 0.5, weights=weights)
    world.settle()


def shape(draw: random.Random) -> Shape:
    return Shape(
        slots=draw.choice([4, 6, 9]),
        tiers=draw.choice(TIERS),
        queue=draw.choice([1.0, 0.25]),
        concurrency=draw.choice([1, 2]),
        seed=draw.randrange(100),
        faults=draw.choice(FAULTS),
    )


@pytest.mark.parametrize("start", range(0, EXAMPLES, 50))
def test_each_job_is_reported_once_in_any_order_of_events(start: int) -> None:
    """Submit, finish, abort, acknowledge, time out, end late (vllm-project/vllm#49820)."""
    for seed in range(start, min(start + 50, EXAMPLES)):
        draw = random.Random(seed)
        world = StackWorld(shape(draw))
        try:
            play(world, draw, moves=40)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        finally:
            world.close()


@pytest.mark.parametrize("seed", range(max(8, EXAMPLES // 50)))
def test_threads_keep_what_the_model_says_and_the_scheduler_does_no_io(seed: int) -> None:
    draw = random.Random(seed)
    world = ThreadedStackWorld(shape(draw))
    try:
        with forbid_io():
            play(world, draw, moves=150)
    finally:
        world.close()
