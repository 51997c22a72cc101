"""Lanes: where a tier's I/O runs, off the scheduler thread."""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from threading import Condition, Lock, RLock, Thread
from typing import NamedTuple, Protocol

from kvcascade.errors import ClosedError, TierError, TierRefused, TierUnavailable
from kvcascade.tiers import Tier
from kvcascade.types import Buffer, Changes, Key, Outcome, OutcomeKind

from .jobqueue import JobQueue
from .jobs import Job, JobKind, Report
from .retry import Retry

__all__ = ["Lane", "ThreadLane"]

logger = logging.getLogger("kvcascade.lane")

_TOGETHER = 4 << 20
"""Bytes that small jobs may come to where they are done in one call."""
_IDLE_WAIT = 0.5
_MAINTAIN_EVERY = 2.0


class _Housekeeping(NamedTuple):
    """How much of a thread's time goes to the tier's housekeeping."""

    budget: float
    """Seconds at a time."""
    rest: float
    """Where that was not enough: the time until it goes on, in times that it took."""


_MAINTAIN_ALONE = _Housekeeping(budget=0.05, rest=3.0)
_MAINTAIN_BESIDE = _Housekeeping(budget=0.25, rest=1.0)
"""Where other threads of the lane go on meanwhile."""


class Lane(Protocol):
    """Runs the jobs of one tier and owns their deadlines. All methods are called by the scheduler thread; none but
    `wait` and `close` blocks, and those at most as long as they are told. So does the result of `move_to`."""

    def submit(self, job: Job) -> None:
        """Queues a job. Loads go before stores, round-robin over their owners; stores in order."""

    def start(self) -> None:
        """Jobs that were submitted may begin from here on at the latest. Called at the end of a step; `poll` and
        whatever waits do the same."""

    def finish(self, owner: str) -> None:
        """This owner submits no more jobs. Called once an owner."""

    def poll(self, now: float) -> list[Report]:
        """What has ended, or passed its deadline, since the last call."""

    def changes(self) -> list[Changes]:
        """What the tier's housekeeping has changed since the last call."""

    def withdraw(self) -> None:
        """Takes all jobs that have not begun out of the queue; `poll` reports them as failed."""

    def wait(self, timeout: float) -> bool:
        """Waits until no job is queued or running; False where that took longer."""

    def move_to(self, epoch: str) -> "Future[None]":
        """Moves the tier to another epoch, in the lane, before all jobs that wait: one move at a time, and none
        that a later one has overtaken. Its failure is a `TierError`."""

    def close(self, timeout: float) -> bool:
        """Ends the lane after the jobs that run now; what is queued is withdrawn. False where a job did not end
        in time: its thread still uses the tier and the pool."""

    @property
    def queued(self) -> int:
        """Jobs that have not been reported."""

    @property
    def up(self) -> bool:
        """Whether jobs get anywhere: False while all that could run them hangs, or is not there."""


class ThreadLane:
    """A lane of threads in this process.

    `_lock` covers the queue and counts, and threads wait on it for what there is to do; who waits until nothing is
    left waits on `_rest`, of the same lock. The tier is called, and its results are read, with the lock released.
    """

    def __init__(
        self,
        name: str,
        tier: Tier,
        slot: Callable[[int], Buffer],
        concurrency: int,
        retries: int = 0,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """`slot`: the bytes of a slot; `concurrency`: threads; `clock`: the one that deadlines are in; `tell`: is
        called on a thread of the lane when there may be something to `poll`, or in `changes`."""
        self._name = name
        self._retry = Retry(retries)
        self._clock = clock
        self._tell = tell
        self._tier = tier
        self._slot = slot
        self._together = _TOGETHER // len(slot(0)) if tier.capabilities.batches else 0
        lock = RLock()
        self._lock = Condition(lock)
        self._rest = Condition(lock)
        self._queue = JobQueue()
        self._actions: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._unreported: dict[int, Job] = {}
        self._reports: deque[Report] = deque()
        self._changes: deque[Changes] = deque()
        self._running = 0
        self._lost = 0
        self._moves = 0
        self._moving = Lock()
        self._maintain_at = time.monotonic() + _MAINTAIN_EVERY
        self._maintaining = False
        self._closing = False
        self._threads = [
            Thread(target=self._work, name=f"kvcascade-{name}-{number}", daemon=True)
            for number in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    # The scheduler's side

    @property
    def queued(self) -> int:
        return len(self._unreported)

    @property
    def up(self) -> bool:
        return self._lost < len(self._threads)

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._closing:
                raise ClosedError(f"the lane of tier {self._name!r} is closed")
            self._unreported[job.id] = job
            self._queue.put(job)
            self._lock.notify()

    def start(self) -> None:
        """They begin as soon as there is a thread for them."""

    def finish(self, owner: str) -> None:
        """Nothing is kept for an owner once its jobs are done."""

    def poll(self, now: float) -> list[Report]:
        if not self._unreported and not self._reports:
            return []
        reports = []
        while self._reports:
            reports.append(self._settle(self._reports.popleft()))
        if self._unreported:
            reports += self._expire(now)
        return reports

    def changes(self) -> list[Changes]:
        return [self._changes.popleft() for _ in range(len(self._changes))]

    def withdraw(self) -> None:
        with self._lock:
            for job in self._queue.clear():
                job.withdrawn = True
                self._reports.append(Report(job, job.failed("withdrawn before it ran"), ran=False))
            self._rest.notify_all()

    def wait(self, timeout: float) -> bool:
        with self._lock:
            return self._rest.wait_for(self._at_rest, timeout)

    def move_to(self, epoch: str) -> "Future[None]":
        done: Future[None] = Future()
        with self._lock:
            if self._closing:
                raise ClosedError(f"the lane of tier {self._name!r} is closed")
            self._moves += 1
            self._actions.append((partial(self._move, epoch, self._moves), done))
            self._lock.notify()
        return done

    def close(self, timeout: float) -> bool:
        self.withdraw()
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _settle(self, report: Report) -> Report:
        if self._unreported.pop(report.job.id, None) is None:
            self._lost -= 1  # it was reported at its deadline
        return report

    def _expire(self, now: float) -> list[Report]:
        """Reports the jobs whose deadline has passed. Jobs stand in the order of their deadlines."""
        expired = []
        for job in self._unreported.values():
            if job.deadline > now:
                break
            expired.append(job)
        with self._lock:
            return [self._expired(job) for job in expired]

    def _expired(self, job: Job) -> Report:
        del self._unreported[job.id]
        if not job.begun:
            job.withdrawn = True
            return Report(job, job.failed("the deadline passed before it began"), ran=False, late=True)
        self._lost += 1
        job.expired = True
        return Report(job, job.failed("the deadline passed"), ended=False, late=True)

    def _at_rest(self) -> bool:
        return not (self._running or self._queue or self._actions)

    # The threads' side

    def _work(self) -> None:
        while True:
            with self._lock:
                task = self._next()
                while task is None and not self._closing and not self._maintenance_due():
                    self._lock.wait(self._idle_wait())
                    task = self._next()
                if task is None and self._closing:
                    return
                maintain = task is None or self._maintenance_due()
                if maintain:
                    self._maintaining = True
                self._running += task is not None
            if task is not None:
                task()
            pause = self._maintain() if maintain else 0.0
            self._tell()
            with self._lock:
                self._running -= task is not None
                if maintain:
                    self._maintaining = False
                    self._maintain_at = time.monotonic() + pause
                if self._at_rest():
                    self._rest.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Under the lock: the next thing to do."""
        if self._actions:
            action, done = self._actions.popleft()
            return lambda: _resolve(action, done)
        job = self._queue.take()
        return self._begin(job) if job else None

    def _begin(self, first: Job) -> Callable[[], None]:
        """What does the job, and those that wait and cost less together with it."""
        jobs = [first]
        if first.kind is not JobKind.PROBE:
            jobs += self._queue.take_with(first, len(self._threads), self._together - len(first.keys))
        for job in jobs:
            job.begun = True
        return lambda: self._run(jobs)

    def _move(self, epoch: str, number: int) -> None:
        with self._moving:
            if number == self._moves:
                self._tier.move_to(epoch)

    def _maintenance_due(self) -> bool:
        return not self._maintaining and time.monotonic() > self._maintain_at

    def _idle_wait(self) -> float:
        if self._maintaining:
            return _IDLE_WAIT
        return min(_IDLE_WAIT, max(0.0, self._maintain_at - time.monotonic()))

    def _run(self, jobs: Sequence[Job]) -> None:
        begin = time.monotonic()
        for job, outcomes in zip(jobs, self._try_together(jobs), strict=True):
            self._try_again(job, outcomes)
            self._reports.append(Report(job, outcomes, seconds=time.monotonic() - begin))

    def _try_together(self, jobs: Sequence[Job]) -> list[list[Outcome]]:
        """Does the jobs, which are of one kind, in one call; where that is no good, each by itself."""
        if len(jobs) > 1:
            lists = ([getattr(job, name) for job in jobs] for name in ("keys", "slots", "victims"))
            keys, slots, victims = (list(chain.from_iterable(some)) for some in lists)
            with suppress(Exception):  # each job's own call will say what is wrong
                outcomes = self._call(jobs[0].kind, keys, slots, victims)
                if len(outcomes) == len(keys):
                    rest = iter(outcomes)
                    return [list(islice(rest, len(job.keys))) for job in jobs]
        return [self._try(job, range(len(job.keys))) for job in jobs]

    def _try_again(self, job: Job, outcomes: list[Outcome]) -> None:
        """Retries what has failed, as far as that is allowed, and puts what came of it in its place."""
        self._retry.tried(len(outcomes))
        for attempt in range(self._retry.times):
            failed = [place for place, outcome in enumerate(outcomes) if _may_recover(outcome)]
            if not failed or not self._retry.allowed() or not self._pause(attempt, job.deadline):
                break
            for place, outcome in zip(failed, self._try(job, failed), strict=True):
                outcomes[place] = outcome

    def _try(self, job: Job, places: Sequence[int]) -> list[Outcome]:
        """Does the job for these of its keys."""
        keys = [job.keys[place] for place in places]
        try:
            slots = [job.slots[place] for place in places] if job.slots else []
            outcomes = self._call(job.kind, keys, slots, job.victims)
            if len(outcomes) == len(keys):
                return list(outcomes)
            error: Exception = TierUnavailable(f"{len(outcomes)} outcomes for {len(keys)} keys")
        except Exception as raised:  # a tier that raises has failed this job, and nothing else
            error = raised
        return [Outcome.failed(_as_tier_error(error))] * len(keys)

    def _call(
        self, kind: JobKind, keys: Sequence[Key], slots: Sequence[int], victims: Sequence[Key]
    ) -> list[Outcome]:
        if kind is JobKind.PROBE:
            return [Outcome.OK if there else Outcome.MISSING for there in self._tier.exists(keys)]
        buffers = [self._slot(slot) for slot in slots]
        if kind is JobKind.READ:
            return self._tier.read(keys, buffers)
        return self._tier.write(keys, buffers, victims)

    def _pause(self, attempt: int, deadline: float) -> bool:
        """Waits before another attempt; False where there is no time for one."""
        pause = self._retry.pause(attempt)
        if self._clock() + pause >= deadline:
            return False
        with self._lock:
            return not self._lock.wait_for(lambda: self._closing, pause)

    def _maintain(self) -> float:
        """Does the tier's housekeeping. Returns the seconds until it is due again: soon where it took all the time
        that it was given, for then there is more to do."""
        terms = _MAINTAIN_ALONE if len(self._threads) == 1 else _MAINTAIN_BESIDE
        began = time.monotonic()
        try:
            changes = self._tier.maintain(terms.budget)
        except Exception as error:  # housekeeping is tried again; the jobs tell whether the tier works
            logger.debug("housekeeping of tier %r failed: %s", self._name, error)
            return _MAINTAIN_EVERY
        if changes != Changes():
            self._changes.append(changes)
        took = time.monotonic() - began
        return _MAINTAIN_EVERY if took < terms.budget else min(_MAINTAIN_EVERY, took * terms.rest)


def _resolve(action: Callable[[], None], done: "Future[None]") -> None:
    try:
        action()
    except Exception as error:  # handed to the caller of `run`
        done.set_exception(_as_tier_error(error))
    else:
        done.set_result(None)


def _may_recover(outcome: Outcome) -> bool:
    return outcome.kind is OutcomeKind.FAILED and not isinstance(outcome.cause, TierRefused)


def _as_tier_error(error: Exception) -> TierError:
    if isinstance(error, TierError):
        return error
    mapped = TierUnavailable(f"{type(error).__name__}: {error}")
    mapped.__cause__ = error
    return mapped
