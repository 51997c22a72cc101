"""Lanes for tests: one without threads, which moves when the test says so, and one that watches another."""

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from kvcascade.errors import TierError, TierUnavailable
from kvcascade.manager.jobs import Job, JobKind, Report
from kvcascade.manager.lane import Lane
from kvcascade.tiers import Tier
from kvcascade.types import Buffer, Changes, Outcome

__all__ = ["ManualLane", "WatchedLane"]


class ManualLane:
    """Runs the jobs of one tier in the moments that the test chooses, on the test's own thread; a `Lane`.

    A job begins, its transfer happens, its end is reported: each is one `advance`, so that deadlines, resets and
    other jobs can fall between any two of them. An action begins and ends in one.

    Attributes:
        patient: whether `wait`, `move_to` and `close` have all the time they need; else they have none.
        on_transfer: is told of each job just before its bytes move.
    """

    def __init__(self, tier: Tier, slot: Callable[[int], Buffer], concurrency: int) -> None:
        self.patient = True
        self.on_transfer: Callable[[Job], None] = lambda job: None
        self._tier = tier
        self._slot = slot
        self._concurrency = concurrency
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._unreported: dict[int, Job] = {}
        self._outcomes: dict[int, list[Outcome]] = {}
        self._reports: deque[Report] = deque()
        self._changes: list[Changes] = []
        self._actions: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._lost = 0
        self._moves_to = 0

    # The manager's side

    @property
    def queued(self) -> int:
        return len(self._unreported)

    @property
    def up(self) -> bool:
        return self._lost < self._concurrency

    def submit(self, job: Job) -> None:
        self._unreported[job.id] = job
        self._waiting.append(job)
        self._waiting.sort(key=lambda waiting: waiting.kind is JobKind.WRITE)

    def start(self) -> None:
        """They begin when the test says so."""

    def finish(self, owner: str) -> None:
        """Nothing is kept for an owner."""

    def poll(self, now: float) -> list[Report]:
        reports = list(self._reports)
        self._reports.clear()
        for report in reports:
            self._unreported.pop(report.job.id, None)
            self._lost -= report.job.expired
        late = [job for job in self._unreported.values() if job.deadline <= now]
        return reports + [self._expired(job) for job in late]

    def changes(self) -> list[Changes]:
        changes, self._changes = self._changes, []
        return changes

    def withdraw(self) -> None:
        for job in self._waiting:
            job.withdrawn = True
            self._reports.append(Report(job, job.failed("withdrawn before it ran"), ran=False))
        self._waiting.clear()

    def wait(self, timeout: float) -> bool:
        if self.patient:
            self.run_all()
        return not self._moves()

    def move_to(self, epoch: str) -> "Future[None]":
        done: Future[None] = Future()
        self._moves_to += 1
        self._actions.append((partial(self._move, epoch, self._moves_to), done))
        if self.patient:
            while self._actions:
                self._act()
        return done

    def close(self, timeout: float) -> bool:
        self.withdraw()
        return self.wait(timeout)

    # The test's side

    def advance(self, pick: int = 0) -> None:
        """The `pick`-th of the things that may happen next happens (modulo their number), if there is any."""
        moves = self._moves()
        if moves:
            moves[pick % len(moves)]()

    def run_all(self) -> None:
        """Everything happens, in order."""
        while moves := self._moves():
            moves[0]()

    def maintain(self) -> None:
        """The tier does its housekeeping."""
        with contextlib.suppress(TierError, RuntimeError):
            self._changes.append(self._tier.maintain(1.0))

    def _moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [self._act] if self._actions else []
        moves += [lambda job=job: self._continue(job) for job in self._running]  # type: ignore[misc]
        if self._waiting and len(self._running) < self._concurrency:
            moves.append(self._begin)
        return moves

    def _begin(self) -> None:
        job = self._waiting.pop(0)
        job.begun = True
        self._running.append(job)

    def _continue(self, job: Job) -> None:
        if job.id not in self._outcomes:
            self.on_transfer(job)
            self._outcomes[job.id] = self._transfer(job)
        else:
            self._running.remove(job)
            self._reports.append(Report(job, self._outcomes.pop(job.id)))

    def _transfer(self, job: Job) -> list[Outcome]:
        buffers = [self._slot(slot) for slot in job.slots]
        try:
            if job.kind is JobKind.PROBE:
                return [Outcome.OK if there else Outcome.MISSING for there in self._tier.exists(job.keys)]
            if job.kind is JobKind.READ:
                return self._tier.read(job.keys, buffers)
            return self._tier.write(job.keys, buffers, job.victims)
        except (TierError, RuntimeError) as error:
            return job.failed(str(error))

    def _move(self, epoch: str, number: int) -> None:
        if number == self._moves_to:
            self._tier.move_to(epoch)

    def _act(self) -> None:
        action, done = self._actions.popleft()
        try:
            action()
        except (TierError, RuntimeError) as error:
            done.set_exception(error if isinstance(error, TierError) else TierUnavailable(str(error)))
        else:
            done.set_result(None)

    def _expired(self, job: Job) -> Report:
        del self._unreported[job.id]
        if job.begun:
            self._lost += 1
            job.expired = True
            return Report(job, job.failed("the deadline passed"), ended=False, late=True)
        job.withdrawn = True
        self._waiting.remove(job)
        return Report(job, job.failed("the deadline passed before it began"), ran=False, late=True)


class WatchedLane:
    """Passes all on to another lane, and checks that the manager keeps the rules of one. A `Lane`.

    Attributes:
        unsettled: jobs whose end the manager has not been told: those whose slots are in use.
        awaited: jobs of requests of which the manager has not been told anything.
        on_submit: is told of each job when it is submitted.
        submitted: the ids of all jobs.
        reported: the ids of all jobs of which the manager has been told, once for each.

    Raises:
        AssertionError: a rule is broken.
    """

    def __init__(self, name: str, inner: Lane) -> None:
        self.name = name
        self.inner = inner
        self.unsettled: dict[int, Job] = {}
        self.submitted: list[int] = []
        self.reported: list[int] = []
        self.finishes = 0
        self.on_submit: Callable[[Job], None] = lambda job: None
        self._finished: set[str] = set()
        self._closed = False

    @property
    def awaited(self) -> int:
        return sum(job.owner != "" and not job.expired for job in self.unsettled.values())

    @property
    def queued(self) -> int:
        return self.inner.queued

    @property
    def up(self) -> bool:
        return self.inner.up

    def begin(self, owner: str) -> None:
        """A request begins; an earlier one may have had its id."""
        self._finished.discard(owner)

    def submit(self, job: Job) -> None:
        assert not self._closed, "a job for a closed lane"
        assert job.owner not in self._finished, f"a job of {job.owner!r} after its finish"
        slots = 0 if job.kind is JobKind.PROBE else len(job.keys)
        assert job.keys and len(job.slots) == slots, "a transfer needs a slot for each of its keys, a probe none"
        self.on_submit(job)
        self.submitted.append(job.id)
        self.unsettled[job.id] = job
        self.inner.submit(job)

    def start(self) -> None:
        self.inner.start()

    def finish(self, owner: str) -> None:
        assert owner not in self._finished, f"{owner!r} was finished twice"
        self._finished.add(owner)
        self.finishes += 1
        self.inner.finish(owner)

    def poll(self, now: float) -> list[Report]:
        reports = self.inner.poll(now)
        for report in reports:
            assert report.job.id in self.unsettled, "told of its end twice"
            if not (report.ended and report.job.expired):
                self.reported.append(report.job.id)
            if report.ended:
                del self.unsettled[report.job.id]
        return reports

    def changes(self) -> list[Changes]:
        return self.inner.changes()

    def withdraw(self) -> None:
        self.inner.withdraw()

    def wait(self, timeout: float) -> bool:
        return self.inner.wait(timeout)

    def move_to(self, epoch: str) -> "Future[None]":
        return self.inner.move_to(epoch)

    def close(self, timeout: float) -> bool:
        self._closed = True
        return self.inner.close(timeout)
