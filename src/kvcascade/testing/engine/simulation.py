"""A history, played on an engine over a stack, with all that must hold checked after each action."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from traceback import extract_tb
from typing import Literal

from kvcascade.connector import Direction
from kvcascade.testing.invariants import require

from .checks import CheckedConnector, Watch
from .content import Content
from .engine import SimulatedEngine
from .requests import SimRequest, Status
from .shrink import shrink
from .spy import Spy
from .stack import SimulatedStack
from .workload import Action, Case

__all__ = ["Failure", "Simulation", "play", "shorten"]

_AT_REST = 3000
"""Steps after which an engine must have come to rest, if nothing new comes."""
_NAMES = 12
"""Names of requests are used again."""


class Failure(Exception):
    """A history has ended badly.

    Attributes:
        actions: the history, up to the action that failed.
        error: what went wrong.
        kind: which error it was, and where it was raised: what two histories that fail in the same way share.
    """

    def __init__(self, actions: Sequence[Action], error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.actions = list(actions)
        self.error = error
        where = extract_tb(error.__traceback__)
        self.kind = type(error).__name__, where[-1].name if where else ""


class Simulation:
    """One engine over one stack. `perform` does one thing, and then compares everything.

    Args:
        folder: where disk tiers lie.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.stack = SimulatedStack(case.stack, SimulatedEngine.chunk_bytes(case.engine), folder)
        self._spy = Spy(self.stack.manager, case.batch)
        self.engine = SimulatedEngine(
            case.engine,
            self._spy,
            self.stack.pool,
            prompt_only=case.prompt_only,
            share_loads=case.share_loads,
            connector=CheckedConnector,
        )
        self._spy.engine = self.engine
        self.engine.hashes_late = case.hashes_late
        self._content = self._spy.content = Content(self.engine)
        self._watch = Watch(self.engine, self.stack, self._content, self._spy)
        self._draw = Random(case.seed)
        self._running: dict[str, SimRequest] = {}
        self._done: list[SimRequest] = []
        self._numbers = count()
        self._failing = True
        for copier in self.engine.copiers:
            copier.fails = self._copy_fails

    def perform(self, action: Action) -> None:
        """Raises whatever went wrong."""
        getattr(self, action.name)(*action.args)
        self._check()

    def close(self) -> None:
        """Releases everything; checks nothing any more."""
        self.stack.on_write = lambda job: None
        self.engine.shutdown()
        self.stack.close()

    # Actions

    def add(
        self,
        family: int,
        length: int,
        after: int | None,
        max_tokens: int,
        stop_after: int | None,
        bound: object,
        wish: object = None,
    ) -> None:
        """A request comes; `after` another one with all its tokens, or not."""
        prompt = [family * 1000 + place for place in range(length)]
        if after is not None and self._done:
            prompt = self._done[-1 - after % len(self._done)].all_token_ids + prompt[: length // 4 + 1]
        prompt = prompt[: self._room - max_tokens]
        params = {"max_offload_tokens": bound, "max_load_tokens": bound} if bound is not None else {}
        params |= {"kvcascade": wish} if wish is not None else {}
        size = self.case.engine.tokens_per_block
        request = SimRequest(self._name(), prompt, max_tokens, size, stop_after, params or None)
        request.update_block_hashes()
        self._running[request.request_id] = self._spy.requests[request.request_id] = request
        for lane in self.stack.lanes:
            lane.begin(request.request_id)
        self.engine.add(request)

    def abort(self, pick: int) -> None:
        names = list(self._running)
        if names:
            self.engine.abort(names[pick % len(names)])

    def step(self, seed: int) -> None:
        self._draw = Random(seed)
        self.engine.step(self._draw)
        self.stack.clock.advance(0.01)

    def media(self, *picks: int) -> None:
        self.stack.advance(picks)

    def others(self, pick: int) -> None:
        self.stack.others(pick)

    def time(self, seconds: float) -> None:
        self.stack.clock.advance(seconds)

    def faults(self, active: bool) -> None:
        self._failing = active
        self.stack.switch_faults(active)

    def forget(self) -> None:
        """The engine's own prefix cache is emptied, and nothing else."""
        self.engine.reset(preempt=True, connector=False)

    def reset(self, preempt: bool, scope: Literal["all", "primary"], patient: bool) -> None:
        """The caches are emptied; if nothing of before is left, other weights follow."""
        self.stack.be_patient(patient)
        self._spy.before_reset()
        if self.engine.reset(preempt, scope):
            self.engine.model.weights += 1
        self._spy.after_reset()
        self.stack.be_patient(True)

    def settle(self) -> None:
        """Everything comes to rest, without faults; nothing may be left."""
        failing, self._failing = self._failing, False
        self.stack.switch_faults(False)
        for number in range(_AT_REST):
            self.stack.run_all()
            self.stack.clock.advance(0.05)
            if not self.engine.step(Random(number)):
                break
            self._check()
        stuck = [request.request_id for request in self.engine.scheduler.requests.values()]
        require(not self.engine.busy, f"after {_AT_REST} steps the engine is not at rest; requests: {stuck}")
        self._rest()
        self._failing = failing
        self.stack.switch_faults(failing)

    def _rest(self) -> None:
        """The manager's own moves between tiers end, too, which keep no engine awake; then nothing may be left."""
        for number in range(_AT_REST):
            self.stack.run_all()
            self.stack.clock.advance(1.0)
            self.stack.manager.on_schedule_end()
            if number >= 4 and not any(lane.unsettled for lane in self.stack.lanes):
                break
        self._check()
        self._watch.check_all()
        self._watch.check_rest()

    # Checks

    @property
    def _room(self) -> int:
        """Tokens that a request may have in all, so that it can run alone."""
        engine = self.case.engine
        blocks = (engine.blocks - 1) // len(engine.windows) - 2
        drafted = -(-(1 + 2 * engine.drafts) // engine.tokens_per_block) if engine.drafts else 0
        return min((blocks - drafted) * engine.tokens_per_block, engine.max_tokens - 1) - engine.drafts

    def _copy_fails(self, direction: Direction) -> bool:
        return self._failing and self._draw.random() < self.case.copy_failures

    def _name(self) -> str:
        names = (f"r{number % _NAMES if number < _NAMES * 50 else number}" for number in self._numbers)
        return next(name for name in names if not self.engine.scheduler.knows(name))

    def _check(self) -> None:
        for request in list(self._running.values()):
            self._content.learn(request)
            if request.is_finished():
                self._content.forget(request)
                del self._running[request.request_id]
                if request.status is Status.FINISHED_STOPPED:
                    self._done = [*self._done[-7:], request]
        self._watch.check()


def play(case: Case, actions: Iterable[Action], on_action: Callable[[Action], None] = lambda action: None) -> None:
    """Plays a history from the beginning.

    Raises:
        Failure: an action failed, or something did not hold after it.
    """
    done: list[Action] = []
    with TemporaryDirectory(prefix="kvcascade-simulate-") as folder:
        simulation = Simulation(case, Path(folder))
        try:
            for action in actions:
                done.append(action)
                simulation.perform(action)
                on_action(action)
        except Exception as error:  # whatever a simulated engine meets is a finding
            raise Failure(done, error) from error
        finally:
            simulation.close()


def shorten(case: Case, failure: Failure, tries: int = 500) -> Failure:
    """The failure of the shortest history found that fails in the same way."""
    best = failure

    def fails(actions: Sequence[Action]) -> bool:
        nonlocal best
        try:
            play(case, actions)
        except Failure as found:
            if found.kind == failure.kind:
                best = found
                return True
        return False

    shrink(failure.actions, fails, tries)
    return best
