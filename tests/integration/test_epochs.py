"""Two engines, each a process, on one shared directory, while they are reset, restarted, killed and cut off.

The bytes of a chunk follow from its key and the weights it was computed with: a chunk of other weights shows."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

KEYS = list(range(8))
MORE = list(range(8, 16))


class Engine:
    """An engine in a process; its methods are those of `engine_process.Engine`."""

    def __init__(self, path: Path, weights: str) -> None:
        script = Path(__file__).with_name("engine_process.py")
        command = [sys.executable, str(script), json.dumps([str(path), weights])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "open"

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        return lambda **arguments: self._ask(verb, arguments)

    def _ask(self, verb: str, arguments: dict[str, Any]) -> Any:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, "the engine has died"
        return json.loads(line)

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        elif self.process.poll() is None:
            self._ask("stop", {})
        self.process.communicate(timeout=60)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine on the shared directory, with the weights that its stack file names."""
    started: list[Engine] = []

    def start(weights: str = "") -> Engine:
        started.append(Engine(tmp_path / "shared", weights))
        return started[-1]

    yield start
    for one in started:
        if one.process.returncode is None:
            one.end(kill=True)


@pytest.mark.parametrize("target", ["", "v2"])
def test_a_reset_moves_one_engine_and_leaves_the_other(engine: Callable[..., Engine], target: str) -> None:
    one, other = engine(), engine()
    one.store(keys=KEYS, epoch="old")
    assert other.find(keys=KEYS, epoch="old") == 8
    assert one.reset(weights=target) == []
    assert one.find(keys=KEYS, epoch="new") == 0
    assert other.find(keys=KEYS, epoch="old") == 8
    one.store(keys=KEYS, epoch="new")
    other.store(keys=MORE, epoch="old")
    assert one.find(keys=KEYS, epoch="new") == 8
    assert one.find(keys=MORE, epoch="new") == 0
    assert other.find(keys=KEYS + MORE, epoch="old") == 16


def test_engines_that_name_the_same_weights_share_as_each_of_them_gets_there(
    engine: Callable[..., Engine],
) -> None:
    one, other = engine("v1"), engine("v1")
    one.store(keys=KEYS, epoch="v1")
    one.reset(weights="v2")
    one.store(keys=KEYS, epoch="v2")
    assert other.find(keys=KEYS, epoch="v1") == 8
    other.reset(weights="v2")
    assert other.find(keys=KEYS, epoch="v2") == 8
    other.store(keys=MORE, epoch="v2")
    assert one.find(keys=KEYS + MORE, epoch="v2") == 16


def test_weights_that_come_back_under_their_name_find_nothing_of_before(engine: Callable[..., Engine]) -> None:
    """Under the name may be other weights now: whoever leaves it by a reset says that it is void."""
    one = engine("v1")
    one.store(keys=KEYS, epoch="v1")
    one.reset(weights="v2")
    one.reset(weights="v1")
    assert one.find(keys=KEYS, epoch="v1 anew") == 0
    one.store(keys=KEYS, epoch="v1 anew")
    assert engine("v1").find(keys=KEYS, epoch="v1 anew") == 8


def test_nobody_joins_weights_without_a_name(engine: Callable[..., Engine]) -> None:
    one, other = engine(), engine()
    one.reset(weights="")
    other.reset(weights="")
    one.store(keys=KEYS, epoch="of one")
    assert other.find(keys=KEYS, epoch="of the other") == 0
    assert engine().find(keys=KEYS, epoch="of a third") == 0
    assert one.find(keys=KEYS, epoch="of one") == 8


@pytest.mark.parametrize("target", ["", "v2"])
def test_a_late_write_of_the_old_epoch_is_never_served(engine: Callable[..., Engine], target: str) -> None:
    one, other = engine(), engine()
    other.reset(weights=target)
    one.hang()
    one.store(keys=KEYS, epoch="old", hangs=True)
    assert one.reset(weights=target, timeout=0.2) == ["fs"], "the write has not ended"
    assert one.find(keys=KEYS, epoch="new") == 0
    one.go_on()
    one.come_back()
    assert one.find(keys=KEYS, epoch="new") == 0
    assert other.find(keys=KEYS, epoch="new") == 0
    one.store(keys=KEYS, epoch="new")
    assert one.find(keys=KEYS, epoch="new") == 8
    assert other.find(keys=KEYS, epoch="new") == (8 if target else 0)


@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("target", ["", "v2"])
def test_after_a_restart_only_named_weights_are_warm(
    engine: Callable[..., Engine], target: str, kill: bool
) -> None:
    """The stack file of the engine that starts has never heard of the reset."""
    one = engine()
    one.store(keys=KEYS, epoch="old")
    one.reset(weights=target)
    one.store(keys=MORE, epoch="new")
    one.end(kill=kill)
    again = engine()
    assert again.find(keys=KEYS, epoch="base") == 0
    assert again.find(keys=MORE, epoch="base") == 0
    if target:
        assert engine(target).find(keys=MORE, epoch="new") == 8


def test_a_directory_that_can_not_be_reached_serves_nothing_until_it_has_heard_of_the_reset(
    engine: Callable[..., Engine],
) -> None:
    one, other = engine(), engine()
    one.store(keys=KEYS, epoch="old")
    one.unreachable(now=True)
    assert one.reset(weights="v2", timeout=0.2) == ["fs"]
    assert one.find(keys=KEYS, epoch="new") == 0
    assert one.store(keys=MORE, epoch="new") == 8, "the chunks of before"
    one.unreachable(now=False)
    one.come_back()
    assert one.find(keys=KEYS, epoch="new") == 0
    assert other.find(keys=KEYS, epoch="old") == 8
    one.store(keys=KEYS, epoch="new")
    assert one.find(keys=KEYS, epoch="new") == 8
    assert engine("v2").find(keys=KEYS, epoch="new") == 8


def test_both_reset_again_and_again_while_they_store(engine: Callable[..., Engine]) -> None:
    engines = [engine(), engine()]
    for turn in range(12):
        who, name = engines[turn % 2], ["", "a", "b"][turn % 3]
        who.reset(weights=name)
        epoch = f"turn {turn}"
        assert who.find(keys=KEYS, epoch=epoch) == 0
        who.store(keys=KEYS, epoch=epoch)
        assert who.find(keys=KEYS, epoch=epoch) == 8
