"""A lane whose threads are in the I/O process."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from secrets import token_hex
from typing import TYPE_CHECKING

from kvcascade.configs.schema import SecondarySettings
from kvcascade.errors import ClosedError
from kvcascade.manager.jobs import Job, Report
from kvcascade.types import Changes, Entry, Key

from .wire import CloseLane, JobOrder, MoveTo, Reported, Run, Withdraw

if TYPE_CHECKING:
    from .process import IoProcess

__all__ = ["ProcessLane"]

_AHEAD = 0.05
_AHEAD_SHARE = 0.1


class ProcessLane:
    """Sends the jobs of a step to the child in one message, and takes in reports at `poll`; a `Lane`.

    The child owns the deadlines as long as it answers, since only there is known which jobs have begun. It gets
    them a little earlier than they are: a job that is overdue here is one of a child that does not answer.

    Attributes:
        epoch: where the tier was moved to last; None where it never was.
        private: nobody else uses the tier.
    """

    def __init__(
        self, process: "IoProcess", place: int, settings: SecondarySettings, clock: Callable[[], float]
    ) -> None:
        self.epoch: str | None = None
        self.private = False
        self._process = process
        self._place = place
        self._settings = settings
        self._clock = clock
        self._unreported: dict[int, Job] = {}
        self._running: dict[int, Job] = {}
        """Jobs that may be using their slots."""
        self._new: dict[int, Job] = {}
        """Jobs of which the child has not been told."""
        self._reports: deque[Report] = deque()
        self._changes: list[Changes] = []
        self._lost = 0
        self._open = False
        self._held: set[Key] = set()
        self._held_is_whole = False
        self._closing = False

    @property
    def queued(self) -> int:
        return len(self._unreported)

    @property
    def up(self) -> bool:
        return self._open and self._lost < self._settings.concurrency

    def submit(self, job: Job) -> None:
        if self._closing:
            raise ClosedError(f"the lane of tier {self._settings.name!r} is closed")
        self._unreported[job.id] = job
        if not self._open:
            self._reports.append(Report(job, job.failed("the I/O process does not run now"), ran=False))
            return
        self._running[job.id] = self._new[job.id] = job

    def start(self) -> None:
        if self._new:
            offset = time.monotonic() - self._clock()
            self._process.send(Run(self._place, [self._order(job, offset) for job in self._new.values()]))
            self._new.clear()

    def finish(self, owner: str) -> None:
        """Nothing is kept for an owner once its jobs are done."""

    def poll(self, now: float) -> list[Report]:
        self.start()
        self._process.pump()
        reports = []
        while self._reports:
            report = self._reports.popleft()
            first = self._unreported.pop(report.job.id, None) is not None
            if report.ended:
                self._lost -= report.job.expired
                reports.append(report)
            elif first:
                reports.append(self._expired(report))
        if self._unreported:
            reports += self._overdue(now)
        return reports

    def changes(self) -> list[Changes]:
        changes, self._changes = self._changes, []
        if self._held_is_whole:
            self._held_is_whole, self._open = False, True
        return changes

    def withdraw(self) -> None:
        self.start()
        self._process.send(Withdraw(self._place))

    def wait(self, timeout: float) -> bool:
        self.start()
        return self._process.wait_for(lambda: not self._running, timeout)

    def move_to(self, epoch: str) -> "Future[None]":
        """Where nobody names the weights that follow, a private tier's epoch gets a name here: the next child
        finds it again."""
        name = epoch or (f"unnamed-{token_hex(8)}" if self.private else "")
        self.epoch = name
        return self._process.call(lambda number: MoveTo(self._place, number, name))

    def close(self, timeout: float) -> bool:
        self._closing = True
        self.withdraw()
        closed = self._process.call(lambda number: CloseLane(self._place, number, timeout))
        return self._process.wait_for(closed.done, timeout) and not self._running

    def _order(self, job: Job, offset: float) -> JobOrder:
        """As the child gets it. `offset`: from the manager's clock to the system's, which both processes share."""
        deadline = job.deadline + offset - min(_AHEAD, _AHEAD_SHARE * self._settings.deadline)
        return JobOrder(job.id, job.kind, list(job.keys), list(job.slots), list(job.victims), job.owner, deadline)

    def _overdue(self, now: float) -> list[Report]:
        """Reports the jobs whose deadline has passed, in whose order they stand."""
        overdue = []
        for job in self._unreported.values():
            if job.deadline > now:
                break
            overdue.append(job)
        for job in overdue:
            del self._unreported[job.id]
        return [
            self._expired(Report(job, job.failed("the deadline passed"), ended=False, late=True))
            for job in overdue
        ]

    def _expired(self, report: Report) -> Report:
        report.job.expired = True
        self._lost += 1
        return report

    # What the child says

    def opened(self) -> None:
        """Jobs may come."""
        self._open = True

    def found(self, entries: Sequence[Entry], last: bool) -> None:
        """The tier was opened anew and holds these; all of it was told where they are the `last`. Jobs may come
        once somebody has read that in the `changes`."""
        self._held.update(entry.key for entry in entries)
        self._changes.append(Changes(tuple(entries), held=frozenset(self._held) if last else None))
        self._held_is_whole = last
        if last:
            self._held.clear()

    def told(self, reports: Sequence[Reported], changes: Sequence[Changes]) -> None:
        self._changes += changes
        for reported in reports:
            job = self._running.pop(reported.id) if reported.ended else self._running[reported.id]
            self._reports.append(reported.report(job))

    def ended(self, why: str) -> None:
        """Nobody runs the jobs any more, or uses their slots."""
        self._open = self._held_is_whole = False
        self._held.clear()
        self._changes.clear()
        self._reports += [Report(job, job.failed(why)) for job in self._running.values()]
        self._running.clear()
        self._new.clear()
