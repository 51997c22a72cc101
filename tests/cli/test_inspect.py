"""`kvcascade inspect`."""

import time
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import TierUnavailable
from kvcascade.testing import key_for
from kvcascade.tiers.fs import FsSettings

CHUNK = 64 << 10


def test_the_facts_of_a_chunk_in_each_tier_that_has_it(stack: Any) -> None:
    began = time.time()
    stack.fill("disk", range(8))
    stack.fill("fs", range(8))
    key = key_for(3).hex()
    done = stack.run("inspect", key)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"key {key}\n")
    assert done.stdout.count("checksum right") == 2
    facts = stack.json("inspect", key)
    assert [fact["tier"] for fact in facts] == ["disk", "fs"]
    for fact in facts:
        assert fact["key"] == key
        assert Path(fact["place"].partition(" slot ")[0]).is_file()
        assert fact["namespace"] == {"model": "m"}
        assert (fact["epoch"], fact["void"], fact["right"]) == ("unnamed", False, True)
        assert fact["bytes"] == CHUNK
        assert began <= fact["written"] <= time.time()
        assert began - 1 <= fact["used"] <= time.time() + 1
        assert fact["sequence"] >= began * 1e9


def test_a_part_of_a_key_is_enough_where_it_is_one_keys(stack: Any) -> None:
    stack.fill("fs", range(64))
    keys = sorted(key_for(number).hex() for number in range(64))
    digits = next(n for n in range(1, 72) if len({key[:n] for key in keys}) == 64)
    assert stack.json("inspect", keys[5][:digits].upper())[0]["key"] == keys[5]
    alike = [key for key in keys if key.startswith(keys[5][0])]
    done = stack.run("inspect", keys[5][0])
    assert done.exit_code == 2
    first, *shown = done.stderr.splitlines()
    assert first == f"{len(alike)} keys begin with {keys[5][0]}; give more digits:"
    assert [line.strip() for line in shown][: len(alike)][:8] == alike[:8]


def test_what_is_not_right_is_said_and_left_as_it_is(stack: Any) -> None:
    stack.fill("disk", range(4))
    stack.fill("fs", range(4))
    stack.flip(stack.chunk("disk", 2))
    for _ in range(2):
        done = stack.run("inspect", key_for(2).hex())
        assert done.exit_code == 1
        assert "NOT RIGHT: payload damaged" in done.stdout
        assert "checksum right" in done.stdout
    assert stack.run("inspect", key_for(1).hex()).exit_code == 0


def test_beside_a_running_engine(stack: Any, engine: Any) -> None:
    """What an engine is alone in is no one else's, and not void while it runs."""
    running = engine(stack)
    assert running("serve", keys=[1, 2, 3]) == 0
    key = key_for(2).hex()
    assert [(fact["epoch"], fact["right"]) for fact in stack.json("inspect", key)] == [("unnamed", True)] * 2
    assert running("reset")
    running("serve", keys=[1, 2, 3])
    places = [(fact["tier"], fact["epoch"], fact["void"]) for fact in stack.json("inspect", key)]
    assert ("disk", "private", False) in places
    assert ("fs", "private", False) in places
    assert ("fs", "unnamed, over", True) in places
    running.stop()
    assert all(fact["void"] and fact["right"] for fact in stack.json("inspect", key))
    assert ", void" in stack.run("inspect", key).stdout


def test_a_chunk_that_nobody_has(stack: Any) -> None:
    stack.fill("fs", range(4))
    done = stack.run("inspect", "ffffffff")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "No tier that answers holds a chunk whose key begins with ffffffff.\n"
    assert stack.json("inspect", "ffffffff") == []


@pytest.mark.parametrize("key", ["", "0xyz", "12 34", "k"])
def test_what_is_no_key(stack: Any, key: str) -> None:
    done = stack.run("inspect", key)
    assert done.exit_code == 2
    assert "expected hexadecimal digits" in done.stderr


def test_a_tier_that_does_not_answer_is_named_and_the_other_shown(
    stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.fill("disk", range(4))

    def stored(settings: FsSettings, engine_id: str | None = None) -> Any:
        raise TierUnavailable("the server is away")

    monkeypatch.setattr(FsSettings, "stored", stored)
    done = stack.run("inspect", key_for(1).hex())
    assert (done.exit_code, done.stderr) == (1, "fs: the server is away\n")
    assert "checksum right" in done.stdout
