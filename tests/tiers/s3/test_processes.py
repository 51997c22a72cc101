"""Several processes on one bucket at once; some of them are killed."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing.conformance import NAMESPACE
from kvcascade.testing.servers import wait_until
from kvcascade.types import Outcome

SCRIPT = Path(__file__).with_name("engine_process.py")
HANG = 60.0


@pytest.fixture
def process(one_shared: Any) -> Iterator[Any]:
    """Starts an engine on the bucket, and lets it go when `go` is written."""
    started: list[subprocess.Popen[str]] = []

    def start(**given: Any) -> "subprocess.Popen[str]":
        given = {
            "settings": one_shared.settings().model_dump(
                include={"bucket", "prefix", "endpoint_url", "create_bucket"}
            ),
            "chunk": one_shared.chunk,
            "namespace": dict(NAMESPACE.fields),
            "among": 16,
            "rounds": 30,
            "seed": 0,
            **given,
        }
        command = [sys.executable, str(SCRIPT), json.dumps(given)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate(timeout=HANG)


def test_two_processes_share(one_shared: Any, process: Any) -> None:
    """kvcache-ai/Mooncake#1374: normal for shared prefixes; what one has stored another loads."""
    engines = [process(seed=seed) for seed in range(2)]
    for one in engines:
        assert one.stdout.readline() == "open\n"
    said = [one.communicate("go\n", timeout=HANG)[0] for one in engines]
    assert [text.splitlines() for text in said] == [["done"]] * 2
    tier, keys = one_shared.engine(), one_shared.keys(*range(16))
    assert one_shared.store(tier, keys) == [Outcome.OK] * 16
    assert one_shared.load(tier, keys) == [Outcome.OK] * 16
    assert {entry.key for entry in tier.entries()} == set(keys)


def test_a_process_that_is_killed_leaves_whole_chunks(one_shared: Any, process: Any) -> None:
    """kvcache-ai/Mooncake#974: what it was writing is not there, and can be stored at once."""
    keys = one_shared.keys(*range(16))
    nbytes = 1 << 20
    for seed in range(3):
        one = process(seed=seed, chunk=nbytes, rounds=1 << 30)
        assert one.stdout.readline() == "open\n"
        one.stdin.write("go\n")
        one.stdin.flush()
        tier = one_shared.engine()
        wait_until(lambda tier=tier: any(tier.exists(keys)), "it has stored something")  # type: ignore[misc]
        one.kill()
        one.wait(HANG)
        outcomes = one_shared.load(tier, keys, nbytes)
        assert {outcome.kind.value for outcome in outcomes} <= {"ok", "missing"}
        assert one_shared.store(tier, keys, nbytes) == [Outcome.OK] * 16
        assert one_shared.load(tier, keys, nbytes) == [Outcome.OK] * 16
        tier.delete(keys)


def test_an_engine_that_was_killed_is_known_to_be_gone_after_a_while(
    one_shared: Any, process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvcascade.tiers.s3 import engines

    one = process()
    assert one.stdout.readline() == "open\n"
    (kept,) = one_shared.settings().stored()
    assert kept.holding().used_by.startswith(f"process {one.pid} on ")
    one.kill()
    one.wait(HANG)
    monkeypatch.setattr(engines, "SILENT", -60.0)
    assert kept.holding().used_by == ""
    assert kept.sweep(dry_run=True).others == kept.sweep(dry_run=False).others > 0
    assert one_shared.names() == []
