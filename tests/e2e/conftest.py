"""Real vLLM engines, each in a process of its own, with a tiny model made on the spot; and the table of what was
seen, which is printed at the end.

Run by `make e2e`, with the interpreter of an environment in which vLLM is installed.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing.vllm import WAYS, Engine, Nursery, make_model, transfer_config

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
_seen = pytest.StashKey[list[tuple[str, str, str, str]]]()


class Seen:
    """What was seen in this test, for the table at the end."""

    def __init__(self, rows: list[tuple[str, str, str, str]]) -> None:
        self._rows = rows

    def note(self, way: str, scenario: str, cached: Sequence[int] | str, equal: str = "equal") -> None:
        text = cached if isinstance(cached, str) else " + ".join(map(str, cached))
        self._rows.append((way, scenario, text, equal))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_seen] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[_seen]
    if not rows:
        return
    terminalreporter.section("way in x scenario")
    terminalreporter.write_line("| way in | scenario | cached tokens | outputs |")
    terminalreporter.write_line("| --- | --- | --- | --- |")
    for row in rows:
        terminalreporter.write_line("| " + " | ".join(row) + " |")


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> Seen:
    return Seen(request.config.stash[_seen])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with seeded weights, large enough that greedy decoding has clear winners."""
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "log")
    yield nursery
    nursery.close()


@pytest.fixture
def engine(model: Path, nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Starts an engine: `stack` is ours, by `way`; without one it is plain vLLM. All end with the test."""
    begun: list[Engine] = []

    def start(
        stack: Any = None,
        way: str = WAYS[0],
        extra: dict[str, Any] | None = None,
        wait: bool = True,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        **settings: Any,
    ) -> Engine:
        given = {"model": str(model), "max_model_len": 2048} | settings
        if stack is not None:
            given.setdefault("kv_transfer_config", transfer_config(way, stack, **(extra or {})))
        log = tmp_path / f"engine-{len(begun)}.log"
        engine = Engine(given, log, nursery if not env and not prefix else None, env, prefix)
        begun.append(engine)
        return engine.wait_ready() if wait else engine

    yield start
    for engine in begun:
        engine.kill()


@pytest.fixture(scope="session")
def plain(
    model: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., list[Any]]]:
    """What vLLM answers without us: a function with the arguments of the runner's `generate`. It computes
    everything."""
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    settings = {"model": str(model), "max_model_len": 2048, "enable_prefix_caching": False}
    engine = Engine(settings, log, nursery).wait_ready()
    known: dict[str, list[Any]] = {}

    def generate(**arguments: Any) -> list[Any]:
        text = json.dumps(arguments, sort_keys=True)
        if text not in known:
            known[text] = engine.generate(**arguments)
        return known[text]

    yield generate
    engine.kill()
