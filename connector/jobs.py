"""All jobs that workers have been given and not all ended."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from kvcascade.errors import ProtocolError
from kvcascade.types import Key

from .plans import LoadPlan
from .protocols import NO_BLOCK
from .requests import RequestState
from .transfers import ChunkCopy, Direction, Transfer, WorkerReport

__all__ = ["Job", "JobTable"]


class Job:
    """One transfer of some chunks of a request."""

    __slots__ = ("chunks", "direction", "failed", "id", "keys", "left", "owner", "plan", "start")

    def __init__(
        self,
        number: int,
        owner: RequestState,
        direction: Direction,
        keys: Sequence[Key],
        chunks: Sequence[ChunkCopy],
        workers: int,
        plan: LoadPlan | None = None,
    ) -> None:
        self.id = number
        self.owner = owner
        self.direction = direction
        self.keys = keys
        """Of `chunks`, in their order."""
        self.chunks = tuple(chunks)
        self.left = workers
        """How many workers have not reported it."""
        self.failed: set[int] = set()
        """Places of the chunks that some worker could not copy."""
        self.plan = plan
        """For a load: what it is to bring."""
        self.start = owner.local
        """For a load: the tokens before those that are loaded."""

    @property
    def transfer(self) -> Transfer:
        return Transfer(self.id, self.owner.id, self.direction, self.chunks)

    @property
    def blocks(self) -> set[int]:
        """The device blocks that it reads or writes."""
        return {block for chunk in self.chunks for block in chunk.blocks} - {NO_BLOCK}

    def keys_by_success(self) -> tuple[list[Key], list[Key]]:
        """The keys of the chunks that all workers have copied, and those of the others."""
        copied = [key for place, key in enumerate(self.keys) if place not in self.failed]
        return copied, [self.keys[place] for place in sorted(self.failed)]

    def failed_blocks(self, groups: int) -> tuple[frozenset[int], ...]:
        """For each group, the device blocks that were to be copied and were not."""
        found: list[set[int]] = [set() for _ in range(groups)]
        for place in self.failed:
            chunk = self.chunks[place]
            found[chunk.group].update(chunk.blocks)
        for group, blocks in self.plan.lost if self.plan else ():
            found[group].update(blocks)
        return tuple(frozenset(blocks - {NO_BLOCK}) for blocks in found)

    @property
    def incomplete(self) -> bool:
        """Whether something that was to be copied was not."""
        return bool(self.failed or (self.plan and self.plan.lost))

    def failed_at(self) -> int:
        """For a load: the first token that was to be loaded and was not; its end where all were."""
        return self.start if self.plan is None else self.plan.failed_at(self.failed, self.owner.groups)

    def valid_tokens(self) -> int:
        """For a load: where the request can go on. With sliding windows a part of what was promised is of no use:
        the engine has let go of all before the window of the load's end, its own blocks too."""
        windowed = any(group.spec.window is not None for group in self.owner.groups)
        return 0 if self.incomplete and windowed else self.failed_at()


class JobTable:
    """Jobs in flight, and those that a reset has voided while workers still run them. Every job has a number;
    those below `threshold` are from before the last reset."""

    def __init__(self, workers: int) -> None:
        self.threshold = 0
        self.late_reports = 0
        """Reports of jobs of before a reset that were over already."""
        self._workers = workers
        self._next = 0
        self._live: dict[int, Job] = {}
        self._void: dict[int, Job] = {}
        self._loading: Counter[Key] = Counter()
        self._void_keys: Counter[Key] = Counter()

    def open(
        self,
        owner: RequestState,
        direction: Direction,
        keys: Sequence[Key],
        chunks: Sequence[ChunkCopy],
        plan: LoadPlan | None = None,
    ) -> Job:
        """A new job, in flight from now on."""
        job = self._live[self._next] = Job(self._next, owner, direction, keys, chunks, self._workers, plan)
        self._next += 1
        owner.jobs.add(job.id)
        if direction is Direction.LOAD:
            self._loading.update(keys)
        return job

    def check(self, report: WorkerReport) -> None:
        """Nothing of a report is applied before all of it has passed.

        Raises:
            ProtocolError: it names a job or a chunk that there is not, or more workers than there are.
        """
        for number, count in report.ended.items():
            job = self._job(number)
            if job is None and 0 <= number < self.threshold:
                continue  # over already: one of before a reset
            left = job.left if job else 0
            if not 0 < count <= left:
                raise ProtocolError(
                    f"job {number}: reported by {count} workers; {left} of {self._workers} were expected"
                )
        for number, places in report.failed.items():
            self._check_failed(number, places, number in report.ended)

    def report(self, number: int, count: int, failed: Iterable[int]) -> Job | None:
        """`count` workers have ended this job, as `check` has allowed. Returns it once all have."""
        job = self._job(number)
        if job is None:
            self.late_reports += 1
            return None
        job.left -= count
        job.failed.update(failed)
        if job.left:
            return None
        self._close(job)
        return job

    def is_void(self, job: Job) -> bool:
        """Whether the job is from before the last reset."""
        return job.id < self.threshold

    def voided(self, key: Key) -> bool:
        """Whether a job of before a reset still uses the slot that this key had."""
        return key in self._void_keys

    def loading(self, keys: Iterable[Key]) -> bool:
        """Whether any of these is being loaded."""
        return bool(self._loading) and any(key in self._loading for key in keys)

    def ranges_of(self, owner: RequestState) -> list[tuple[int, int, Key]]:
        """What a load of this request brings: see `LoadPlan.ranges`."""
        plans = [self._live[job].plan for job in owner.jobs]
        return [found for plan in plans if plan for found in plan.ranges(owner.groups)]

    def load_of(self, owner: RequestState) -> bool:
        """Whether a load of this request is running, also one of before a reset."""
        jobs = (*(self._live[job] for job in owner.jobs), *self._void.values())
        return any(job.owner is owner and job.direction is Direction.LOAD for job in jobs)

    def reset(self) -> None:
        """All jobs in flight are void. They are kept until the workers have ended them."""
        self.threshold = self._next
        for job in self._live.values():
            self._void_keys.update(job.keys)
        self._void.update(self._live)
        self._live.clear()
        self._loading.clear()

    def fail_stores(self) -> set[int]:
        """Whatever the stores in flight have copied counts as not copied. Returns the blocks that they read."""
        stores = [job for job in self._live.values() if job.direction is Direction.STORE]
        for job in stores:
            job.failed.update(range(len(job.chunks)))
        return set().union(*(job.blocks for job in stores))

    @property
    def in_flight(self) -> Collection[int]:
        """The jobs that a reset would void."""
        return self._live.keys()

    def __len__(self) -> int:
        return len(self._live) + len(self._void)

    def _job(self, number: int) -> Job | None:
        return self._live.get(number) or self._void.get(number)

    def _check_failed(self, number: int, places: Collection[int], ended: bool) -> None:
        if not ended:
            raise ProtocolError(f"job {number}: chunks have failed, but it is not among those that have ended")
        job = self._job(number)
        if job is not None and not all(0 <= place < len(job.chunks) for place in places):
            raise ProtocolError(
                f"job {number}: chunks {sorted(places)} have failed; it has chunks 0 to {len(job.chunks) - 1}"
            )

    def _close(self, job: Job) -> None:
        if self._void.pop(job.id, None):
            _subtract(self._void_keys, job.keys)
            return
        del self._live[job.id]
        job.owner.jobs.discard(job.id)
        if job.direction is Direction.LOAD:
            _subtract(self._loading, job.keys)


def _subtract(counts: Counter[Key], keys: Iterable[Key]) -> None:
    for key in keys:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
