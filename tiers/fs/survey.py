"""A look at everything in the directory: how much it is, and what was used the longest ago."""

import contextlib
import heapq
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from .fullness import Amount
from .layout import chunks, fans, homes

__all__ = ["Candidate", "Candidates", "Survey"]

CANDIDATES = 65_536
"""Chunks that one look remembers, so that its memory is bounded: about 20 MB."""
SLICE = 64
"""Chunks that are looked at in one step."""
LISTING = 8
"""Chunks that cost as much as listing a folder does."""


class Candidate(NamedTuple):
    """A chunk that may be evicted; the smaller, the less recently used."""

    used: float
    """On the server's clock."""
    path: str
    nbytes: int


LastUse = Callable[[str], float]
"""Path of a chunk -> when this engine has used it last, on the server's clock; 0 where it does not know."""


class Candidates:
    """The least recently used chunks of a look. Thread-safe."""

    def __init__(self, oldest: list[Candidate], horizon: float, last_use: LastUse) -> None:
        """`oldest`: in ascending order; `horizon`: chunks that are not in it were used later than that."""
        self._heap = oldest
        self._horizon = horizon
        self._last_use = last_use
        self._lock = threading.Lock()

    @classmethod
    def none(cls) -> "Candidates":
        return cls([], 0.0, lambda path: 0.0)

    def __len__(self) -> int:
        return len(self._heap)

    def pop(self) -> Candidate | None:
        """The one that was used the longest ago, by what is known now."""
        with self._lock:
            while self._heap:
                candidate = heapq.heappop(self._heap)
                used = self._last_use(candidate.path)
                if used <= candidate.used:
                    return candidate
                self._keep(candidate._replace(used=used))
            return None

    def put_back(self, candidate: Candidate, used: float) -> None:
        """It turns out to have been used later."""
        with self._lock:
            self._keep(candidate._replace(used=used))

    def _keep(self, candidate: Candidate) -> None:
        if candidate.used <= self._horizon:
            heapq.heappush(self._heap, candidate)


class Survey:
    """One pass over all namespaces and epochs. It keeps no list of what is there, only the oldest of it."""

    def __init__(self, root: Path, now: float, last_use: LastUse = lambda path: 0.0, tidy: bool = True) -> None:
        """`now`: on the server's clock; `tidy`: folders that are empty are removed."""
        self._root = root
        self._now = now
        self._last_use = last_use
        self._tidy = tidy
        self._oldest: list[tuple[float, Candidate]] = []
        """A heap, the most recently used one first."""
        self._cost = 0
        """Of the current step, in chunks."""
        self.total = Amount()

    def steps(self) -> Iterator[None]:
        """Looks, a slice at a time.

        Raises:
            OSError: the directory can't be read.
        """
        for home in homes(self._root):
            for epoch in home.epochs():
                for fan in fans(epoch):
                    yield from self._look_at(fan)
                self._remove_if_empty(epoch)

    def _look_at(self, fan: Path) -> Iterator[None]:
        empty = True
        self._cost += LISTING
        for path, info in chunks(fan):
            empty = False
            self.total = self.total.plus(Amount(1, info.st_size))
            self._offer(Candidate(max(info.st_mtime, self._last_use(path)), path, info.st_size))
            self._cost += 1
            if self._cost >= SLICE:
                self._cost = 0
                yield
        if empty:
            self._remove_if_empty(fan)

    def _offer(self, candidate: Candidate) -> None:
        item = (-candidate.used, candidate)
        if len(self._oldest) < CANDIDATES:
            heapq.heappush(self._oldest, item)
        elif item > self._oldest[0]:
            heapq.heapreplace(self._oldest, item)

    def candidates(self) -> Candidates:
        """What this look has found, at its end."""
        full = len(self._oldest) >= CANDIDATES
        horizon = -self._oldest[0][0] if full else self._now
        return Candidates(sorted(candidate for _, candidate in self._oldest), horizon, self._last_use)

    def _remove_if_empty(self, folder: Path) -> None:
        """Who is just about to put a chunk there makes the folder again."""
        if self._tidy:
            with contextlib.suppress(OSError):
                folder.rmdir()
