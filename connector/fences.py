"""Fences: no block is written by somebody else while a job still uses it."""

from collections.abc import Collection, Iterable

from .protocols import NO_BLOCK

__all__ = ["Fences"]


class Fences:
    """Block -> jobs that read or write it, and what of it the workers must wait for in the step being planned.

    Ids are taken across groups: engines give a block that one group has freed to another.
    """

    def __init__(self) -> None:
        self.allocated: set[int] = set()
        """Blocks that were handed out in this step, to be written."""
        self.flush: set[int] = set()
        """Jobs that must have ended before the step runs."""
        self.distrusted: set[int] = set()
        """Blocks that may hold something else than the engine takes them for, until they are handed out again."""
        self._jobs: dict[int, set[int]] = {}

    def hand_out(self, blocks: Iterable[int]) -> None:
        """These blocks will be written in this step: the jobs that still use them come first."""
        for block in blocks:
            if block != NO_BLOCK:
                self.distrusted.discard(block)
                self.allocated.add(block)
                self.flush |= self._jobs.get(block, set())

    def distrust(self, blocks: Iterable[int]) -> None:
        self.distrusted.update(block for block in blocks if block != NO_BLOCK)

    def guard(self, job: int, blocks: Collection[int], freed: bool = False) -> None:
        """A new job uses these blocks. `freed`: the engine may have handed them out in this step already."""
        for block in blocks:
            self._jobs.setdefault(block, set()).add(job)
        if freed and not self.allocated.isdisjoint(blocks):
            self.flush.add(job)

    def release(self, job: int, blocks: Iterable[int]) -> None:
        """The job has ended."""
        for block in blocks:
            jobs = self._jobs.get(block)
            if jobs is not None:
                jobs.discard(job)
                if not jobs:
                    del self._jobs[block]

    def reset(self, jobs: Iterable[int]) -> None:
        """Everything is void; these jobs, all that are in flight, must have ended before the next step runs."""
        self.flush.update(jobs)
        self._jobs.clear()

    def end_step(self) -> set[int]:
        """The step is planned; returns the flush list."""
        flush, self.flush, self.allocated = self.flush, set(), set()
        return flush

    def __len__(self) -> int:
        """Blocks in use by jobs."""
        return len(self._jobs)
