"""Real vLLM engines, each in a process of its own, with a tiny model made on the spot; and the table of what was
seen, which is printed at the end and is the one that docs/vllm.md shows.

Run by `make e2e`, with the interpreter of an environment in which vLLM is installed.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias, cast

import pytest

from kvcascade.testing.vllm import PROMPTS, WAYS, Engine, Nursery, make_model, transfer_config

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
EQUAL = "equal"
_SEEN = "seen"


Row: TypeAlias = dict[str, str]


class Table:
    """Rows of scenarios, with the cached tokens of each way in which they were run. A plugin of pytest, which
    gathers what the tests have seen, in whichever process they ran."""

    HEAD = ("scenario", *WAYS, "outputs")

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def add(self, row: Row) -> None:
        self.rows.setdefault(row["scenario"], {}).update(row)

    @classmethod
    def of_docs(cls) -> "Table":
        table = cls()
        lines = DOCS.read_text().splitlines() if DOCS.exists() else []
        at = lines.index(_line(cls.HEAD)) if _line(cls.HEAD) in lines else len(lines)
        for line in lines[at + 2 :]:
            if not line.startswith("|"):
                break
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            table.add({name: cell for name, cell in zip(cls.HEAD, cells, strict=True) if cell})
        return table

    def lines(self, order: Iterable[str]) -> list[str]:
        """In Markdown; the scenarios in this order, then all others."""
        names = [name for name in dict.fromkeys([*order, *self.rows]) if name in self.rows]
        rows = [[self.rows[name].get(column, "") for column in self.HEAD] for name in names]
        return [_line(row) for row in (self.HEAD, ["---"] * len(self.HEAD), *rows)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _SEEN:
                self.add(cast(Row, value))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.rows:
            terminalreporter.section("scenario x way in: cached tokens")
            for line in self.lines(Table.of_docs().rows):
                terminalreporter.write_line(line)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


class Seen:
    """What a test has seen, for the table at the end."""

    def __init__(self, properties: list[tuple[str, object]], documented: Table) -> None:
        self._properties = properties
        self._documented = documented

    def note(self, way: str, scenario: str, cached: Sequence[int] | str, outputs: str = EQUAL) -> None:
        """`cached`: of each prompt; or in words, where it depends on what happens when. docs/vllm.md has to show
        the same."""
        text = cached if isinstance(cached, str) else " + ".join(map(str, cached))
        row = {"scenario": scenario, way: text, "outputs": outputs}
        self._properties.append((_SEEN, row))
        if DOCS.exists():
            shown = self._documented.rows.get(scenario, {})
            assert row.items() <= shown.items(), f"docs/vllm.md shows {shown}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Table())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where there are several processes, those tests run in one of them that share engines."""
    from xdist.scheduler import LoadScopeScheduling

    class ByEngines(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            module, _, test = nodeid.partition("::")
            words = test.rstrip("]").replace("[", "-").split("-")
            return f"{module} {next((way for way in WAYS if way in words), '')}"

    return ByEngines(config, log)


@pytest.fixture(scope="session")
def documented() -> Table:
    return Table.of_docs()


@pytest.fixture
def seen(request: pytest.FixtureRequest, documented: Table) -> Seen:
    return Seen(request.node.user_properties, documented)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with seeded weights, large enough that greedy decoding has clear winners."""
    return make_model(tmp_path_factory.mktemp("model"), seed=0)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery") / "log")
    yield nursery
    nursery.close()


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Engines:
    """Starts engines, and ends them all."""

    def __init__(self, model: Path, nursery: Nursery, folder: Path) -> None:
        self._model = model
        self._nursery = nursery
        self._folder = folder
        self._begun: list[Engine] = []

    def start(
        self,
        stack: Any = None,
        way: str = WAYS[0],
        extra: dict[str, Any] | None = None,
        wait: bool = True,
        prefix: Sequence[str] = (),
        env: dict[str, str] | None = None,
        **settings: Any,
    ) -> Engine:
        """`stack` is ours, by `way`; without one it is plain vLLM. `prefix`: a command, for a process that is not
        forked."""
        given = {"model": str(self._model), "max_model_len": 2048} | settings
        if stack is not None:
            given.setdefault("kv_transfer_config", transfer_config(way, stack, **(extra or {})))
        log = self._folder / f"engine-{len(self._begun)}.log"
        engine = Engine(given, log, None if prefix else self._nursery, env, prefix)
        self._begun.append(engine)
        return engine.wait_ready() if wait else engine

    def kill(self) -> None:
        for engine in self._begun:
            engine.kill()


@pytest.fixture
def engine(model: Path, nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """A function that starts an engine. All end with the test."""
    engines = Engines(model, nursery, tmp_path)
    yield engines.start
    engines.kill()


@pytest.fixture(scope="module")
def lasting(
    way: str, model: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    """The same, for engines that serve several tests: all of one way in a module."""
    engines = Engines(model, nursery, tmp_path_factory.mktemp("lasting"))
    yield engines.start
    engines.kill()


@pytest.fixture(scope="session")
def plain_engine(
    model: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Engine]]:
    """Starts engines that know nothing of us, and compute everything."""
    engines = Engines(model, nursery, tmp_path_factory.mktemp("plain"))
    yield partial(engines.start, enable_prefix_caching=False)
    engines.kill()


@pytest.fixture(scope="session")
def plain(plain_engine: Callable[..., Engine]) -> Callable[..., list[Any]]:
    """What vLLM answers without us: a function with the arguments of the runner's `generate`."""
    engine = plain_engine()
    known: dict[str, list[Any]] = {}

    def generate(**arguments: Any) -> list[Any]:
        text = json.dumps(arguments, sort_keys=True)
        if text not in known:
            known[text] = engine.generate(**arguments)
        return known[text]

    return generate


@pytest.fixture(scope="session")
def same(plain: Callable[..., list[Any]]) -> Callable[..., None]:
    """Compares answers with those of plain vLLM to the same: token by token, and log-probabilities as far as they
    agree between two plain runs that batch differently."""

    def compare(answers: list[Any], **asked: Any) -> None:
        expected = plain(**asked)
        assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
        for answer, other in zip(answers, expected, strict=True):
            for ours, theirs in zip(answer["logprobs"], other["logprobs"], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-3)

    return compare


@pytest.fixture(scope="session")
def ask(same: Callable[..., None]) -> Callable[..., list[int]]:
    """Asks an engine, and compares its answers with plain vLLM's; returns how many tokens were cached."""

    def asked(engine: Engine, prompts: list[list[int]] = PROMPTS, tokens: int = 40, **more: Any) -> list[int]:
        asked = {"prompts": prompts, "tokens": tokens, **more}
        answers = engine.generate(**asked)
        same(answers, **asked)
        return [answer["cached"] for answer in answers]

    return asked
