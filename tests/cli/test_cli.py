"""The command line as a whole: what it loads, how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcascade import __version__
from kvcascade.cli import main

COMMANDS = [
    "check",
    "replay",
    "ls",
    "inspect",
    "verify",
    "gc",
    "clear",
    "export",
    "import",
    "warm",
    "schema",
    "simulate",
]
RUN = [sys.executable, "-m", "kvcascade.cli"]


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from kvcascade.cli import main; main(['--help'], standalone_mode=False); "
        "print(sorted({'pydantic', 'rich', 'torch', 'numpy', 'yaml', 'lmdb', 'boto3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert [line.split()[0] for line in done.stdout.splitlines()[-1 - len(COMMANDS) : -1]] == COMMANDS


def test_the_version() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert (done.exit_code, done.output) == (0, f"kvcascade, version {__version__}\n")


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "replay"])
def test_every_command_explains_itself(command: str) -> None:
    done = CliRunner().invoke(main, [command, "--help"])
    assert done.exit_code == 0
    assert f"Usage: main {command}" in done.output


def test_an_unknown_command_gets_the_nearest_one() -> None:
    done = CliRunner().invoke(main, ["chek"])
    assert done.exit_code == 2
    assert f"no such command 'chek' (did you mean 'check'?); allowed: {', '.join(COMMANDS)}" in done.stderr


@pytest.mark.parametrize("command", ["check", "ls", "clear"])
def test_what_can_not_be_used_is_a_message_and_exit_code_2(command: str, tmp_path: Path) -> None:
    done = subprocess.run([*RUN, command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{tmp_path}: can't be read: Is a directory\n"


def test_an_interrupt_is_exit_code_130_without_a_traceback(tmp_path: Path) -> None:
    """While it waits for its stack file, a named pipe that someone has still to write."""
    os.mkfifo(tmp_path / "stack.yaml")
    child = subprocess.Popen([*RUN, "check", str(tmp_path / "stack.yaml")], stderr=subprocess.PIPE)
    with (tmp_path / "stack.yaml").open("w"):  # opens once the command reads
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (130, b"")


def test_a_reader_that_goes_away_is_no_trouble() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([*RUN, "schema"], stdout=writes, stderr=subprocess.PIPE, check=False)
    os.close(writes)
    assert done.stderr == b""
