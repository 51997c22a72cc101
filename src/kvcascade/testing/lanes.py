"""A lane without threads: what it does, and when, is decided by the test, on the test's own thread."""

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future

from kvcascade.errors import TierError, TierUnavailable
from kvcascade.manager.jobs import Job, JobKind, Report
from kvcascade.tiers import Tier
from kvcascade.types import Buffer, Changes, Outcome

__all__ = ["ManualLane"]


class ManualLane:
    """Runs the jobs of one tier in the moments that the test chooses; a `kvcascade.manager.lane.Lane`.

    A job begins, its transfer happens, its end is reported: each is one `advance`, so that deadlines, resets and
    other jobs can fall between any two of them. An action begins and ends in one.

    Attributes:
        patient: whether `wait`, `run` and `close` have all the time they need; else they have none.
        running: jobs that have begun and not ended, first to last.
        unsettled: jobs whose end the manager has not read yet: those whose slots are in use.
        on_submit: is told of each job when it is submitted.
        on_transfer: is told of each job just before its bytes move.

    Raises:
        AssertionError: the manager broke the rules of a lane.
    """

    def __init__(self, name: str, tier: Tier, slot: Callable[[int], Buffer], concurrency: int) -> None:
        self.name = name
        self.patient = True
        self.running: list[Job] = []
        self.unsettled: dict[int, Job] = {}
        self.on_submit: Callable[[Job], None] = lambda job: None
        self.on_transfer: Callable[[Job], None] = lambda job: None
        self.submitted: list[int] = []
        self.reported: Counter[int] = Counter()
        """Job -> how often its first report was given out."""
        self._tier = tier
        self._slot = slot
        self._concurrency = concurrency
        self._waiting: list[Job] = []
        self._unreported: dict[int, Job] = {}
        self._outcomes: dict[int, list[Outcome]] = {}
        self._reports: deque[Report] = deque()
        self._changes: list[Changes] = []
        self._actions: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self.finishes = 0
        self._finished: set[str] = set()
        self._closed = False

    # The manager's side

    @property
    def queued(self) -> int:
        return len(self._unreported)

    @property
    def lost(self) -> int:
        return sum(job.expired for job in self.unsettled.values())

    @property
    def awaited(self) -> int:
        """Jobs of requests that have not been reported."""
        return sum(job.owner != "" for job in self._unreported.values())

    def submit(self, job: Job) -> None:
        assert not self._closed, "a job for a closed lane"
        assert job.owner not in self._finished, f"a job of {job.owner!r} after its finish"
        assert len(job.keys) == len(job.slots) > 0, "a job needs one slot for each of its keys"
        self.on_submit(job)
        self.submitted.append(job.id)
        self._unreported[job.id] = self.unsettled[job.id] = job
        self._waiting.append(job)
        self._waiting.sort(key=lambda waiting: waiting.kind is JobKind.WRITE)

    def finish(self, owner: str) -> None:
        assert owner not in self._finished, f"{owner!r} was finished twice"
        self._finished.add(owner)
        self.finishes += 1

    def poll(self, now: float) -> list[Report]:
        reports = list(self._reports)
        self._reports.clear()
        for report in reports:
            del self.unsettled[report.job.id]
            if self._unreported.pop(report.job.id, None) is not None:
                self.reported[report.job.id] += 1
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
        return not (self._waiting or self.running or self._actions)

    def run(self, action: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()
        self._actions.append((action, done))
        if self.patient:
            while self._actions:
                self._act()
        return done

    def close(self, timeout: float) -> bool:
        self.withdraw()
        self._closed = True
        return self.wait(timeout)

    # The test's side

    def begin(self, owner: str) -> None:
        """A request begins; an earlier one may have had its id."""
        self._finished.discard(owner)

    @property
    def moves(self) -> int:
        """How many things may happen next."""
        return len(self._moves())

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
        try:
            self._changes.append(self._tier.maintain(1.0))
        except (TierError, RuntimeError):
            pass

    def _moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [self._act] if self._actions else []
        moves += [lambda job=job: self._continue(job) for job in self.running]  # type: ignore[misc]
        if self._waiting and len(self.running) < self._concurrency:
            moves.append(self._begin)
        return moves

    def _begin(self) -> None:
        job = self._waiting.pop(0)
        if not job.withdrawn:
            job.begun = True
            self.running.append(job)

    def _continue(self, job: Job) -> None:
        if job.id not in self._outcomes:
            self.on_transfer(job)
            self._outcomes[job.id] = self._transfer(job)
        else:
            self.running.remove(job)
            self._reports.append(Report(job, self._outcomes.pop(job.id)))

    def _transfer(self, job: Job) -> list[Outcome]:
        buffers = [self._slot(slot) for slot in job.slots]
        try:
            if job.kind is JobKind.READ:
                return self._tier.read(job.keys, buffers)
            return self._tier.write(job.keys, buffers, job.victims)
        except (TierError, RuntimeError) as error:
            return job.failed(str(error))

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
        self.reported[job.id] += 1
        if job.begun:
            job.expired = True
            return Report(job, job.failed("the deadline passed"), ended=False, late=True)
        job.withdrawn = True
        self._waiting.remove(job)
        del self.unsettled[job.id]
        return Report(job, job.failed("the deadline passed before it began"), ran=False, late=True)
