"""What a tier that outlives the process tells its eviction policy: when its chunks were used, and how often."""

from pathlib import Path

import pytest

from kvcascade.configs import parse_stack
from kvcascade.stack import build
from kvcascade.testing import Driver, key_for
from kvcascade.types import Key, Namespace

CHUNK = 4096
NAMESPACE = Namespace.of(model="m")
OFTEN = [key_for(number) for number in range(16)]
ONCE = [key_for(number) for number in range(100, 124)]
SCAN = [key_for(number) for number in range(1000, 1100)]


def start(path: Path, policy: str) -> Driver:
    """A disk of some fifty chunks below a host of eight."""
    stack = parse_stack(
        {
            "version": 1,
            "log_every": "0s",
            "tiers": [
                {"type": "host", "capacity": 9 * CHUNK, "eviction": "lru"},
                {
                    "type": "disk",
                    "path": str(path),
                    "capacity": "1080KiB",
                    "eviction": policy,
                    "queue": 1.0,
                    "deadline": "30s",
                },
            ],
        }
    )
    return Driver(build(stack, NAMESPACE, CHUNK))


def serve(driver: Driver, name: str, keys: list[Key]) -> None:
    """One request for each four of the keys, as large as the host's half."""
    for start in range(0, len(keys), 4):
        driver.serve(f"{name}-{start}", keys[start : start + 4])
        driver.settle()


def held(driver: Driver, keys: list[Key]) -> int:
    return sum(key in driver.manager._chain.levels[0].residency for key in keys)


@pytest.mark.parametrize("policy", ["arc", "s3fifo", "lhd"])
def test_what_was_used_often_before_a_restart_outlives_a_scan_after_it(tmp_path: Path, policy: str) -> None:
    """Chunks used again, then more recent ones used once; after the restart more new ones come than fit."""
    before = start(tmp_path, policy)
    for turn in range(3):
        serve(before, f"often-{turn}", OFTEN)
    serve(before, "once", ONCE)
    before.manager.shutdown()
    after = start(tmp_path, policy)
    assert held(after, OFTEN + ONCE) == 40
    serve(after, "scan", SCAN)
    assert (held(after, OFTEN), held(after, ONCE)) == (16, 0)
    after.manager.shutdown()


def test_a_policy_that_goes_by_recency_alone_is_told_that(tmp_path: Path) -> None:
    before = start(tmp_path, "lru")
    for turn in range(3):
        serve(before, f"often-{turn}", OFTEN)
    serve(before, "once", ONCE)
    before.manager.shutdown()
    after = start(tmp_path, "lru")
    serve(after, "scan", SCAN[:16])
    assert held(after, OFTEN) < 16 and held(after, ONCE) == 24
    after.manager.shutdown()
