"""Several processes on the same servers: they share, die, and fork."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import key_for
from kvcascade.testing.servers import wait_until
from kvcascade.testing.servers.redis import GivenServer
from kvcascade.types import Outcome

SCRIPT = Path(__file__).with_name("engine_process.py")
HANG = 60.0


@pytest.fixture
def process(shared: Any, given_server: GivenServer) -> Iterator[Any]:
    """Starts an engine on the servers of `shared`."""
    started: list[subprocess.Popen[str]] = []

    def start(**wanted: Any) -> "subprocess.Popen[str]":
        wanted = {
            "settings": {"url": given_server.url, "prefix": shared.prefix, "deadline": "10s"},
            "chunk": shared.chunk,
            "namespace": dict(shared.namespace.fields),
            **wanted,
        }
        command = [sys.executable, str(SCRIPT), json.dumps(wanted)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate(timeout=HANG)


def test_what_one_process_has_stored_another_loads(shared: Any, process: Any) -> None:
    one = process(act="store", keys=list(range(8)))
    output, _ = one.communicate(timeout=HANG)
    assert output.splitlines() == ["open", json.dumps(["ok"] * 8)]
    assert shared.load(shared.engine(), shared.keys(*range(8))) == [Outcome.OK] * 8


def test_four_processes_store_the_same_keys_at_once(shared: Any, process: Any) -> None:
    """kvcache-ai/Mooncake#1374: normal for shared prefixes; none fails."""
    engines = [process(act="work", keys=list(range(16)), seed=seed, rounds=60) for seed in range(4)]
    for one in engines:
        assert one.communicate(timeout=HANG)[0].splitlines() == ["open", "done"]
    tier, keys = shared.engine(), shared.keys(*range(16))
    assert shared.store(tier, keys) == [Outcome.OK] * 16
    assert shared.load(tier, keys) == [Outcome.OK] * 16


def test_a_process_that_is_killed_leaves_whole_chunks(
    shared: Any, process: Any, given_server: GivenServer
) -> None:
    """kvcache-ai/Mooncake#974: what it was writing is not there, and can be stored at once."""
    keys = shared.keys(*range(16))
    for seed in range(3):
        one = process(act="work", keys=list(range(16)), seed=seed, chunk=1 << 20)
        assert one.stdout.readline() == "open\n"
        tier = shared.engine()
        wait_until(lambda tier=tier: any(tier.exists(keys)), "it has stored something")  # type: ignore[misc]
        one.kill()
        one.wait(HANG)
        outcomes = shared.load(tier, keys, 1 << 20)
        assert {outcome.kind.value for outcome in outcomes} <= {"ok", "missing"}
        assert shared.store(tier, keys, 1 << 20) == [Outcome.OK] * 16
        assert shared.load(tier, keys, 1 << 20) == [Outcome.OK] * 16
        tier.delete(keys)


def test_forks_go_on_with_connections_of_their_own(shared: Any) -> None:
    """redis/redis-py#863: replies of one process came to another one."""
    tier = shared.engine()
    shared.store(tier, shared.keys(9))
    children = []
    for child in range(1, 5):
        pid = os.fork()
        if pid == 0:
            os._exit(_work(shared, tier, child))
        children.append(pid)
    try:
        assert _work(shared, tier, 0) == 0
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    assert codes == [0] * 4
    assert shared.load(tier, shared.keys(9)) == [Outcome.OK]


def _work(shared: Any, tier: Any, who: int) -> int:
    """Stores and loads keys of its own; how much went wrong."""
    wrong = 0
    for number in range(50):
        keys = [key_for(1000 * (who + 1) + number), key_for(1000 * (who + 1) + number + 500)]
        wrong += [outcome.ok for outcome in shared.store(tier, keys, 4096)] != [True, True]
        wrong += [outcome.ok for outcome in shared.load(tier, keys, 4096)] != [True, True]
    if who:
        tier.close()
    return wrong
