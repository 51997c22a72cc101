"""Several processes on one directory at once; some of them are killed."""

import json
import random
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvcascade.testing import key_for
from kvcascade.tiers.fs import sweeper
from kvcascade.types import Outcome

HANG = 120.0


@contextmanager
def running(shared: Any, *each: dict[str, Any]) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that have opened the directory and begin now, at once."""
    processes = [shared.process(**given) for given in each]
    guard = threading.Timer(HANG, lambda: [process.kill() for process in processes])
    guard.start()
    try:
        for process in processes:
            assert process.stdout.readline() == "open\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        yield processes
    finally:
        guard.cancel()
        guard.join()
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def results(processes: list["subprocess.Popen[str]"]) -> list[dict[str, Any]]:
    said = [process.communicate(timeout=HANG)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(text) for text in said]


@pytest.mark.parametrize("count", [2, 4])
def test_processes_store_the_same_chunks_and_others_at_once(shared: Any, count: int) -> None:
    """LMCache/LMCache#2517, kvcache-ai/Mooncake#1374: all succeed, one file a chunk is left, and no temporary."""
    common = list(range(32))
    own = [list(range(1000 * n, 1000 * n + 16)) for n in range(1, count + 1)]
    with running(shared, *({"keys": common + mine, "seed": mine[0]} for mine in own)) as processes:
        assert [result["failed"] for result in results(processes)] == [0] * count
    everything = shared.keys(*common, *(number for mine in own for number in mine))
    assert len(shared.files) == len(everything)
    assert shared.temporaries == []
    assert shared.writers == []
    tier = shared.engine()
    assert shared.load(tier, everything) == [Outcome.OK] * len(everything)
    assert sorted(entry.key for entry in tier.entries()) == sorted(everything)


@pytest.mark.parametrize("count", [2, 4])
def test_several_engines_hold_the_capacity_and_what_is_fresh_stays(shared: Any, count: int) -> None:
    """vllm-project/vllm#52784: the directory does not grow, whoever writes to it, and at no moment."""
    file_bytes = shared.chunk + 4096
    capacity = 60 * file_bytes
    shared.path.mkdir()
    firsts = [10_000 * number for number in range(count)]
    each = [{"keys": list(range(first, first + 240)), "seed": first, "capacity": capacity} for first in firsts]
    peak = 0
    with running(shared, *each) as processes:
        while any(process.poll() is None for process in processes):
            peak = max(peak, len(shared.files))
            threading.Event().wait(0.01)
        found = results(processes)
    assert [(result["failed"], result["lost"]) for result in found] == [(0, 0)] * count
    stored = 240 * count - sum(result["refused"] for result in found)
    assert stored > 60 * count
    assert sum(result["evicted"] for result in found) + len(shared.files) == stored
    assert peak <= 60 * 1.5, "without a bound it were sixteen times as many"
    assert 0.8 * capacity <= shared.bytes <= 0.95 * capacity
    tier = shared.engine()
    left = [entry.key for entry in tier.entries()]
    assert shared.load(tier, left) == [Outcome.OK] * len(left)


@pytest.mark.slow
@pytest.mark.parametrize("sweeping", [False, True])
def test_nothing_is_wrong_after_any_kill(shared: Any, sweeping: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvcache-ai/Mooncake#974, LMCache/LMCache#2517: four writers on the same keys are killed, over and over. What
    they left half done is never seen and does not stay; a sweeper that was killed is followed by another at
    once."""
    monkeypatch.setattr(sweeper, "EVERY", 0.0)
    choose = random.Random(sweeping)
    among, file_bytes = 64, shared.chunk + 4096
    capacity = 24 * file_bytes if sweeping else None
    witness = shared.engine()
    foreign = shared.path / "mine"
    foreign.write_text("mine")
    for kill in range(8 if sweeping else 4):
        each = [{"keys": "endless", "among": among, "seed": 10 * kill + n, "capacity": capacity} for n in range(4)]
        with running(shared, *each) as processes:
            for process in processes:
                for _ in range(choose.randrange(3, 20)):
                    assert process.stdout is not None
                    assert process.stdout.readline() == "step\n"
                threading.Event().wait(choose.random() * 0.01)  # into the middle of a step
                process.send_signal(signal.SIGKILL)
                shared.load(witness, shared.keys(*range(among)))
            for process in processes:
                assert process.stdout is not None
                assert "wrong" not in process.stdout.read()
        after = shared.engine(capacity=capacity)
        assert shared.temporaries == []
        assert len(shared.writers) == 2
        keys = [entry.key for entry in after.entries()]
        assert shared.load(after, keys) == [Outcome.OK] * len(keys)
        after.maintain(60.0)
        assert capacity is None or shared.bytes <= capacity * 0.95
        assert shared.store(after, shared.keys(*range(4))) == [Outcome.OK] * 4
        after.close()
    assert foreign.read_text() == "mine"
    assert set(keys) <= {key_for(number) for number in range(among)}
