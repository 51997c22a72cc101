"""`kvcascade gc`."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import key_for
from kvcascade.tiers.fs.layout import Access
from kvcascade.tiers.fs.lease import Lease
from kvcascade.tiers.fs.writers import Identity

CHUNK = 64 << 10

DAY = 86400.0


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if not path.name.endswith("-lock")}


def temporaries(folder: Path) -> list[Path]:
    return [path for path in folder.glob(".kvcascade/writers/*/*") if not path.name.startswith(("in-", "grown"))]


# --- what nobody can read


def test_what_is_of_use_stays(stack: Any, engine: Any) -> None:
    stack.fill("disk", range(8))
    stack.fill("fs", range(8))
    stack.fill("fs", range(8), epoch="v1")
    done = stack.run("gc")
    assert (done.exit_code, done.stdout) == (0, "There is nothing to remove.\n")
    running = engine(stack)
    assert running("serve", keys=list(range(8))) == 8
    assert stack.run("gc", "--yes").stdout == "There is nothing to remove.\n"
    running("forget")
    assert running("serve", keys=list(range(8))) == 8


def test_epochs_that_are_over_go_once_no_engine_is_in_them(stack: Any, engine: Any) -> None:
    """Two engines on a directory without a capacity: one of them is reset, the other one goes on."""
    stack.fill("fs", range(8))
    stays, moves = engine(stack), engine(stack)
    assert stays("serve", keys=list(range(8))) == 8
    assert moves("serve", keys=list(range(8))) == 8
    assert moves("reset")
    moves("serve", keys=list(range(20, 26)))
    stack.run("gc", "--yes")
    stays("forget")
    assert stays("serve", keys=list(range(8))) == 8, "its epoch is over, and it is still in it"
    moves("forget")
    assert moves("serve", keys=list(range(20, 26))) == 6, "its epoch is its own"

    moves.stop()
    planned = stack.run("gc", "--dry-run", "--tier", "fs")
    assert planned.exit_code == 0
    assert " 6 " in planned.stdout
    assert len(stack.keys("fs")) == 14
    done = stack.run("gc", "--yes", "--tier", "fs")
    assert done.stdout.startswith("fs: removed 6 chunks")
    assert stack.keys("fs") == sorted(map(key_for, range(8)))
    stays("forget")
    assert stays("serve", keys=list(range(8))) == 8

    stays.stop()
    assert stack.run("gc", "--yes", "--tier", "fs").stdout.startswith("fs: removed 8 chunks")
    assert stack.keys("fs") == []
    assert not list((stack.folder / "fs").glob("????????????????????????????????"))


def test_an_epoch_that_is_over_goes_beside_the_engine_that_has_left_it(stack: Any, engine: Any) -> None:
    running = engine(stack)
    running("serve", keys=list(range(6)))
    for round_ in range(1, 4):
        assert running("reset")
        running("serve", keys=list(range(10 * round_, 10 * round_ + 6)))
        assert len(stack.keys("fs")) == 12
        assert stack.run("gc", "--yes", "--tier", "fs").stdout.startswith("fs: removed 6 chunks")
        assert len(list((stack.folder / "fs").rglob("epochs/*.json"))) <= 2
    running("forget")
    assert running("serve", keys=list(range(30, 36))) == 6


def test_a_disk_of_which_nothing_will_be_read_again_is_given_back(stack: Any, engine: Any) -> None:
    running = engine(stack)
    assert running("reset")
    running("serve", keys=list(range(8)))
    assert "disk: " not in stack.run("gc", "--yes").stdout
    running("forget")
    assert running("serve", keys=list(range(8))) == 8
    running.stop()
    assert "disk: removed 8 chunks" in stack.run("gc", "--yes").stdout
    assert list((stack.folder / "disk").iterdir()) == []


def test_what_killed_engines_leave_goes(stack: Any, engine: Any) -> None:
    stack.fill("fs", range(4))
    lives, killed = engine(stack), engine(stack)
    killed.kill()
    writers = stack.folder / "fs" / ".kvcascade" / "writers"
    (folder,) = [path for path in writers.iterdir() if f"~{killed.pid}~" in path.name]
    (folder / "140-0").write_bytes(bytes(70_000))
    (beside,) = [path for path in writers.iterdir() if f"~{lives.pid}~" in path.name]
    (beside / "140-0").write_bytes(bytes(70_000))
    foreign = writers / "notes"
    foreign.mkdir()
    done = stack.run("gc", "--tier", "fs", "--dry-run")
    assert "Nothing was removed (--dry-run)." in done.stdout
    assert len(temporaries(stack.folder / "fs")) == 2
    done = stack.run("gc", "--tier", "fs", "--yes")
    assert done.stdout.startswith("fs: removed 0 chunks and 3 other files and folders (68.36 KiB)")
    assert temporaries(stack.folder / "fs") == [beside / "140-0"]
    assert foreign.is_dir()
    assert stack.holds("fs", range(4)) == [0, 1, 2, 3]


def test_what_was_killed_before_its_namespace_had_a_folder(stack: Any, engine: Any) -> None:
    killed = engine(stack)
    killed.kill()
    shared = stack.folder / "fs"
    (home,) = shared.glob("????????????????????????????????")
    shutil.rmtree(home)
    (folder,) = (shared / ".kvcascade" / "writers").iterdir()
    (folder / "140-0").write_bytes(bytes(70_000))
    assert "Nothing was removed (--dry-run)." in stack.run("gc", "--tier", "fs", "--dry-run").stdout
    assert folder.exists()
    done = stack.run("gc", "--tier", "fs", "--yes")
    assert done.stdout == "fs: removed 0 chunks and 3 other files and folders (68.36 KiB) of fs as a whole\n"
    assert not folder.exists()


def test_a_shared_directory_comes_down_to_its_capacity(stack: Any, engine: Any) -> None:
    """vllm-project/vllm#52784: by what was used the longest ago, of all namespaces, where no engine does it."""
    stack.fill("fs", range(10), model="other")
    stack.fill("fs", range(30))
    shared = stack.folder / "fs"
    stack.write(fs=f"capacity: {20 * (CHUNK + 4096)}")
    before = tree(shared)
    assert " 22 " in stack.run("gc", "--tier", "fs", "--dry-run").stdout
    assert tree(shared) == before
    done = stack.run("gc", "--tier", "fs", "--yes")
    assert done.stdout.startswith("fs: removed 22 chunks (1.461 MiB) of fs as a whole\n")
    assert stack.keys("fs") == sorted(map(key_for, range(12, 30)))
    assert stack.run("gc", "--tier", "fs", "--yes").stdout == "There is nothing to remove.\n"


def test_a_capacity_is_the_business_of_the_engine_that_sweeps(stack: Any, engine: Any) -> None:
    stack.fill("fs", range(30))
    stack.write(fs=f"capacity: {20 * (CHUNK + 4096)}")
    lease = Lease(
        stack.folder / "fs" / ".kvcascade" / "sweeper", Identity.new("", False), Access(), time.monotonic
    )
    assert lease.held(time.time)
    assert stack.run("gc", "--tier", "fs", "--yes").stdout == "There is nothing to remove.\n"
    lease.release()
    assert stack.run("gc", "--tier", "fs", "--yes").stdout.startswith("fs: removed 12 chunks")


def test_foreign_files_stay(stack: Any, engine: Any) -> None:
    running = engine(stack)
    running("reset")
    running("serve", keys=[1, 2])
    running.stop()
    folders = [
        Path(stack.chunk("fs", 1).place).parent,
        (stack.folder / "fs"),
        (stack.folder / "disk" / "engine-0"),
    ]
    for folder in folders:
        (folder / "mine").write_text("mine")
    assert stack.run("gc", "--yes").exit_code == 0
    assert stack.keys("fs") == stack.keys("disk") == []
    assert [(folder / "mine").read_text() for folder in folders] == ["mine"] * 3


# --- what is asked for


def test_chunks_that_fit_all_of_what_is_asked_go(stack: Any, long_ago: Any) -> None:
    for tier in ("disk", "fs"):
        with long_ago(9 * DAY):
            stack.fill(tier, range(8))
        stack.fill(tier, range(8, 16))
    for number in range(4):
        path = stack.chunk("fs", number).place
        os.utime(path, (1, os.stat(path).st_mtime))  # noqa: PTH116
    before = tree(stack.folder)
    for nothing in (
        ("--older-than", "10d"),
        ("--unused-for", "30d"),
        ("--older-than", "1d", "--prefix", "ffffff"),
    ):
        assert stack.run("gc", *nothing, "--yes").stdout == "There is nothing to remove.\n"
    assert stack.run("gc", "--older-than", "1d", "--dry-run").exit_code == 0
    assert tree(stack.folder) == before
    first = key_for(3).hex()
    done = stack.run("gc", "--older-than", "7d", "--prefix", first[:6], "--yes")
    assert [line.partition(" chunk ")[0] for line in done.stdout.splitlines()] == [
        "disk: removed 1",
        "fs: removed 1",
    ]
    stack.run("gc", "--older-than", "7d", "--yes")
    for tier in ("disk", "fs"):
        assert stack.holds(tier, range(16)) == list(range(8, 16))


def test_what_was_used_lately_stays(stack: Any, long_ago: Any) -> None:
    with long_ago(3 * DAY):
        stack.fill("disk", range(8))
    with stack.open("disk") as tier:
        tier.touch([key_for(2), key_for(5)])
    stack.fill("fs", range(8))
    for number in (0, 1, 3):
        path = stack.chunk("fs", number).place
        os.utime(path, (1e9, 1e9))
    assert stack.run("gc", "--unused-for", "1d", "--yes").exit_code == 0
    assert stack.holds("disk", range(8)) == [2, 5]
    assert stack.holds("fs", range(8)) == [2, 4, 5, 6, 7]


def test_namespaces_by_pattern_and_by_digest(stack: Any) -> None:
    for model in ("llama-3", "llama-4", "qwen"):
        stack.fill("fs", range(4), model=model)
    assert stack.run("gc", "--namespace", "model=llama", "--yes").stdout == "There is nothing to remove.\n"
    done = stack.run("gc", "--namespace", "model=llama-*", "--yes")
    assert len(done.stdout.splitlines()) == 2
    assert stack.holds("fs", range(4), model="qwen") == [0, 1, 2, 3]
    (digest,) = [kept.namespace.digest.hex() for kept in stack.stored("fs") if list(kept.chunks())]
    assert stack.run("gc", "--namespace", digest[:8], "--yes").stdout.startswith("fs: removed 4 chunks")
    assert stack.keys("fs") == []


def test_other_tenants_stay_unless_all_is_asked(stack: Any, engine: Any) -> None:
    stack.write(top="namespace: green")
    stack.fill("fs", range(4), tenant="green")
    stack.fill("fs", range(4), tenant="blue")
    stack.fill("fs", range(4))
    stack.run("gc", "--older-than", "0s", "--yes")
    assert stack.holds("fs", range(4), tenant="blue") == stack.holds("fs", range(4)) == [0, 1, 2, 3]
    assert stack.holds("fs", range(4), tenant="green") == []
    stack.run("gc", "--older-than", "0s", "--all-namespaces", "--yes")
    assert stack.keys("fs") == []


def test_it_shows_and_asks_first(stack: Any) -> None:
    stack.fill("fs", range(4))
    for answer, code, left in (("n\n", 1, 4), ("", 1, 4), ("y\n", 0, 0)):
        done = stack.run("gc", "--older-than", "0s", answer=answer)
        assert done.exit_code == code
        assert "model=m" in done.stdout
        assert "Remove 4 chunks (256 KiB)? [y/N]: " in done.stdout
        assert len(stack.keys("fs")) == left


def test_what_an_engine_has_to_itself_is_refused_and_the_others_go_on(stack: Any, engine: Any) -> None:
    running = engine(stack)
    running("serve", keys=list(range(8)))
    done = stack.run("gc", "--older-than", "0s", "--yes")
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"disk: {stack.folder / 'disk' / 'engine-0'}")
    assert f"is in use by process {running.pid} on " in line
    assert done.stdout.startswith("fs: removed 8 chunks")
    assert len(stack.keys("disk")) == 8
    assert stack.keys("fs") == []
    running("forget")
    assert running("serve", keys=list(range(8))) == 8, "from the disk"


def test_what_an_engine_puts_there_meanwhile_stays(stack: Any, engine: Any) -> None:
    running = engine(stack)
    running("serve", keys=list(range(8)))
    done = stack.run("gc", "--tier", "fs", "--unused-for", "1h", "--yes")
    assert done.stdout == "There is nothing to remove.\n"
    assert len(stack.keys("fs")) == 8


@pytest.mark.parametrize("tier", ["disk", "fs"])
def test_an_interrupt_leaves_whole_chunks(stack: Any, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first Ctrl-C it ends between two chunks; whatever is still there is right."""
    stack.fill(tier, range(120))
    (kept,) = stack.stored(tier)
    original, seen = type(kept).chunks, []

    def chunks(self: Any, *arguments: Any) -> Any:
        for chunk in original(self, *arguments):
            seen.append(chunk)
            if len(seen) == 40:
                os.kill(os.getpid(), signal.SIGINT)
            yield chunk

    monkeypatch.setattr(type(kept), "chunks", chunks)
    done = stack.run("gc", "--older-than", "0s", "--yes")
    assert done.exit_code == 130
    assert len(seen) == 40
    monkeypatch.undo()
    assert stack.run("verify").exit_code == 0
    left = stack.holds(tier, range(120))
    assert len(left) in (81, 120)
    assert len(stack.keys(tier)) == len(left)
