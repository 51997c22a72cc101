"""Holds a soft capacity: looks at everything in the directory, and evicts what was least recently used."""

import contextlib
import heapq
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvcascade.configs.schema import Watermarks

from .layout import GONE, chunks, fans, homes
from .lease import Lease
from .writers import Writer, remove_dead

__all__ = ["Limits", "Sweeper"]

log = logging.getLogger("kvcascade.tiers.fs")

PAUSES = (1.0, 30.0)
"""Seconds between two sweeps, at least and at most: so long that, as fast as the directory grew before the last
one, half of its free room is used."""
REST = 4.0
"""The pause is so many times as long as the sweep took, at least: a large directory is not looked at all the
time. Where it would outgrow its capacity meanwhile, only the above holds."""
CANDIDATES = 16_384
"""Chunks that one sweep evicts at most, so that its memory is bounded. Where that was not enough the next sweep
follows at once."""
STUCK = 1_000
"""Chunks that can't be deleted, after which a sweep gives up."""
SLICE = 64
"""Chunks that are looked at before the time is."""


class Limits(NamedTuple):
    """What a sweep enforces."""

    capacity: int | None
    watermarks: Watermarks
    ttl: float | None


class Candidate(NamedTuple):
    """A chunk that may be evicted. The smaller, the more recently used."""

    recency: float
    """Minus the mtime."""
    path: str
    nbytes: int


class Sweeper:
    """Passes over all namespaces and epochs of the directory, in slices, while it holds the lease.

    A pass keeps no list of what is there, only the chunks that were used the longest ago. What is used, or written
    anew, after the pass has met it stays. Not thread-safe.
    """

    def __init__(
        self, root: Path, limits: Limits, lease: Lease, writer: Writer, clock: Callable[[], float]
    ) -> None:
        self._root = root
        self._limits = limits
        self._lease = lease
        self._writer = writer
        self._clock = clock
        self._steps: Iterator[None] | None = None
        self._next = clock()
        self._last: tuple[float, int] | None = None
        """When the last sweep ended, and how many bytes it left."""
        self._busy = 0.0
        """Seconds that the current sweep has taken so far, without what lay between its steps."""
        self._total = 0
        self._oldest: list[Candidate] = []
        self._said = 0
        self.evicted = 0
        """Chunks, in all sweeps."""
        self.stuck = 0
        """Chunks that the last sweep could not delete."""

    def run(self, end: float) -> None:
        """Goes on with the sweep until `end`, where one is due and it is this engine's turn.

        Raises:
            OSError: the directory can't be read.
        """
        if self._steps is None and self._clock() < self._next:
            return
        while self._lease.held(self._writer.beat):
            began = self._clock()
            try:
                done = self._step()
            except OSError:
                self._steps = None
                raise
            self._busy += self._clock() - began
            if done or self._clock() >= end:
                return
        self._steps = None

    def close(self) -> None:
        """Gives the lease back."""
        self._steps = None
        self._lease.release()

    def _step(self) -> bool:
        """Whether the sweep has come to its end with this step."""
        if self._steps is None:
            self._steps = self._sweep()
            self._busy = 0.0
        try:
            next(self._steps)
        except StopIteration:
            self._steps = None
        return self._steps is None

    def _sweep(self) -> Iterator[None]:
        began = self._clock()
        self._next = began + PAUSES[1]
        now = self._writer.beat()
        remove_dead(self._root, now)
        yield from self._look()
        oldest = sorted(self._oldest, reverse=True)
        goal = self._excess()
        freed = 0
        self.stuck = 0
        for number, candidate in enumerate(oldest):
            expired = self._limits.ttl is not None and now + candidate.recency > self._limits.ttl
            if (freed >= goal and not expired) or self.stuck >= STUCK:
                break
            freed += self._evict(candidate)
            if number % SLICE == SLICE - 1:
                yield
        self._say_stuck()
        complete = freed >= goal or not freed or len(oldest) < CANDIDATES
        self._rest(began, freed, complete)

    def _rest(self, began: float, freed: int, complete: bool) -> None:
        """Says when the next sweep is due; at once where this one did not come to its end."""
        now = self._clock()
        least, most = PAUSES
        pause, rest = least, REST * self._busy
        if self._limits.capacity is None:
            pause = most
        elif self._last is None:
            rest = rest if not freed else least
        else:
            grown = (self._total - self._last[1]) / max(began - self._last[0], 1e-3)
            room = self._limits.capacity - (self._total - freed)
            pause = min(max(room / 2 / grown, least), most) if grown > 0 else most
            rest = rest if grown * rest < room else least
        self._last = now, self._total - freed
        self._next = now + (max(pause, rest) if complete else 0.0)

    def _excess(self) -> int:
        """Bytes to be freed."""
        capacity, marks = self._limits.capacity, self._limits.watermarks
        if capacity is None or self._total <= capacity * marks.high:
            return 0
        return self._total - int(capacity * marks.low)

    def _look(self) -> Iterator[None]:
        """Adds up what is there, and remembers the oldest of it."""
        self._total, self._oldest = 0, []
        for home in homes(self._root):
            for epoch in home.epochs():
                for fan in fans(epoch):
                    yield from self._look_at(fan)
                _remove_if_empty(epoch)

    def _look_at(self, fan: Path) -> Iterator[None]:
        number = -1
        for number, (path, info) in enumerate(chunks(fan)):
            self._total += info.st_size
            candidate = Candidate(-info.st_mtime, path, info.st_size)
            if len(self._oldest) < CANDIDATES:
                heapq.heappush(self._oldest, candidate)
            elif candidate > self._oldest[0]:
                heapq.heapreplace(self._oldest, candidate)
            if number % SLICE == SLICE - 1:
                yield
        if number < 0:
            _remove_if_empty(fan)
        yield

    def _evict(self, candidate: Candidate) -> int:
        """Deletes a chunk that has not been used since; returns the bytes that this has freed."""
        path = Path(candidate.path)
        try:
            if path.lstat().st_mtime != -candidate.recency:
                return 0
            path.unlink()
        except OSError as error:
            if error.errno in GONE:
                return candidate.nbytes
            self.stuck += 1
            return 0
        self.evicted += 1
        return candidate.nbytes

    def _say_stuck(self) -> None:
        if self.stuck and self.stuck != self._said:
            log.warning("%s: %d chunks can't be deleted and are left where they are", self._root, self.stuck)
        self._said = self.stuck


def _remove_if_empty(folder: Path) -> None:
    """Who is just about to put a chunk there makes the folder again."""
    with contextlib.suppress(OSError):
        folder.rmdir()
