"""`kvcascade export` and `import`."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import key_for
from kvcascade.tiers.archive import ArchiveReader

CHUNK = 64 << 10
DAY = 86400.0
HANG = 60.0

SLOW_EXPORT = """
import sys
from kvcascade.cli import main
from kvcascade.tiers.archive import ArchiveWriter

add, count = ArchiveWriter.add, 0
def slowly(self, *arguments):
    global count
    add(self, *arguments)
    count += 1
    if count == 10:
        self._file.flush()
        print("ten", flush=True)
        sys.stdin.readline()
ArchiveWriter.add = slowly
main(sys.argv[1:])
"""
"""Stops after ten chunks, until it gets a line."""


@pytest.fixture
def two(stack: Any, tmp_path: Path) -> Any:
    """Another stack, on another machine."""
    return type(stack)(tmp_path / "two")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "chunks.kvc"


def test_what_is_exported_is_imported(stack: Any, two: Any, file: Path) -> None:
    stack.fill("disk", range(20))
    stack.fill("fs", range(10, 40))
    done = stack.run("export", file)
    assert (done.exit_code, done.stdout) == (0, "")
    assert done.stderr == f"Wrote 40 chunks (2.5 MiB) to {file}.\n"
    assert file.stat().st_mode & 0o777 == 0o600
    done = two.run("import", file)
    assert (done.exit_code, done.stderr) == (0, "")
    assert two.holds("fs", range(40)) == list(range(40))
    assert two.keys("disk") == []
    assert two.run("import", file, "--tier", "disk").exit_code == 0
    assert two.holds("disk", range(40)) == list(range(40))
    assert two.run("verify").exit_code == 0


def test_through_a_pipe(stack: Any, two: Any) -> None:
    stack.fill("fs", range(30))
    done = stack.run("export", "-")
    assert done.stderr == "Wrote 30 chunks (1.875 MiB) to the standard output.\n"
    assert two.run("import", "-", answer=done.stdout_bytes).exit_code == 0
    assert two.holds("fs", range(30)) == list(range(30))


def test_only_what_is_asked_for_is_exported(stack: Any, two: Any, file: Path, long_ago: Any) -> None:
    with long_ago(9 * DAY):
        stack.fill("fs", range(10))
    stack.fill("fs", range(10, 20))
    stack.fill("fs", range(5), model="other")
    for number, (options, chunks) in enumerate(
        {
            ("--newer-than", "7d"): 15,
            ("--namespace", "model=other"): 5,
            ("--prefix", key_for(13).hex()[:10]): 1,
            ("--tier", "disk"): 0,
            ("--namespace", "model=m", "--newer-than", "7d"): 10,
        }.items()
    ):
        target = file.with_name(str(number))
        assert stack.run("export", target, *options).exit_code == 0
        with target.open("rb") as source:
            assert len(list(ArchiveReader(source))) == chunks


def test_each_namespace_gets_its_own(stack: Any, two: Any, file: Path) -> None:
    for model in ("a", "b"):
        stack.fill("fs", range(8), model=model)
    stack.run("export", file)
    two.run("import", file)
    two.run("import", file, "--tier", "disk")
    for tier in ("disk", "fs"):
        assert two.holds(tier, range(8), model="a") == two.holds(tier, range(8), model="b") == list(range(8))
        assert two.holds(tier, range(8), model="c") == []


def test_what_is_there_stays_as_it_is(stack: Any, two: Any, file: Path) -> None:
    stack.fill("fs", range(8))
    two.fill("fs", range(4, 12))
    before = {number: Path(two.chunk("fs", number).place).stat() for number in range(4, 12)}
    stack.run("export", file)
    for stored, there in ((4, 4), (0, 8)):
        row = two.run("import", file).stdout.splitlines()[-2].split()
        assert row[:3] == ["fs", "model=m", str(stored)]
        assert row[5] == str(there)
    for number, info in before.items():
        after = Path(two.chunk("fs", number).place).stat()
        assert (after.st_ino, after.st_mtime_ns) == (info.st_ino, info.st_mtime_ns)


def test_a_full_disk_gets_what_was_used_last(stack: Any, two: Any, file: Path) -> None:
    stack.fill("fs", range(100))
    for number in range(100):
        os.utime(stack.chunk("fs", number).place, (1e9 + number, 1e9 + number))
    stack.run("export", file)
    two.write(capacity="4MiB")
    done = two.run("import", file, "--tier", "disk")
    assert done.exit_code == 0
    held = two.holds("disk", range(100))
    assert 40 < len(held) < 64
    assert held == list(range(100 - len(held), 100))
    row = done.stdout.splitlines()[-2].split()
    assert int(row[6]) == 100 - len(held)
    with two.open("disk") as tier:
        by_use = sorted(tier.entries(), key=lambda entry: entry.used)
        assert [entry.key for entry in by_use] == [key_for(number) for number in held]


def test_nothing_is_pushed_out(stack: Any, two: Any, file: Path) -> None:
    two.write(capacity="4MiB", fs="capacity: 3MiB")
    two.fill("disk", range(1000, 1040), model="other")
    two.fill("fs", range(1000, 1040), model="other")
    stack.fill("fs", range(60))
    stack.run("export", file)
    for tier in ("disk", "fs"):
        assert two.run("import", file, "--tier", tier).exit_code == 0
        assert two.holds(tier, range(1000, 1040), model="other") == list(range(1000, 1040))
        assert 0 < len(two.keys(tier)) - 40 < 30


def test_what_is_older_than_the_ttl_is_left_out(stack: Any, two: Any, file: Path, long_ago: Any) -> None:
    with long_ago(9 * DAY):
        stack.fill("fs", range(5))
    stack.fill("fs", range(5, 10))
    stack.run("export", file)
    two.write(fs="ttl: 7d")
    assert two.run("import", file).exit_code == 0
    assert two.holds("fs", range(10)) == list(range(5, 10))


def test_weights_are_not_mixed(stack: Any, two: Any, file: Path) -> None:
    stack.fill("fs", range(8), epoch="v1")
    stack.fill("fs", range(20, 24))
    stack.run("export", file)
    two.write(top="weights_version: v2")
    done = two.run("import", file)
    assert done.exit_code == 0
    assert (
        "left out 8 chunks of model=m: they are of the weights_version 'v1', and the stack names 'v2'"
        in done.stderr
    )
    assert two.keys("fs") == []
    two.write(top="weights_version: v1")
    two.run("import", file)
    assert two.holds("fs", range(30), epoch="v1") == list(range(8))
    assert two.holds("fs", range(30)) == []


def test_tenants_are_not_mixed(stack: Any, two: Any, file: Path) -> None:
    stack.fill("fs", range(8), tenant="blue")
    stack.fill("fs", range(4))
    stack.run("export", file)
    two.run("import", file)
    assert two.holds("fs", range(8), tenant="blue") == []
    assert two.holds("fs", range(8)) == [0, 1, 2, 3]
    stack.run("export", file.with_suffix(".all"), "--all-namespaces")
    done = two.run("import", file.with_suffix(".all"))
    assert "they are of the tenant 'blue'; --all-namespaces takes them" in done.stderr
    two.run("import", file.with_suffix(".all"), "--all-namespaces")
    assert two.holds("fs", range(8), tenant="blue") == list(range(8))


def test_what_a_reset_has_made_void_is_not_exported(stack: Any, engine: Any, file: Path) -> None:
    """Nor what an engine has for itself: nobody can say of which weights it is."""
    running = engine(stack)
    running("serve", keys=[1, 2, 3])
    running("reset")
    running("serve", keys=[4, 5, 6])
    assert stack.run("export", file).stderr.startswith("Wrote 0 chunks")


def test_beside_running_engines(stack: Any, two: Any, engine: Any, file: Path) -> None:
    one, other = engine(stack), engine(two)
    one("serve", keys=list(range(8)))
    assert stack.run("export", file).stderr.startswith("Wrote 8 chunks")
    done = two.run("import", file, "--tier", "disk")
    assert (done.exit_code, done.stdout) == (2, "")
    other("serve", keys=[100])
    done = two.run("import", file, "--tier", "disk")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert f"is in use by process {other.pid} on " in line
    assert two.run("import", file, "--tier", "fs").exit_code == 0
    assert other("serve", keys=list(range(8))) == 8


def test_what_is_corrupt_is_left_out(stack: Any, two: Any, file: Path) -> None:
    stack.fill("fs", range(8))
    stack.flip(stack.chunk("fs", 3))
    done = stack.run("export", file)
    assert done.exit_code == 1
    assert "Left out, being corrupt or not readable: 1 chunk." in done.stderr
    two.run("import", file)
    assert two.holds("fs", range(8)) == [0, 1, 2, 4, 5, 6, 7]


def test_an_archive_that_is_cut_off(stack: Any, two: Any, file: Path) -> None:
    stack.fill("fs", range(20))
    stack.run("export", file)
    os.truncate(file, file.stat().st_size // 2)
    done = two.run("import", file)
    assert done.exit_code == 1
    held = two.holds("fs", range(20))
    assert 8 <= len(held) <= 10
    assert done.stderr == f"{file} is cut off; stored from before that: {len(held)} chunks\n"


def test_an_archive_with_a_damaged_chunk(stack: Any, two: Any, file: Path) -> None:
    stack.fill("fs", range(20))
    stack.run("export", file)
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    done = two.run("import", file)
    assert done.exit_code == 1
    assert f"{file}: left out, being damaged (payload damaged): 1 chunk\n" in done.stderr
    assert len(two.holds("fs", range(20))) == 19


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_an_export_that_is_ended_leaves_no_half_file(stack: Any, file: Path, sent: int) -> None:
    stack.fill("fs", range(40))
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW_EXPORT, "export", str(stack.file), str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"ten\n"
    assert not file.exists()
    done = stack.run("export", file)
    assert done.exit_code == 2
    assert "is being written by another export" in done.stderr
    child.send_signal(sent)
    child.communicate(b"\n", timeout=HANG)
    assert child.returncode == (130 if sent == signal.SIGINT else -sent)
    assert not file.exists()
    assert stack.run("export", file).stderr.startswith("Wrote 40 chunks")
    assert [path.name for path in file.parent.glob("chunks*")] == ["chunks.kvc"]


def test_a_file_that_is_there_stays(stack: Any, file: Path) -> None:
    file.write_text("mine")
    stack.fill("fs", range(3))
    done = stack.run("export", file)
    assert (done.exit_code, done.stderr) == (2, f"{file} is there already; remove it, or give another name\n")
    assert file.read_text() == "mine"


def test_files_that_can_not_be_used(stack: Any, two: Any, file: Path) -> None:
    done = stack.run("export", file / "no" / "folder")
    assert (done.exit_code, done.stderr) == (2, f"{file / 'no' / 'folder'}: No such file or directory\n")
    done = two.run("import", file)
    assert (done.exit_code, done.stderr) == (2, f"{file}: No such file or directory\n")
    file.write_text("version: 1\n")
    done = two.run("import", file)
    assert (done.exit_code, done.stderr) == (2, f"{file} is no archive of KVCascade\n")
    assert two.run("import", file.parent).exit_code == 2


def test_a_tier_that_keeps_nothing(stack: Any, file: Path) -> None:
    stack.fill("fs", range(3))
    stack.run("export", file)
    stack.file.write_text(
        "version: 1\ntiers:\n  - {type: host, capacity: 4MiB}\n  - {type: memory, capacity: 4MiB}\n"
    )
    done = stack.run("import", file, "--tier", "memory")
    assert (done.exit_code, done.stderr) == (2, "--tier memory: this tier keeps nothing outside an engine\n")


def test_an_interrupted_import_leaves_whole_chunks(
    stack: Any, two: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.fill("fs", range(200))
    stack.run("export", file)
    original, seen = ArchiveReader.__iter__, []

    def things(self: Any) -> Any:
        for thing in original(self):
            seen.append(thing)
            if len(seen) == 100:
                os.kill(os.getpid(), signal.SIGINT)
            yield thing

    monkeypatch.setattr(ArchiveReader, "__iter__", things)
    done = two.run("import", file, "--tier", "disk")
    assert done.exit_code == 130
    assert two.run("verify").exit_code == 0
    held = two.holds("disk", range(200))
    assert len(held) == 64
    assert " 64 " in done.stdout
