"""Chains of three tiers under each policy: right bytes, and the hits that the plain simulation explains."""

from itertools import islice

import pytest

from kvcascade.configs import parse_stack
from kvcascade.replay.compare import models_of
from kvcascade.replay.playback import Playback, replay
from kvcascade.replay.simulate_stack import simulate_stack
from kvcascade.replay.trace import Trace

CHUNK = 4096
WRITES = [
    ("through", "through"),
    ("on_evict", "on_evict"),
    ("through", "on_evict"),
    ("on_evict", "through"),
    ("off", "through"),
    ("through", "off"),
]
POLICIES = [
    ({"fill": False}, {}),
    ({"fill": False, "write": "on_evict"}, {}),
    ({"promote": "never"}, {}),
    ({"promote": {"after": 3}}, {"promote": {"after": 2}}),
    ({"admit_after": 2}, {"admit_after": 2}),
    ({"admit_after": 2, "write": "on_evict"}, {}),
]


def stack_of(tmp_path, disk, last):
    """No deadline passes, whatever else keeps the machine busy: what is counted must not depend on its speed."""
    patient = {"deadline": "600s"}
    tiers = [
        {"type": "host", "capacity": "4MiB"},
        {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "24MiB", **patient, **disk},
        {"path": str(tmp_path / "shared"), **patient, **last} if last["type"] == "fs" else last,
    ]
    return parse_stack({"version": 1, "log_every": "0s", "tiers": tiers})


def check(trace, stack, limit, failed_reads=0):
    """Plays the trace, and compares what each tier gave with what the simulation says."""
    report = replay(Trace(trace), stack, Playback(CHUNK, limit=limit))
    prompts = [request.hash_ids for request in islice(Trace(trace), limit)]
    expected = simulate_stack(prompts, models_of(stack, CHUNK))
    found = [tier.hits / expected.chunks for tier in report.tiers]
    assert report.tally.hit_rate == pytest.approx(expected.rate, abs=0.005)
    assert found == pytest.approx([hits / expected.chunks for hits in expected.tiers], abs=0.01)
    written = [tier.written / expected.chunks for tier in report.tiers]
    assert written[1:] == pytest.approx([each / expected.chunks for each in expected.written[1:]], abs=0.1)
    assert (report.tally.requests, report.tally.refused) == (limit, 0)
    assert [tier.dropped for tier in report.tiers] == [0, 0, 0]
    assert [(tier.corrupt, tier.failed_writes) for tier in report.tiers] == [(0, 0)] * 3
    assert sum(tier.failed_reads for tier in report.tiers) <= failed_reads
    return report


@pytest.mark.parametrize("writes", WRITES, ids="-".join)
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_write_policies(tmp_path, trace, writes):
    disk, last = writes
    stack = stack_of(tmp_path, {"write": disk}, {"type": "memory", "capacity": "20MiB", "write": last})
    report = check(trace, stack, limit=400)
    received = [bool(tier.written) for tier in report.tiers[1:]]
    assert received == [disk != "off", last != "off"]


@pytest.mark.parametrize(("disk", "last"), POLICIES, ids=str)
def test_fill_promotion_and_admission(tmp_path, disk, last):
    stack = stack_of(tmp_path, disk, {"type": "memory", "capacity": "20MiB", **last})
    check("conversation", stack, limit=400)


@pytest.mark.parametrize("writes", WRITES[:3], ids="-".join)
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_over_a_shared_directory(tmp_path, trace, writes):
    disk, last = writes
    report = check(trace, stack_of(tmp_path, {"write": disk}, {"type": "fs", "write": last}), limit=250)
    assert report.tiers[2].written


@pytest.mark.parametrize("writes", WRITES[:2], ids="-".join)
def test_over_a_shared_directory_with_a_soft_capacity(tmp_path, writes):
    """It is held while it is written to, by what was used the longest ago; the table tells of it. What goes is
    known a moment later, so that a few chunks are asked for in vain."""
    disk, last = writes
    fs = {"type": "fs", "write": last, "capacity": "20MiB"}
    report = check("conversation", stack_of(tmp_path, {"write": disk}, fs), limit=250, failed_reads=100)
    tier = report.tiers[2]
    assert 0.85 * (20 << 20) <= tier.bytes <= 20 << 20
    assert tier.capacity == 20 << 20
    assert tier.chunks == pytest.approx(tier.bytes / 8192, abs=1)
    assert tier.evictions == pytest.approx(tier.written - tier.chunks, abs=100)


def test_what_a_shared_directory_holds_another_engine_finds(tmp_path):
    """Each engine has host and disk of its own; the second has never seen the prompts."""
    for engine in ("first", "second"):
        stack = parse_stack(
            {
                "version": 1,
                "log_every": "0s",
                "tiers": [
                    {"type": "host", "capacity": "4MiB"},
                    {"type": "disk", "path": str(tmp_path / engine), "capacity": "24MiB"},
                    {"type": "fs", "path": str(tmp_path / "shared")},
                ],
            }
        )
        report = replay(Trace("conversation"), stack, Playback(CHUNK, limit=60))
    assert report.tally.hit_rate == 1.0
    assert report.tiers[2].hits > 0
