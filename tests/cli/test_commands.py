"""check, schema, ls and clear, over a stack with a third party's tier that keeps files."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvcascade.cli import main
from kvcascade.configs import parse_stack, registry
from kvcascade.testing import bytes_for, key_for

THIRD_PARTY = Path(__file__).parents[1] / "thirdparty"
CHUNK = 4096


@pytest.fixture(autouse=True)
def third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(THIRD_PARTY)
    registry.known.cache_clear()
    yield
    registry.known.cache_clear()


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A shelf with 3 chunks of the tenant `acme`, 2 of `other`, and something foreign."""
    shelf = tmp_path / "shelf"
    for tenant, chunks in (("acme", 3), ("other", 2)):
        (shelf / tenant).mkdir(parents=True)
        for place in range(chunks):
            file = shelf / tenant / str(place)
            file.write_bytes(bytes_for(key_for(place), CHUNK))
    (shelf / "foreign").mkdir()
    (shelf / "foreign" / "file").write_text("not ours")
    return shelf


@pytest.fixture
def stack(shelf: Path, tmp_path: Path) -> Path:
    path = tmp_path / "stack.yaml"
    path.write_text(
        f"version: 1\nnamespace: acme\ntiers:\n  - type: host\n    capacity: 16MiB\n"
        f"  - type: acme\n    name: store\n    shelf: {shelf}\n    password: ${{ACME_PASSWORD:-}}\n"
    )
    return path


def run(*arguments: object, answer: str = "") -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=answer)


def kept(shelf: Path) -> list[str]:
    return sorted(str(path.relative_to(shelf)) for path in shelf.rglob("*") if path.is_file())


ALL = ["acme/0", "acme/1", "acme/2", "foreign/file", "other/0", "other/1"]


# --- check


def test_check_prints_the_resolved_stack_and_the_facts(
    stack: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_PASSWORD", "hunter2")
    done = run("check", stack, "--chunk-bytes", "64KiB")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "hunter2" not in done.output
    resolved, _, table = done.output.partition("\n\n")
    assert "password: '**********'" in resolved
    assert parse_stack(resolved.replace("'**********'", "${ACME_PASSWORD}")) == parse_stack(stack.read_text())
    rows = [line.split() for line in table.splitlines()]
    assert ["host", "memory", "needed", "16", "MiB"] in rows
    assert ["chunks", "of", "64", "KiB", "255"] in rows
    assert ["chunks", "of", "64", "KiB", "1,000"] in rows
    assert f"{shelf}[there]" in "".join(table.split())  # wherever the table has folded it
    assert done.output.endswith("This stack would start.\n")


def test_check_names_what_would_keep_a_tier_from_starting(stack: Path, shelf: Path) -> None:
    os.rename(shelf, f"{shelf}-moved")  # noqa: PTH104
    stack.write_text(stack.read_text().replace("16MiB", "1PiB"))
    done = run("check", stack)
    assert done.exit_code == 2
    first, second = done.stderr.splitlines()
    assert first.startswith(f"{stack}: tiers[0] (host): capacity: 1 PiB ({1 << 50} bytes) asked, ")
    assert second == f"{stack}: tiers[1] (store): shelf: {shelf} is no folder; create it"
    assert "would start" not in done.stdout


def test_check_changes_nothing(stack: Path, shelf: Path) -> None:
    before = kept(shelf)
    run("check", stack)
    assert kept(shelf) == before == ALL


@pytest.mark.parametrize(("size", "said"), [("0", "expected at least 1 byte"), ("64kib", "did you mean KiB?")])
def test_a_chunk_size_that_is_none(size: str, said: str, stack: Path) -> None:
    done = run("check", stack, "--chunk-bytes", size)
    assert done.exit_code == 2
    assert said in done.stderr


# --- schema


def test_schema_prints_json() -> None:
    done = run("schema")
    assert done.exit_code == 0
    assert "tier:acme" in json.loads(done.stdout)["$defs"]


# --- ls


def test_ls_shows_what_each_tier_holds(stack: Path, shelf: Path) -> None:
    for place, age in enumerate((7200, 60, 7200)):
        file = shelf / "acme" / str(place)
        os.utime(file, (file.stat().st_mtime - age,) * 2)
    done = run("ls", stack)
    assert done.exit_code == 0
    row = next(line for line in done.stdout.splitlines() if "tenant=acme" in line)
    assert "store" in row
    assert "12 KiB" in row
    assert " 3 " in row
    assert "1m to 2h" in row
    assert "tenant=other" in done.stdout
    assert "foreign" not in done.stdout


def test_ls_shows_the_other_tiers_where_one_does_not_answer(stack: Path, shelf: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    (second / "other").mkdir(parents=True)
    stack.write_text(stack.read_text() + f"  - type: acme\n    name: second\n    shelf: {second}\n")
    (shelf / "down").touch()
    done = run("ls", stack)
    assert (done.exit_code, done.stderr) == (1, "store: the shelf does not answer\n")
    assert "second" in done.stdout


def test_ls_of_a_stack_that_keeps_nothing() -> None:
    done = run("ls", "host-only")
    assert (done.exit_code, done.stdout) == (0, "No tier of this stack keeps anything outside an engine.\n")


# --- clear


def test_clear_shows_and_asks_first(stack: Path, shelf: Path) -> None:
    done = run("clear", stack, answer="n\n")
    assert done.exit_code == 1
    assert "tenant=acme" in done.stdout
    assert "tenant=other" not in done.stdout
    assert "Remove these 3 chunks? [y/N]: n\nNothing was removed.\n" in done.stdout
    assert kept(shelf) == ALL


def test_clear_without_an_answer_removes_nothing(stack: Path, shelf: Path) -> None:
    assert run("clear", stack).exit_code == 1
    assert kept(shelf) == ALL


def test_an_interrupt_at_the_question_removes_nothing(stack: Path, shelf: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "kvcascade.cli", "clear", str(stack)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(THIRD_PARTY)},
    )
    assert child.stdout is not None
    seen = b""
    while not seen.endswith(b"[y/N]: "):
        seen += child.stdout.read(1)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (130, b"")
    assert kept(shelf) == ALL


@pytest.mark.parametrize(("arguments", "answer"), [((), "y\n"), (("--yes",), "")])
def test_clear_removes_what_is_of_the_stacks_namespace(
    arguments: tuple[str, ...], answer: str, stack: Path, shelf: Path
) -> None:
    done = run("clear", stack, *arguments, answer=answer)
    assert done.exit_code == 0
    assert "store: removed acme" in done.stdout
    assert kept(shelf) == ["foreign/file", "other/0", "other/1"]


def test_clear_all_namespaces_leaves_what_is_not_ours(stack: Path, shelf: Path) -> None:
    done = run("clear", stack, "--all-namespaces", "--yes")
    assert done.exit_code == 0
    assert kept(shelf) == ["foreign/file"]


def test_clear_one_tier_only(stack: Path, shelf: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    (second / "acme").mkdir(parents=True)
    (second / "acme" / "0").write_bytes(bytes_for(key_for(0), CHUNK))
    stack.write_text(stack.read_text() + f"  - type: acme\n    name: second\n    shelf: {second}\n")
    assert run("clear", stack, "--tier", "second", "--yes").exit_code == 0
    assert kept(second) == []
    assert kept(shelf) == ALL


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("stor", "--tier stor: no such tier (did you mean 'store'?); allowed: store\n"),
        ("host", "--tier host: the primary tier is memory of an engine; nothing of it is kept outside one\n"),
    ],
)
def test_clear_a_tier_that_is_not_there(name: str, said: str, stack: Path) -> None:
    done = run("clear", stack, "--tier", name, "--yes")
    assert (done.exit_code, done.stderr) == (2, said)


def test_clear_does_not_touch_what_is_in_use(stack: Path, shelf: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    (second / "acme").mkdir(parents=True)
    (second / "acme" / "0").touch()
    stack.write_text(stack.read_text() + f"  - type: acme\n    name: second\n    shelf: {second}\n")
    (shelf / "busy").touch()
    done = run("clear", stack, "--yes")
    assert (done.exit_code, done.stderr) == (2, "store: process 4711 is using it; stop it first\n")
    assert kept(shelf) == sorted([*ALL, "busy"])
    assert kept(second) == []


def test_clear_where_there_is_nothing(stack: Path, shelf: Path) -> None:
    run("clear", stack, "--yes")
    done = run("clear", stack)
    assert done.exit_code == 0
    assert done.stdout.endswith("There is nothing to remove.\n")


def test_clear_where_a_tier_does_not_answer(stack: Path, shelf: Path) -> None:
    (shelf / "down").touch()
    done = run("clear", stack, "--yes")
    assert (done.exit_code, done.stderr) == (1, "store: the shelf does not answer\n")
    assert kept(shelf) == sorted([*ALL, "down"])


def test_a_host_that_holds_too_few_chunks_is_said_by_check_too(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("version: 1\ntiers:\n  - type: host\n    capacity: 1MiB\n")
    result = run("check", path, "--chunk-bytes", "2MiB")
    assert result.exit_code == 2
    assert "capacity: 1 MiB holds 0 chunks of 2 MiB; at least 4 are needed" in result.stderr
