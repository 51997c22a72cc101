"""The simulated engine as a state machine of hypothesis, which chooses and shrinks the histories."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .simulation import Simulation
from .workload import Action, draw_case

__all__ = ["EngineStateMachine"]


class EngineStateMachine(RuleBasedStateMachine):
    """Everything that `kvcascade simulate` does, in any order.

    TestEngine = EngineStateMachine.TestCase
    """

    @initialize(seed=st.integers(0, 9999), profile=st.sampled_from(["plain", "calm", "faults", "disk"]))
    def begin(self, seed: int, profile: str) -> None:
        self.folder = TemporaryDirectory(prefix="kvcascade-machine-")
        self.simulation = Simulation(draw_case(seed, profile), Path(self.folder.name))

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.close()
            self.folder.cleanup()

    @rule(
        family=st.integers(0, 3),
        length=st.integers(1, 60),
        after=st.none() | st.integers(0, 3),
        max_tokens=st.integers(1, 20),
        stop_after=st.none() | st.integers(1, 6),
        bound=st.sampled_from([None, None, 0, 5, 16, -1, "many"]),
        wish=st.sampled_from([None, None, {"priority": "low"}, {"priority": "high", "pin_for": "1s"}, "a lot"]),
    )
    def add(
        self,
        family: int,
        length: int,
        after: int | None,
        max_tokens: int,
        stop_after: int | None,
        bound: object,
        wish: object,
    ) -> None:
        self._perform("add", family, length, after, max_tokens, stop_after, bound, wish)

    @rule(pick=st.integers(0, 7))
    def abort(self, pick: int) -> None:
        self._perform("abort", pick)

    @rule(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=8))
    def steps(self, seeds: list[int]) -> None:
        for seed in seeds:
            self._perform("step", seed)
            self._perform("media", seed, seed // 3)

    @rule(seed=st.integers(0, 99))
    def step(self, seed: int) -> None:
        self._perform("step", seed)

    @rule(picks=st.lists(st.integers(0, 5), max_size=6))
    def media(self, picks: list[int]) -> None:
        self._perform("media", *picks)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def time(self, seconds: float) -> None:
        self._perform("time", seconds)

    @rule(preempt=st.booleans(), scope=st.sampled_from(["all", "primary"]), patient=st.booleans())
    def reset(self, preempt: bool, scope: str, patient: bool) -> None:
        self._perform("reset", preempt, scope, patient)

    @rule(pick=st.integers(0, 59))
    def others(self, pick: int) -> None:
        self._perform("others", pick)

    @rule()
    def forget(self) -> None:
        self._perform("forget")

    @rule(active=st.booleans())
    def faults(self, active: bool) -> None:
        self._perform("faults", active)

    @rule()
    def settle(self) -> None:
        self._perform("settle")

    def _perform(self, name: str, *args: object) -> None:
        self.simulation.perform(Action(name, args))
