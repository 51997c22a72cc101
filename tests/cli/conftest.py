"""A stack of host memory, a disk and a shared directory, filled as an engine fills it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvcascade.cli import main
from kvcascade.configs import load_stack
from kvcascade.testing import buffer, bytes_for, holds, key_for
from kvcascade.tiers import OpenContext, StoredChunk, StoredNamespace, Tier, TierSettings
from kvcascade.types import Key, Namespace, Outcome

CHUNK = 64 << 10
SCRIPT = Path(__file__).with_name("engine_process.py")
HANG = 60.0


class Stack:
    """A stack file in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "stack.yaml"
        folder.mkdir(exist_ok=True)
        self.write()

    def write(self, top: str = "", disk: str = "", fs: str = "", capacity: str = "16MiB") -> "Stack":
        """The stack, with more settings of each."""
        self.file.write_text(
            f"version: 1\n{top}\ntiers:\n  - {{type: host, capacity: 4MiB}}\n"
            f"  - {{type: disk, path: {self.folder / 'disk'}, queue: 0.5, capacity: {capacity}, {disk}}}\n"
            f"  - {{type: fs, path: {self.folder / 'fs'}, queue: 0.5, {fs}}}\n"
        )
        return self

    def settings(self, tier: str) -> TierSettings:
        (found,) = [one for one in load_stack(str(self.file)).tiers if one.name == tier]
        assert isinstance(found, TierSettings)
        return found

    def open(self, tier: str, tenant: str = "", epoch: str = "", model: str = "m") -> Tier:
        fields = {"model": model, "tenant": tenant} if tenant else {"model": model}
        return self.settings(tier).open(OpenContext(Namespace.of(**fields), CHUNK, epoch=epoch))

    def fill(self, tier: str, keys: Sequence[int], **where: Any) -> None:
        """Stores these chunks, one after the other."""
        with self.open(tier, **where) as opened:
            for key in map(key_for, keys):
                assert opened.write([key], [memoryview(bytes_for(key, CHUNK))]) == [Outcome.OK]

    def holds(self, tier: str, keys: Sequence[int], **where: Any) -> list[int]:
        """Which of these chunks an engine finds there; all with the right bytes."""
        with self.open(tier, **where) as opened:
            found = []
            for number in keys:
                target = buffer(CHUNK)
                if opened.read([key_for(number)], [target])[0].ok:
                    assert holds(target, key_for(number))
                    found.append(number)
            return found

    def stored(self, tier: str) -> list[StoredNamespace]:
        return self.settings(tier).stored()

    def chunk(self, tier: str, number: int) -> StoredChunk:
        (found,) = [chunk for kept in self.stored(tier) for chunk in kept.chunks(key_for(number).hex())]
        return found

    def keys(self, tier: str) -> list[Key]:
        """What lies in a tier, of any namespace and epoch."""
        return sorted(chunk.entry.key for kept in self.stored(tier) for chunk in kept.chunks())

    @staticmethod
    def flip(chunk: StoredChunk, at: int = CHUNK // 2) -> None:
        """Changes a bit of a stored chunk, in the byte `at` of what is stored."""
        path, _, slot = chunk.place.partition(" slot ")
        start = int(slot) * int(Path(path).stem.rpartition("-")[2]) if slot else 0
        with Path(path).open("r+b", buffering=0) as file:
            file.seek(start + at)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))

    def run(self, command: str, *arguments: object, answer: str | bytes = "") -> Result:
        return CliRunner().invoke(main, [command, str(self.file), *map(str, arguments)], input=answer)

    def json(self, command: str, *arguments: object) -> Any:
        return json.loads(self.run(command, *arguments, "--json").stdout)


class Engine:
    """An engine with the stack open, in a process of its own."""

    def __init__(self, stack: Stack, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps({"stack": str(stack.file), **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        assert self._answer() == "open"

    def __call__(self, verb: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        if self._process.poll() is None:
            self("stop")
        self._end()

    def kill(self) -> None:
        self._process.kill()
        self._end()

    def _end(self) -> None:
        self._process.wait(HANG)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path / "one")


@pytest.fixture
def engine() -> Iterator[Any]:
    """Starts engines beside the test."""
    with ExitStack() as running:

        def start(stack: Stack, **options: Any) -> Engine:
            started = Engine(stack, **options)
            running.callback(started.stop)
            return started

        yield start


@pytest.fixture
def long_ago() -> Any:
    """Everything inside `with long_ago(seconds)` is written down as having happened so long ago."""

    @contextmanager
    def past(seconds: float) -> Iterator[None]:
        real = time.time
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: real() - seconds)
            yield

    return past
