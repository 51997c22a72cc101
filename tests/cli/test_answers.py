"""What the commands have in common: a tier that does not answer, one that keeps nothing, what they load."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import ConfigError, TierUnavailable
from kvcascade.testing import key_for
from kvcascade.tiers.fs import FsSettings

STORED = ["ls", "inspect", "verify", "gc", "clear", "export", "import", "warm"]
AWAY = TierUnavailable("the server is away")
CLOSED = ConfigError("path: /mnt/kv can't be used: Permission denied")


@pytest.fixture(params=[(AWAY, 1), (CLOSED, 2)], ids=["away", "closed"])
def trouble(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """The directory does not answer; what is said then, and the exit code."""
    error, code = request.param

    def stored(settings: FsSettings, engine_id: str | None = None) -> Any:
        raise error

    monkeypatch.setattr(FsSettings, "stored", stored)
    return f"fs: {error}\n", code


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("ls", ()),
        ("inspect", (key_for(1).hex(),)),
        ("verify", ()),
        ("gc", ("--dry-run",)),
        ("gc", ("--older-than", "1s", "--yes")),
        ("clear", ("--yes",)),
        ("export", ("{folder}/a.kvc",)),
    ],
)
def test_a_tier_that_does_not_answer_is_named_once_and_the_other_goes_on(
    stack: Any, trouble: tuple[str, int], command: str, arguments: tuple[str, ...], long_ago: Any
) -> None:
    with long_ago(60):
        stack.fill("disk", range(4))
    done = stack.run(command, *(argument.format(folder=stack.folder) for argument in arguments))
    said, code = trouble
    assert done.exit_code == code
    assert done.stderr.startswith(said)
    assert done.stderr.count("fs: ") == 1
    if command == "export":
        assert done.stderr.endswith(f"Wrote 4 chunks (256 KiB) to {stack.folder}/a.kvc.\n")
    elif command in ("clear", "gc") and "--yes" in arguments:
        assert stack.keys("disk") == []
        assert "disk: removed" in done.stdout
    else:
        assert "disk" in done.stdout or command == "gc"
        assert len(stack.keys("disk")) == 4


def test_a_stack_that_keeps_nothing(stack: Any, tmp_path: Path) -> None:
    stack.file.write_text("version: 1\ntiers:\n  - {type: host, capacity: 4MiB}\n  - {type: memory}\n")
    assert stack.run("verify").stdout == "There is nothing to verify.\n"
    assert stack.run("gc").stdout == "There is nothing to remove.\n"
    assert stack.run("inspect", "00").exit_code == 1
    assert stack.run("export", tmp_path / "a.kvc").stderr.startswith("Wrote 0 chunks")
    for command, arguments in (("import", (tmp_path / "a.kvc",)), ("warm", ())):
        done = stack.run(command, *arguments)
        assert (done.exit_code, done.stderr) == (2, "no tier of this stack keeps anything outside an engine\n")


@pytest.mark.parametrize("command", STORED)
def test_a_tier_that_is_not_there(stack: Any, command: str) -> None:
    arguments = {"inspect": ["00"], "export": ["a.kvc"], "import": ["a.kvc"]}.get(command, [])
    if command == "ls":
        return
    option = "--from" if command == "warm" else "--tier"
    done = stack.run(command, *arguments, option, "dsk")
    assert done.exit_code == 2
    assert "no such tier (did you mean 'disk'?); allowed: disk, fs" in done.stderr


@pytest.mark.parametrize("command", STORED)
def test_help_says_it_all_and_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys; from kvcascade.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'pydantic', 'rich', 'torch', 'numpy', 'yaml', 'lmdb', 'boto3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *text, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    options = [line.split() for line in text if line.strip().startswith("-")]
    assert all(len(words) > 1 for words in options)
    assert len(text) >= 10
