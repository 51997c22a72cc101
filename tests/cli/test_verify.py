"""`kvcascade verify`."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcascade.cli.kept import Throttle
from kvcascade.testing import key_for

CHUNK = 64 << 10
HANG = 60.0


def test_everything_is_right(stack: Any) -> None:
    stack.fill("disk", range(20))
    stack.fill("fs", range(30))
    done = stack.run("verify")
    assert (done.exit_code, done.stderr) == (0, "")
    counts = {one["tier"]: one for one in stack.json("verify")}
    for tier, chunks in (("disk", 20), ("fs", 30)):
        assert counts[tier]["checked"] == counts[tier]["right"] == chunks
        assert counts[tier]["bytes_right"] == chunks * CHUNK
        assert counts[tier]["corrupt"] == counts[tier]["gone"] == counts[tier]["failed"] == 0
        assert counts[tier]["wrong"] == []


@pytest.mark.parametrize("tier", ["disk", "fs"])
@pytest.mark.parametrize(
    ("at", "why"), [(CHUNK // 2, "payload damaged"), (20, "header damaged"), (0, "no envelope")]
)
def test_a_changed_bit_is_found_and_stays_until_it_is_removed(stack: Any, tier: str, at: int, why: str) -> None:
    """vllm-project/vllm#54363: one bit in the middle of a chunk."""
    stack.fill(tier, range(20))
    damaged = stack.chunk(tier, 7)
    stack.flip(damaged, at)
    for _ in range(2):
        done = stack.run("verify")
        assert done.exit_code == 1
        assert f"{tier}: {why}: {damaged.place} (key {key_for(7).hex()})" in done.stdout
    (result,) = [one for one in stack.json("verify") if one["tier"] == tier]
    assert (result["checked"], result["right"], result["corrupt"]) == (20, 19, 1)
    assert result["wrong"] == [{"key": key_for(7).hex(), "place": damaged.place, "why": why}]
    done = stack.run("verify", "--corrupt", "remove")
    assert done.exit_code == 1
    assert stack.run("verify").exit_code == 0
    assert stack.holds(tier, range(20)) == [number for number in range(20) if number != 7]
    stack.fill(tier, [7])
    assert stack.holds(tier, [7]) == [7]


def test_files_that_are_cut_off_swapped_or_empty(stack: Any) -> None:
    stack.fill("fs", range(20))
    one, two, cut, empty = (Path(stack.chunk("fs", number).place) for number in range(4))
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    os.truncate(cut, 3 * 4096 + 5)
    os.truncate(empty, 0)
    found = {wrong["place"]: wrong["why"] for wrong in stack.json("verify")[0]["wrong"]}
    assert found == {
        str(one): "other key",
        str(two): "other key",
        str(cut): "other length",
        str(empty): "no envelope",
    }
    stack.run("verify", "--corrupt", "remove")
    assert stack.holds("fs", range(20)) == list(range(4, 20))


def test_what_is_corrupt_is_kept_for_inspection(stack: Any) -> None:
    stack.write(disk="on_corrupt: quarantine")
    for tier in ("disk", "fs"):
        stack.fill(tier, range(8))
        damaged = stack.chunk(tier, 3)
        stack.flip(damaged)
        done = stack.run("verify", "--tier", tier, "--corrupt", "quarantine")
        assert done.exit_code == 1
        assert "quarantined" in done.stdout
        (kept,) = (stack.folder / tier).rglob("quarantine/*.chunk")
        assert kept.stat().st_size == CHUNK + 4096
        assert key_for(3) in kept.read_bytes()[:4096]
        assert stack.holds(tier, range(8)) == [0, 1, 2, 4, 5, 6, 7]


def test_a_disk_that_has_no_room_for_a_quarantine_says_so(stack: Any) -> None:
    stack.fill("disk", range(8))
    stack.flip(stack.chunk("disk", 3))
    done = stack.run("verify", "--corrupt", "quarantine")
    assert done.exit_code == 2
    assert "on_corrupt: quarantine" in done.stderr
    assert len(stack.keys("disk")) == 8


def test_a_sample_is_a_part_of_it(stack: Any) -> None:
    stack.fill("fs", range(300))
    checked = stack.json("verify", "--sample", "20%")[0]["checked"]
    assert 20 < checked < 120
    for wrong in ("0%", "101%", "5", "-1%", "x%"):
        assert "expected a share above 0%" in stack.run("verify", "--sample", wrong).stderr


def test_the_rate_is_kept() -> None:
    now, slept = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    throttle = Throttle(1000, clock=lambda: now[0], sleep=sleep)
    for _ in range(10):
        throttle.passed(500)
        now[0] += 0.1  # what reading takes
    assert now[0] == pytest.approx(5.1, abs=0.01)
    assert max(slept) <= 0.2
    Throttle(None, clock=lambda: now[0], sleep=sleep).passed(1 << 60)
    assert now[0] == pytest.approx(5.1, abs=0.01)


def test_a_disk_that_an_engine_has_is_checked_but_not_changed(stack: Any, engine: Any) -> None:
    running = engine(stack)
    running("serve", keys=list(range(10)))
    stack.flip(stack.chunk("disk", 4))
    assert stack.run("verify").exit_code == 1
    done = stack.run("verify", "--corrupt", "remove")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert f"is in use by process {running.pid} on " in done.stderr
    assert "leave --corrupt out" in done.stderr
    assert len(stack.keys("disk")) == 10
    running("forget")
    assert running("serve", keys=list(range(10))) == 10, "the directory below has the chunk that the disk has lost"


def test_a_directory_is_cleaned_beside_an_engine(stack: Any, engine: Any) -> None:
    running = engine(stack)
    running("serve", keys=list(range(10)))
    stack.flip(stack.chunk("fs", 4))
    assert stack.run("verify", "--tier", "fs", "--corrupt", "remove").exit_code == 1
    assert key_for(4) not in stack.keys("fs")
    running("forget")
    assert running("serve", keys=list(range(10))) == 10


def test_nothing_is_corrupt_beside_an_engine_that_writes_and_evicts(stack: Any, engine: Any) -> None:
    """What is read while its slot is given to another chunk has gone; it is not corrupt."""
    stack.write(capacity="4MiB", fs="capacity: 4MiB")
    running = engine(stack)
    running("churn", prompts=12)
    child = subprocess.Popen(
        [sys.executable, "-m", "kvcascade.cli", "verify", str(stack.file), "--rate", "40MiB", "--json"],
        stdout=subprocess.PIPE,
    )
    while child.poll() is None:
        running("churn", prompts=4)
    assert child.stdout is not None
    with child.stdout:
        assert child.returncode == 0, child.stdout.read()
    for _ in range(5):
        running("churn", prompts=4)
        assert stack.run("verify").exit_code == 0


def test_an_interrupt_says_what_was_checked(stack: Any) -> None:
    stack.fill("fs", range(200))
    for chunk in [chunk for kept in stack.stored("fs") for chunk in kept.chunks()]:
        stack.flip(chunk)
    child = subprocess.Popen(
        [sys.executable, "-m", "kvcascade.cli", "verify", str(stack.file), "--rate", "1B"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout is not None
    assert b"payload damaged" in child.stdout.readline()
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=HANG)
    assert (child.returncode, errors) == (130, b"")
    assert b"gone meanwhile" in out
    assert len(stack.keys("fs")) == 200


def test_only_what_belongs_to_the_stack_unless_all_is_asked(stack: Any) -> None:
    stack.fill("fs", range(3))
    stack.fill("fs", range(5), tenant="blue")
    assert [one["checked"] for one in stack.json("verify")] == [3]
    assert sorted(one["checked"] for one in stack.json("verify", "--all-namespaces")) == [3, 5]


def test_where_there_is_nothing(stack: Any) -> None:
    done = stack.run("verify")
    assert (done.exit_code, done.stdout) == (0, "There is nothing to verify.\n")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_folder_whose_description_is_damaged(stack: Any, content: bytes) -> None:
    """It is named, whatever looks at it; it goes only where all namespaces are to; and the engine whose it is goes
    on with it."""
    stack.fill("fs", range(4))
    (described,) = (stack.folder / "fs").glob("*/namespace.json")
    described.write_bytes(content)
    said = f"fs: {described.parent} is left alone: its namespace.json is damaged"
    assert "namespace.json=damaged" in " ".join(stack.run("ls").stdout.split())
    for command, arguments in (("verify", []), ("gc", []), ("clear", ["--yes"])):
        done = stack.run(command, "--tier", "fs", *arguments)
        assert said in done.stderr
    assert stack.json("verify", "--tier", "fs", "--all-namespaces")[0]["right"] == 4
    assert stack.holds("fs", range(4)) == [0, 1, 2, 3]
    assert stack.json("verify", "--tier", "fs")[0]["right"] == 4
    described.write_bytes(content)
    assert "removed" in stack.run("clear", "--tier", "fs", "--all-namespaces", "--yes").stdout
    assert not described.parent.exists()
