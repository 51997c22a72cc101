"""What both kinds of lane do with jobs: the one of threads, and the one in an I/O process."""

import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcascade.errors import ClosedError, TierRefused
from kvcascade.manager.io import IoProcess
from kvcascade.manager.jobs import Job, JobKind, Report
from kvcascade.manager.lane import Lane, ThreadLane
from kvcascade.testing import fill, holds, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers.host import HostPool
from kvcascade.types import Key, Namespace, OutcomeKind

from .io_engine import io_children

CHUNK = 4096
KEYS = [key_for(number) for number in range(16)]
LONG = 60.0
_HANG = 30.0


class Setup(NamedTuple):
    lane: Lane
    pool: HostPool
    gate: Path

    def submit(self, kind: JobKind, keys: Sequence[Key], seconds: float = LONG, **options: Any) -> Job:
        slots = () if kind is JobKind.PROBE else range(len(keys))
        fields = {"victims": (), "owner": "r", "flow": Nobody(), **options}
        job = Job(kind, keys, slots, deadline=time.monotonic() + seconds, **fields)
        self.lane.submit(job)
        self.lane.start()
        return job

    def reports(self, count: int) -> list[Report]:
        """The next ones."""
        found: list[Report] = []
        end = time.monotonic() + _HANG
        while len(found) < count:
            assert time.monotonic() < end, f"{len(found)} of {count} reports"
            found += self.lane.poll(time.monotonic())
        assert len(found) == count
        return found

    def wait_until_held(self, threads: int) -> None:
        """Waits until so many threads of the lane stand at the gate."""
        while len(list(self.gate.parent.glob("held-*"))) < threads:
            time.sleep(0.001)

    def do(self, kind: JobKind, keys: Sequence[Key], **options: Any) -> Report:
        job = self.submit(kind, keys, **options)
        (report,) = self.reports(1)
        assert report.job is job and report.ended and report.ran and not report.late
        return report


class Nobody:
    def ended(self, *arguments: object) -> None:
        """Not told by a lane."""


@pytest.fixture(params=["threads", "process"])
def setup(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """A lane of two threads over a tier that is held as long as `gate` exists."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    gate = tmp_path / "gate"
    settings = importlib.import_module("held_tier").HeldSettings(gate=str(gate), concurrency=2)
    context = OpenContext(Namespace.of(model="m"), CHUNK)
    with HostPool(16, CHUNK) as pool:
        closes: list[Callable[[], Any]] = []
        if request.param == "threads":
            tier = settings.open(context)
            lane: Lane = ThreadLane("held", tier, pool.slot, 2)
            closes.append(tier.close)
        else:
            process = IoProcess(pool, [settings], context)
            assert not process.tiers[0].wait_until_open()
            lane = process.tiers[0].lane
            closes += [process.tiers[0].close, process.close]
        yield Setup(lane, pool, gate)
        gate.unlink(missing_ok=True)
        assert lane.close(_HANG)
        for close in closes:
            close()
    assert not io_children()


def test_bytes_go_to_the_tier_and_come_back(setup: Setup) -> None:
    for number in range(4):
        fill(setup.pool.slot(number), KEYS[number])
    assert all(outcome.ok for outcome in setup.do(JobKind.WRITE, KEYS[:4]).outcomes)
    for number in range(4):
        setup.pool.slot(number)[:] = b"\xaa" * CHUNK
    kinds = [outcome.kind for outcome in setup.do(JobKind.READ, [*KEYS[:4], KEYS[9]]).outcomes]
    assert kinds == [OutcomeKind.OK] * 4 + [OutcomeKind.MISSING]
    assert all(holds(setup.pool.slot(number), KEYS[number]) for number in range(4))
    setup.do(JobKind.WRITE, KEYS[4:6], victims=KEYS[:2])
    there = [outcome.ok for outcome in setup.do(JobKind.PROBE, KEYS[:6]).outcomes]
    assert there == [False, False, True, True, True, True]
    assert setup.lane.queued == 0 and setup.lane.up


def test_each_key_has_its_own_outcome_and_cause(setup: Setup) -> None:
    outcomes = setup.do(JobKind.WRITE, [KEYS[0], b"bad key", KEYS[1]]).outcomes
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.OK, OutcomeKind.FAILED, OutcomeKind.OK]
    assert isinstance(outcomes[1].cause, TierRefused) and str(outcomes[1].cause) == "bad"


def test_a_job_that_is_late_is_told_of_twice_if_it_has_begun_and_once_if_not(setup: Setup) -> None:
    setup.gate.touch()
    begun = [setup.submit(JobKind.WRITE, KEYS[number : number + 1], 0.2) for number in range(2)]
    while setup.lane.up and not all(job.expired for job in begun):
        for report in setup.lane.poll(time.monotonic()):
            assert report.late and not report.ended and report.job in begun
    assert all(job.expired for job in begun) and not setup.lane.up, "both threads hang"
    waits = setup.submit(JobKind.READ, KEYS[:1], 0.2)
    (report,) = setup.reports(1)
    assert report.job is waits and report.late and report.ended and not report.ran
    setup.gate.unlink()
    reports = setup.reports(2)
    assert {report.job.id for report in reports} == {job.id for job in begun}
    assert all(report.ended for report in reports)
    assert setup.lane.up and setup.lane.wait(_HANG)


def test_what_is_withdrawn_has_not_run(setup: Setup) -> None:
    setup.gate.touch()
    for number in range(2):
        setup.submit(JobKind.WRITE, KEYS[number : number + 1])
    setup.wait_until_held(2)
    waiting = [setup.submit(JobKind.WRITE, KEYS[number : number + 1]) for number in range(2, 5)]
    setup.lane.withdraw()
    reports = setup.reports(3)
    assert {report.job.id for report in reports} == {job.id for job in waiting}
    assert not any(report.ran for report in reports)
    assert not setup.lane.wait(0.05)
    setup.gate.unlink()
    assert setup.lane.wait(_HANG)
    assert all(report.ran for report in setup.reports(2))


def test_a_move_to_another_epoch_voids_what_was_there(setup: Setup) -> None:
    setup.do(JobKind.WRITE, KEYS[:4])
    setup.lane.move_to("new").result(_HANG)
    assert not any(outcome.ok for outcome in setup.do(JobKind.PROBE, KEYS[:4]).outcomes)


def test_a_lane_that_is_closed_takes_nothing(setup: Setup) -> None:
    setup.do(JobKind.WRITE, KEYS[:1])
    assert setup.lane.close(_HANG)
    with pytest.raises(ClosedError, match="held"):
        setup.submit(JobKind.WRITE, KEYS[:1])


def test_a_lane_whose_job_does_not_end_is_not_closed_in_time(setup: Setup) -> None:
    setup.gate.touch()
    setup.submit(JobKind.WRITE, KEYS[:1])
    setup.wait_until_held(1)
    assert not setup.lane.close(0.1)
    setup.gate.unlink()
    assert setup.lane.wait(_HANG)
