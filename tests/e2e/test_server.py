"""The OpenAI server: answers by HTTP, what it logs and counts, and what is left when it ends or is killed."""

import re
import time
from pathlib import Path

import pytest

from kvcascade.testing.vllm import (
    SPEC,
    TIER,
    Server,
    full_blocks,
    host,
    on_disk,
    prompt,
    text_of,
    transfer_config,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

PROMPT = prompt(700, 3)
LOADED = full_blocks(700)
TOKENS = 20


@pytest.fixture
def serve(model, nursery, tmp_path):
    """Starts a server. All end with the test."""
    begun = []

    def start(way, stack, options=()):
        log = tmp_path / f"server-{len(begun)}.log"
        server = Server(model, log, transfer_config(way, stack), options, nursery=nursery)
        begun.append(server)
        return server.wait_ready()

    yield start
    for server in begun:
        server.kill()


def all_end(processes):
    """Whether these end, within the time that the system needs for it. Who is not reaped has ended, too."""
    for _ in range(100):
        if not any(map(runs, processes)):
            return True
        time.sleep(0.1)
    return False


def runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def shared_memory():
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture(scope="module")
def expected(plain):
    """What plain vLLM answers."""
    return text_of(plain(prompts=[PROMPT], tokens=TOKENS)[0]["tokens"][0])


def settle(server):
    """Long enough that what was stored is on disk."""
    server.complete(prompt(40, 1), 200)


def test_kill_and_restart(serve, way, expected, tmp_path, seen):
    """A process each for the API, the scheduler and the worker."""
    before = shared_memory()
    stack = on_disk(tmp_path / "disk")
    stack["log_every"] = "1s"
    first = serve(way, stack)
    once = first.complete(PROMPT, TOKENS)
    twice = first.complete(PROMPT, TOKENS)
    assert (once.cached, twice.cached) == (0, LOADED)
    assert once.text == twice.text == expected
    settle(first)
    metrics = first.metrics()
    assert 'vllm:kvcascade_chunks{engine="0",model_name="' in metrics
    assert "vllm:kvcascade_written_bytes_total{" in metrics
    processes = first.processes()
    assert len(processes) >= 3
    first.kill()
    assert all_end(processes)
    assert not {name for name in shared_memory() - before if "kvcascade" in name or "offload" in name}

    second = serve(way, stack)
    again = second.complete(PROMPT, TOKENS)
    assert again == twice
    seen.note(way, "server killed with -9, restarted", [again.cached])
    settle(second)
    log = second.log
    assert re.search(r"KVCascade \S+ (under|below \d+ chunks of host memory of) vLLM \S+: ", log)
    assert re.search(r"disk \S+ \S+ = [\d,]+ tokens.*; chunks of .*; namespace [0-9a-f]+ \(", log)
    assert "chunks looked up" in log and " refused" in log
    processes = second.processes()
    second.stop()
    assert all_end(processes)
    assert not {name for name in shared_memory() - before if "kvcascade" in name or "offload" in name}


def test_two_ranks(serve, way, expected, tmp_path, seen):
    """Each has half of the heads, and its part of every slot."""
    ranks = ["--tensor-parallel-size", "2"]
    first = serve(way, on_disk(tmp_path / "disk"), ranks)
    once = first.complete(PROMPT, TOKENS)
    settle(first)
    first.stop()
    second = serve(way, on_disk(tmp_path / "disk"), ranks)
    again = second.complete(PROMPT, TOKENS)
    assert again == (once.text, LOADED) and once.text == expected
    seen.note(way, "two ranks, restart", [again.cached])


def test_two_replicas(serve, way, expected, tmp_path, seen):
    """One stack file for both: each has a folder of its own."""
    replicas = serve(way, on_disk(tmp_path / "disk"), ["--data-parallel-size", "2"])
    found = [replicas.complete(PROMPT, TOKENS) for _ in range(4)]
    assert {answer.text for answer in found} == {expected}
    assert found[-1].cached == LOADED
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["engine-0", "engine-1"]
    seen.note(way, "data parallelism of 2, one prompt four times", [answer.cached for answer in found])


@pytest.mark.parametrize(
    ("refused", "stack", "settings", "message"),
    [
        (SPEC, host(), {"enable_prefix_caching": False}, "prefix caching is off, so no chunk has a key"),
        (TIER, on_disk(Path("/not/there")), {"enable_prefix_caching": False}, "prefix caching is off"),
        (SPEC, "/not/there.yaml", {}, "/not/there.yaml: no such file"),
        (SPEC, host("64KiB"), {}, "tiers[0].capacity: 64 KiB holds 1 chunks of 32 KiB; at least 4 are needed"),
        (SPEC, host("900TiB"), {}, "available: "),
    ],
    ids=["no prefix caching", "no prefix caching, tier", "no stack", "small pool", "large pool"],
)
def test_what_can_not_work_is_refused_at_start_with_the_reason(engine, refused, stack, settings, message):
    with pytest.raises(RuntimeError) as error:
        engine(stack, refused, **settings)
    assert message in str(error.value)
