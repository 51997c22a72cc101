"""Replays through real stacks: real slots, lanes, and files."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from itertools import islice

import pytest

from kvcascade.configs import parse_stack
from kvcascade.replay.compare import models_of
from kvcascade.replay.playback import Playback, replay
from kvcascade.replay.simulate import Lru
from kvcascade.replay.simulate_stack import TierModel, simulate_stack
from kvcascade.replay.trace import Trace

CHUNK = 4096
LIMIT = 400


def stack_of(tmp_path, kind, host="4MiB", below="24MiB"):
    """Host, and one tier below it; the whole trace needs more than both."""
    tier = {"type": kind, "capacity": below} | ({"path": str(tmp_path / "disk")} if kind == "disk" else {})
    return parse_stack({"version": 1, "tiers": [{"type": "host", "capacity": host}, tier]})


def prompts(limit=LIMIT):
    return [request.hash_ids for request in islice(Trace("conversation"), limit)]


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_stack_finds_what_the_plain_simulation_of_its_tiers_finds(tmp_path, kind):
    stack = stack_of(tmp_path, kind)
    report = replay(Trace("conversation"), stack, Playback(CHUNK, limit=LIMIT))
    expected = simulate_stack(prompts(), models_of(stack, CHUNK))
    assert report.tally.hit_rate == pytest.approx(expected.rate, abs=0.005)
    assert [tier.hits / expected.chunks for tier in report.tiers] == pytest.approx(
        [hits / expected.chunks for hits in expected.tiers], abs=0.005
    )
    assert all(expected.tiers)
    assert all(tier.evictions for tier in report.tiers)
    assert sum(tier.hits for tier in report.tiers) == report.tally.loaded
    assert report.tally.refused == 0
    assert not report.interrupted


@pytest.mark.parametrize("concurrency", [4, 32])
def test_many_requests_at_a_time_get_right_bytes_and_most_of_the_hits(tmp_path, concurrency):
    alone, together = (
        replay(
            Trace("conversation"), stack_of(tmp_path, "memory"), Playback(CHUNK, limit=LIMIT, concurrency=number)
        )
        for number in (1, concurrency)
    )
    assert together.tally.requests == LIMIT
    assert together.tally.chunks == alone.tally.chunks
    assert together.tally.hit_rate == pytest.approx(alone.tally.hit_rate, abs=0.03)


def test_a_gpu_cache_in_front_takes_hits_from_the_stack_not_from_the_whole(tmp_path):
    stack = stack_of(tmp_path, "memory")
    report = replay(Trace("conversation"), stack, Playback(CHUNK, limit=LIMIT, gpu_chunks=300))
    models = [TierModel("gpu", 300), *models_of(stack, CHUNK)]
    expected = simulate_stack(prompts(), models)
    gpu = Lru(300)
    hits = 0
    for prompt in prompts():
        hits += gpu.prefix(prompt)
        gpu.admit(prompt)
    assert report.tally.gpu_hits == hits > 0
    assert report.tally.hit_rate == pytest.approx(expected.rate, abs=0.005)


def test_a_pool_smaller_than_a_prompt_refuses_and_stays_right(tmp_path):
    stack = stack_of(tmp_path, "memory", host="256KiB")
    report = replay(Trace("conversation"), stack, Playback(CHUNK, limit=LIMIT, concurrency=4))
    assert report.tally.requests == LIMIT
    assert report.tally.refused > 0


def test_after_a_restart_the_disk_serves_what_it_held(tmp_path):
    first = replay(Trace("conversation"), stack_of(tmp_path, "disk"), Playback(CHUNK, limit=LIMIT))
    again = replay(Trace("conversation"), stack_of(tmp_path, "disk"), Playback(CHUNK, skip=LIMIT - 20, limit=20))
    assert first.tally.requests == LIMIT
    assert (again.tally.requests, again.tally.hit_rate) == (20, 1.0)
    assert again.tiers[1].hits > 0


def test_chunks_of_another_trace_or_size_are_not_found(tmp_path):
    stack = stack_of(tmp_path, "disk")
    replay(Trace("conversation"), stack, Playback(CHUNK, limit=50))
    other = replay(Trace("synthetic"), stack, Playback(CHUNK, limit=1))
    smaller = replay(Trace("conversation"), stack, Playback(CHUNK // 2, limit=1))
    assert (other.tally.loaded, smaller.tally.loaded) == (0, 0)


@contextmanager
def started(tmp_path, *options):
    """`kvcascade replay` through host and disk, begun in a process of its own; the disk takes all of the trace."""
    stack, temporary = tmp_path / "stack.yaml", tmp_path / "tmp"
    temporary.mkdir(exist_ok=True)
    stack.write_text(
        f"version: 1\ntiers:\n- {{type: host, capacity: 4MiB}}\n"
        f"- {{type: disk, path: {tmp_path / 'disk'}, capacity: 2GiB}}\n"
    )
    command = [sys.executable, "-m", "kvcascade.cli", "replay", "conversation", "--stack", str(stack)]
    command += ["--chunk-bytes", str(CHUNK), "--json", "--progress", *options]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_requests(process, number):
    """Until the progress bar says that so many requests were played."""
    shown = b""
    while not any(int(done) >= number for done in re.findall(rb"(\d+)/12031", shown)):
        new = os.read(process.stderr.fileno(), 4096)
        assert new, shown
        shown += new


def test_ctrl_c_ends_it_with_a_report_and_a_consistent_disk(tmp_path):
    with started(tmp_path) as process:
        wait_for_requests(process, 100)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    report = json.loads(out)
    assert process.returncode == 130
    assert report["interrupted"] is True
    assert 100 <= report["requests"] < report["requests_asked"] == 12031
    assert list((tmp_path / "tmp").iterdir()) == []
    _check_all_is_hit_again(tmp_path, report["requests"])


def test_killed_on_the_way_what_was_committed_is_hit(tmp_path):
    with started(tmp_path) as process:
        wait_for_requests(process, 200)
        process.kill()
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    _check_all_is_hit_again(tmp_path, 200)


def _check_all_is_hit_again(tmp_path, requests):
    with started(tmp_path, "--limit", str(requests)) as process:
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    report = json.loads(out)
    assert report["hit_rate"] == 1.0
    assert report["loaded"] == report["chunks"]
