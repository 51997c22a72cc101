"""The jobs that wait for a lane's threads."""

from collections import deque
from collections.abc import Callable
from functools import partial

from .jobs import Job, JobKind

__all__ = ["JobQueue"]


class JobQueue:
    """Loads and probes go before stores, round-robin over their owners; stores in order. Not thread-safe."""

    def __init__(self) -> None:
        self._loads: dict[str, deque[Job]] = {}
        self._stores: deque[Job] = deque()
        self._loads_waiting = 0

    def __bool__(self) -> bool:
        return bool(self._loads or self._stores)

    def put(self, job: Job) -> None:
        if job.kind is JobKind.WRITE:
            self._stores.append(job)
        else:
            self._loads.setdefault(job.owner, deque()).append(job)
            self._loads_waiting += 1

    def take(self) -> Job | None:
        """The next job; those that were withdrawn are dropped."""
        return self._load(_any) or self._store(_any)

    def take_with(self, job: Job, threads: int, keys: int) -> list[Job]:
        """Jobs of the same kind as this one, which was taken, that come next, where as many wait for each of the
        `threads`: up to so many `keys`."""
        stores = job.kind is JobKind.WRITE
        take, waiting = (self._store, len(self._stores)) if stores else (self._load, self._loads_waiting)
        taken: list[Job] = []
        for _ in range(waiting // threads):
            room = keys - sum(len(other.keys) for other in taken)
            more = take(partial(_fits, job.kind, room))
            if more is None:
                break
            taken.append(more)
        return taken

    def clear(self) -> list[Job]:
        """Takes all jobs; those that were withdrawn are dropped."""
        waiting = [job for queue in self._loads.values() for job in queue] + list(self._stores)
        self._loads.clear()
        self._stores.clear()
        self._loads_waiting = 0
        return [job for job in waiting if not job.withdrawn]

    def _load(self, fits: Callable[[Job], bool]) -> Job | None:
        while self._loads:
            owner, queue = next(iter(self._loads.items()))
            if not fits(queue[0]):
                return None
            del self._loads[owner]
            job = queue.popleft()
            self._loads_waiting -= 1
            if queue:
                self._loads[owner] = queue  # at the end: the next owner's turn
            if not job.withdrawn:
                return job
        return None

    def _store(self, fits: Callable[[Job], bool]) -> Job | None:
        while self._stores and fits(self._stores[0]):
            job = self._stores.popleft()
            if not job.withdrawn:
                return job
        return None


def _any(job: Job) -> bool:
    return True


def _fits(kind: JobKind, keys: int, job: Job) -> bool:
    return job.kind is kind and len(job.keys) <= keys
