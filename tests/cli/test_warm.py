"""`kvcascade warm`."""

import os
import re
from typing import Any

import pytest

from kvcascade.testing import key_for

CHUNK = 64 << 10


def aged(stack: Any, keys: range, **where: Any) -> None:
    """Fills the directory; the higher the number, the later it was used."""
    stack.fill("fs", keys, **where)
    for number in keys:
        os.utime(stack.chunk("fs", number).place, (1e9 + number, 1e9 + number))


def cells(done: Any) -> dict[str, int]:
    """The numbers of a table of one row, by their columns."""
    header, row = (line.strip() for line in done.stdout.splitlines() if "stored" in line or "model=m" in line)
    split = re.compile(r"\s{2,}").split
    columns = dict(zip(split(header), split(row), strict=True))
    return {name: int(columns[name].replace(",", "")) for name in ("stored", "there already", "no room")}


def test_an_empty_disk_is_filled_from_the_directory_and_serves_an_engine(stack: Any, engine: Any) -> None:
    aged(stack, range(40))
    done = stack.run("warm")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "40" in done.stdout
    (stack.folder / "fs").rename(stack.folder / "away")
    running = engine(stack)
    assert running("serve", keys=list(range(10, 40))) == 30


def test_what_was_used_last_comes_first_until_the_disk_is_full(stack: Any) -> None:
    stack.write(capacity="4MiB")
    aged(stack, range(100))
    assert stack.run("warm").exit_code == 0
    held = stack.holds("disk", range(100))
    assert 40 < len(held) < 64
    assert held == list(range(100 - len(held), 100))
    with stack.open("disk") as tier:
        by_use = [entry.key for entry in sorted(tier.entries(), key=lambda entry: entry.used)]
    assert by_use == [key_for(number) for number in held]


def test_all_that_found_no_room_is_counted(stack: Any) -> None:
    stack.write(capacity="4MiB")
    aged(stack, range(100))
    first = cells(stack.run("warm"))
    assert first["stored"] + first["no room"] == 100
    again = cells(stack.run("warm"))
    assert (again["stored"], again["there already"], again["no room"]) == (0, first["stored"], first["no room"])


def test_no_more_than_the_limit(stack: Any) -> None:
    aged(stack, range(40))
    for loaded in (10, 20):
        assert stack.run("warm", "--limit", 10 * CHUNK + CHUNK // 2).exit_code == 0
        assert stack.holds("disk", range(40)) == list(range(40 - loaded, 40))


def test_what_is_there_stays(stack: Any, long_ago: Any) -> None:
    with long_ago(3600):
        stack.fill("disk", range(35, 50))
    before = stack.chunk("disk", 38).entry
    aged(stack, range(40))
    done = stack.run("warm")
    row = done.stdout.splitlines()[-2].split()
    assert row[:3] == ["disk", "model=m", "35"]
    assert row[5] == "5"
    assert stack.chunk("disk", 38).entry == before
    assert stack.holds("disk", range(50)) == list(range(50))


def test_only_what_an_engine_of_this_stack_would_find(stack: Any, engine: Any) -> None:
    stack.write(top="weights_version: v1\nnamespace: blue")
    stack.fill("fs", range(4), epoch="v1", tenant="blue")
    stack.fill("fs", range(10, 14), tenant="blue")
    stack.fill("fs", range(20, 24), epoch="v1")
    assert stack.run("warm").exit_code == 0
    assert stack.keys("disk") == sorted(map(key_for, range(4)))
    assert stack.holds("disk", range(30), epoch="v1", tenant="blue") == [0, 1, 2, 3]


def test_a_namespace_of_several(stack: Any) -> None:
    for model in ("a", "b"):
        stack.fill("fs", range(4), model=model)
    assert stack.run("warm", "--namespace", "model=b").exit_code == 0
    assert stack.holds("disk", range(4), model="a") == []
    assert stack.holds("disk", range(4), model="b") == [0, 1, 2, 3]
    assert stack.run("warm").exit_code == 0
    assert stack.holds("disk", range(4), model="a") == stack.holds("disk", range(4), model="b") == [0, 1, 2, 3]


def test_what_is_corrupt_is_not_loaded(stack: Any) -> None:
    stack.fill("fs", range(8))
    stack.flip(stack.chunk("fs", 3))
    assert stack.run("warm").exit_code == 0
    assert stack.holds("disk", range(8)) == [0, 1, 2, 4, 5, 6, 7]


def test_beside_an_engine_that_has_the_disk(stack: Any, engine: Any) -> None:
    running = engine(stack)
    running("serve", keys=[1, 2, 3])
    done = stack.run("warm")
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"disk: {stack.folder / 'disk' / 'engine-0'}")
    assert f"is in use by process {running.pid} on " in line
    second = stack.run("warm", "--engine", "1")
    assert second.exit_code == 0
    assert [kept.holding().chunks for kept in stack.stored("disk")] == [3, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--into", "host"), "--into host: The primary tier is memory of an engine"),
        (("--from", "disk"), "nothing above disk keeps anything outside an engine. The primary tier is memory"),
        (("--into", "fs"), "--into fs: that is not above fs. The primary tier is memory of an engine"),
        (("--from", "disc"), "no such tier (did you mean 'disk'?); allowed: disk, fs"),
    ],
)
def test_what_can_not_be_warmed(stack: Any, options: tuple[str, ...], said: str) -> None:
    done = stack.run("warm", *options)
    assert done.exit_code == 2
    assert said in done.stderr


def test_where_there_is_nothing(stack: Any) -> None:
    done = stack.run("warm")
    assert (done.exit_code, done.stdout) == (0, "fs holds nothing that an engine of this stack would find.\n")
