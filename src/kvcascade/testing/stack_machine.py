"""A whole stack against a plain model, in sequences of calls that hypothesis chooses and shrinks."""

from dataclasses import replace
from typing import Literal

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from .stack_world import PROMPTS, Shape, StackWorld, TierShape

__all__ = ["StackStateMachine"]

NAMES = st.integers(0, 3)
LANES = st.integers(0, 2)
PICK = st.integers(0, 5)
FAULTS: list[dict[str, float]] = [
    {},
    {"failed": 0.3},
    {"failed": 0.1, "missing": 0.1, "corrupt": 0.1, "refused": 0.1, "raises": 0.1},
]
WEIGHTS = ["", "w1", "w2"]
POLICIES = st.sampled_from(["lru", "arc", "s3fifo", "lhd"])


def _above_no_shared(tiers: list[TierShape]) -> list[TierShape]:
    """What a shared tier evicts nobody receives: it makes room by itself."""
    return [
        replace(tier, write="through") if tier.write == "on_evict" and above.shared else tier
        for above, tier in zip([TierShape(), *tiers], tiers, strict=False)
    ]


TIERS = st.builds(
    TierShape,
    chunks=st.sampled_from([4, 5, 9]),
    shared=st.sampled_from([False, False, True]),
    write=st.sampled_from(["through", "on_evict", "off"]),
    promote=st.sampled_from(["always", "always", "never", 2]),
    admit_after=st.sampled_from([1, 1, 2]),
    ttl=st.sampled_from([None, None, 2.0]),
    eviction=POLICIES,
)
SHAPES = st.builds(
    Shape,
    slots=st.sampled_from([4, 6, 9]),
    tiers=st.lists(TIERS, max_size=3).map(_above_no_shared),
    eviction=POLICIES,
    weights=st.sampled_from(WEIGHTS),
    queue=st.sampled_from([1.0, 0.25]),
    concurrency=st.integers(1, 2),
    seed=st.integers(0, 99),
    faults=st.sampled_from(FAULTS),
)


def _some_request(machine: "StackStateMachine") -> bool:
    return bool(machine.world.running)


class StackStateMachine(RuleBasedStateMachine):
    """Requests that share prefixes come, ask, load, store and go, in any order, while tiers work, fail, and are
    late, and the cache is reset. After each call `StackWorld` checks all that must hold.

        TestStack = StackStateMachine.TestCase
    """

    @initialize(shape=SHAPES)
    def open(self, shape: Shape) -> None:
        self.world = StackWorld(shape)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.world.settle()
            finally:
                self.world.close()

    def name(self, pick: int) -> str:
        names = list(self.world.running)
        return names[pick % len(names)]

    # Requests

    @rule(name=NAMES, prompt=st.integers(0, len(PROMPTS) - 1))
    def begin(self, name: int, prompt: int) -> None:
        self.world.begin(f"r{name}", PROMPTS[prompt])

    @precondition(_some_request)
    @rule(name=NAMES)
    def finish(self, name: int) -> None:
        self.world.finish(self.name(name))

    @precondition(_some_request)
    @rule(name=NAMES, place=PICK)
    def lookup(self, name: int, place: int) -> None:
        self.world.lookup(self.name(name), place)

    @precondition(_some_request)
    @rule(name=NAMES)
    def match(self, name: int) -> None:
        self.world.match(self.name(name))

    @precondition(_some_request)
    @rule(name=NAMES, count=PICK)
    def touch(self, name: int, count: int) -> None:
        self.world.touch(self.name(name), count)

    # Transfers of the engine

    @precondition(_some_request)
    @rule(name=NAMES, count=st.integers(1, 6))
    def load(self, name: int, count: int) -> None:
        self.world.load(self.name(name), count)

    @precondition(lambda self: self.world.loads)
    @rule(pick=PICK, success=st.booleans())
    def complete_load(self, pick: int, success: bool) -> None:
        self.world.complete_load(pick, success)

    @precondition(_some_request)
    @rule(name=NAMES, start=PICK, count=st.integers(1, 6))
    def offer(self, name: int, start: int, count: int) -> None:
        self.world.offer(self.name(name), start, count)

    @precondition(_some_request)
    @rule(name=NAMES, count=st.integers(1, 6))
    def store(self, name: int, count: int) -> None:
        self.world.store(self.name(name), count)

    @precondition(lambda self: self.world.stores)
    @rule(pick=PICK)
    def write(self, pick: int) -> None:
        self.world.write(pick)

    @precondition(lambda self: self.world.stores)
    @rule(pick=PICK, success=st.booleans())
    def complete_store(self, pick: int, success: bool) -> None:
        self.world.complete_store(pick, success)

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), place=PICK, load=st.booleans())
    def complete_nothing(self, prompt: int, place: int, load: bool) -> None:
        self.world.complete_nothing(PROMPTS[prompt][place % len(PROMPTS[prompt])], load)

    # Time, media, resets

    @rule()
    def step(self) -> None:
        self.world.step()

    @precondition(lambda self: self.world.lanes)
    @rule(lane=LANES, pick=PICK)
    def advance(self, lane: int, pick: int) -> None:
        self.world.advance(lane, pick)

    @precondition(lambda self: self.world.lanes)
    @rule(lane=LANES, steps=st.booleans())
    def drain(self, lane: int, steps: bool) -> None:
        """Everything that the lane has ends; with a step before and after it."""
        if steps:
            self.world.step()
        self.world.drain(lane)
        if steps:
            self.world.step()

    @precondition(lambda self: self.world.lanes)
    @rule(lane=LANES, pick=PICK)
    def lose(self, lane: int, pick: int) -> None:
        self.world.lose(lane, pick)

    @precondition(lambda self: self.world.lanes)
    @rule(lane=LANES, prompt=st.integers(0, len(PROMPTS) - 1), place=PICK)
    def find(self, lane: int, prompt: int, place: int) -> None:
        self.world.find(lane, PROMPTS[prompt][place % len(PROMPTS[prompt])])

    @precondition(lambda self: any(tier.shared for tier in self.world.shape.tiers))
    @rule(lane=LANES, prompt=st.integers(0, len(PROMPTS) - 1), place=PICK, weights=st.sampled_from(WEIGHTS))
    def store_elsewhere(self, lane: int, prompt: int, place: int, weights: str) -> None:
        self.world.store_elsewhere(lane, PROMPTS[prompt][place % len(PROMPTS[prompt])], weights)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(active=st.booleans())
    def switch_faults(self, active: bool) -> None:
        self.world.switch_faults(active)

    @rule(scope=st.sampled_from(["all", "primary"]), patient=st.booleans(), weights=st.sampled_from(WEIGHTS))
    def reset(self, scope: Literal["all", "primary"], patient: bool, weights: str) -> None:
        self.world.reset(scope, patient, weights)
