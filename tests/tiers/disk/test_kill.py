"""Processes are killed at random points of disk writes, over and over on the same folder."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import buffer, holds, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers.disk import DiskSettings
from kvcascade.tiers.disk.marks import Epoch
from kvcascade.tiers.disk.tier import DiskTier
from kvcascade.types import Key, Namespace, Outcome

CHUNK = 64 << 10
CAPACITY = 4 << 20
KEYS = 400
FIELDS = {"model": "m", "tenant": ""}
SCRIPT = Path(__file__).with_name("killed_writer.py")
BY_NUMBER = {key_for(number): number for number in range(KEYS)}


class Killed:
    """What a killed process had reported: every whole line that it wrote."""

    def __init__(self, path: Path, seed: int, steps: int, delay: float, **more: Any) -> None:
        given: dict[str, Any] = {
            "path": str(path),
            "seed": seed,
            "durability": "none",
            "epoch": "",
            "moves": 0,
        } | more
        given |= {"capacity": CAPACITY, "chunk": CHUNK, "keys": KEYS, "namespace": FIELDS}
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), json.dumps(given)], stdout=subprocess.PIPE, text=True
        )
        guard = threading.Timer(60, process.kill)
        guard.start()
        assert process.stdout
        with process.stdout as lines:
            self.lines = [lines.readline() for _ in range(steps + 1)]
            threading.Event().wait(delay)  # into the middle of a step
            process.send_signal(signal.SIGKILL)
            self.lines += lines.readlines()
        guard.cancel()
        assert process.wait() == -signal.SIGKILL
        assert self.lines[0] == "open\n"

    def apply(self, held: set[Key]) -> set[Key]:
        """What is there for sure, after what was; as far as whole lines tell."""
        for line in self.lines[1:]:
            if not line.endswith("\n"):
                break
            step = json.loads(line)
            held = (held | set(map(bytes.fromhex, step["stored"]))) - set(map(bytes.fromhex, step["gone"]))
        return held


def on_disk(path: Path) -> int:
    return int(
        subprocess.run(["du", "-sB1", str(path)], check=True, capture_output=True, text=True).stdout.split()[0]
    )


def open_tier(path: Path, durability: str) -> DiskTier:
    settings = DiskSettings(path=str(path), capacity=CAPACITY, durability=durability)
    tier = settings.open(OpenContext(Namespace.of(**FIELDS), CHUNK))
    assert isinstance(tier, DiskTier)
    return tier


def check(tier: DiskTier, sure: set[Key]) -> set[Key]:
    """All that the tier lists is right; index, slots and sums agree. Returns the keys."""
    entries = {entry.key: entry for entry in tier.entries()}
    for key, entry in entries.items():
        target = buffer(entry.nbytes)
        assert tier.read([key], [target]) == [Outcome.OK], f"chunk {BY_NUMBER[key]}"
        assert holds(target, key), f"chunk {BY_NUMBER[key]}"
    usage = tier.usage()
    assert usage.chunks == len(entries)
    assert usage.bytes == sum(tier.footprint(entry.nbytes) for entry in entries.values())
    assert usage.bytes <= (usage.capacity or 0)
    locations = tier._index.lookup(list(entries))
    assert len({location.slot for location in locations if location}) == len(entries)
    free = sum(extent.free for extent in tier._slabs.extents)
    assert free + len(entries) == sum(extent.slots for extent in tier._slabs.extents)
    # The step that the kill met may have taken away up to all of its victims; nothing else is missing.
    assert len(sure - set(entries)) <= 10
    return set(entries)


@pytest.mark.slow
@pytest.mark.parametrize(("durability", "kills"), [("none", 30), ("flush", 12), ("fsync", 12)])
def test_nothing_is_wrong_after_any_kill(tmp_path: Path, durability: str, kills: int) -> None:
    """What a dead writer left half done is neither seen nor kept (kvcache-ai/Mooncake#974)."""
    choose = random.Random(durability)
    path = tmp_path / "kv"
    open_tier(path, durability).close()
    namespace = next(path.glob("engine-0/*/"))
    foreign = [path / "mine", path / "engine-0" / "mine", namespace / "mine.slab"]
    for file in foreign:
        file.write_text("mine")
    held: set[Key] = set()
    for kill in range(kills):
        killed = Killed(path, kill, choose.randrange(1, 25), choose.random() * 0.02, durability=durability)
        held = killed.apply(held)
        assert on_disk(path / "engine-0") <= CAPACITY + 2 * 4096  # and the two foreign files
        with open_tier(path, durability) as tier:
            assert tier._scan is None
            held = check(tier, held)
            names = {entry.name for entry in os.scandir(namespace)}
        assert not [name for name in names if name.endswith(".tmp")]
    assert held
    assert [file.read_text() for file in foreign] == ["mine"] * 3
    assert sorted(entry.name for entry in path.iterdir()) == ["engine-0", "mine"]


@pytest.mark.slow
def test_a_kill_during_a_move_brings_nothing_old_back(tmp_path: Path) -> None:
    """Whichever epoch is in force afterwards, only its own bytes are served (vllm-project/vllm#57727)."""
    choose = random.Random(1)
    path = tmp_path / "kv"
    epoch = "v"
    served = 0
    for kill in range(12):
        killed = Killed(path, kill, choose.randrange(2, 12), choose.random() * 0.01, epoch=epoch, moves=0.4)
        told = [json.loads(line) for line in killed.lines[1:] if line.endswith("\n")]
        epoch = [epoch, *(step["epoch"] for step in told if "epoch" in step)][-1]
        written = Epoch.read(next(path.glob("engine-0/*/")))
        assert written
        settings = DiskSettings(path=str(path), capacity=CAPACITY)
        with settings.open(OpenContext(Namespace.of(**FIELDS), CHUNK, epoch=written.epoch)) as tier:
            for entry in tier.entries():
                target = buffer(entry.nbytes)
                assert tier.read([entry.key], [target]) == [Outcome.OK]
                assert holds(target, entry.key, written.epoch)
                served += 1
        with settings.open(OpenContext(Namespace.of(**FIELDS), CHUNK, epoch=epoch)) as tier:
            assert written.epoch == epoch or list(tier.entries()) == []
    assert served
