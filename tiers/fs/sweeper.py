"""Holds a soft capacity: one engine at a time evicts what was least recently used, at the pace of stores."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from kvcascade.configs.schema import Watermarks

from .fullness import Amount, Fullness
from .layout import GONE
from .lease import Lease
from .survey import SLICE, Candidate, Candidates, LastUse, Survey
from .writers import Writer, remove_dead

__all__ = ["Limits", "Sweeper"]

log = logging.getLogger("kvcascade.tiers.fs")

EVERY = 30.0
"""Seconds between two looks at the directory, at least where there is enough left to evict."""
REST = 4.0
"""That pause is so many times as long as the look took, at least: a large directory is not looked at all the
time."""
TELL_EVERY = 1.0
"""Seconds between two exchanges with the other engines, at least."""
TELL_REST = 10.0
"""That pause is so many times as long as an exchange takes, at least."""
PACE = (2.0, 8.0)
"""Bytes that are evicted with each byte that is stored: just above the high mark, and at the capacity."""
URGENT = 16
"""Slices of a look that one store waits for, at most, where there is nothing left to evict."""
STUCK = 1_000
"""Chunks that can't be deleted, after which nothing is until the next look."""


class Limits(NamedTuple):
    """What is enforced."""

    capacity: int | None
    watermarks: Watermarks
    ttl: float | None

    @property
    def high(self) -> float:
        return self.capacity * self.watermarks.high if self.capacity is not None else float("inf")

    @property
    def low(self) -> float:
        return self.capacity * self.watermarks.low if self.capacity is not None else float("inf")


class Sweeper:
    """Knows how full the directory is, and evicts while it holds the lease.

    A look at everything, in slices, finds what was used the longest ago. Above the high mark each store evicts
    some of it first, and `run` does so between other work, until the low mark is reached; when most of what a look
    has found is used up comes the next one. What is used, or written anew, after the look has met it stays.

    `make_room` is thread-safe, all else is for one thread at a time. `_turn` covers looks and the exchange with
    other engines; evictions go on beside them.
    """

    def __init__(
        self,
        root: Path,
        limits: Limits,
        lease: Lease,
        writer: Writer,
        fullness: Fullness,
        clock: Callable[[], float],
        last_use: Callable[[str], float],
        on_evicted: Callable[[Candidate], None],
    ) -> None:
        """`last_use`: of the chunk in a file, by this engine, in the clock's time; 0 where it does not know."""
        self._root = root
        self._limits = limits
        self._lease = lease
        self._writer = writer
        self._fullness = fullness
        self._clock = clock
        self._last_use = last_use
        self._on_evicted = on_evicted
        self._turn = threading.Lock()
        self._leads = False
        """Whether it holds the lease."""
        self._exchange_at = clock()
        self._look: Iterator[None] | None = None
        self._look_at = clock()
        self._busy = 0.0
        """Seconds that the current look has taken so far, without what lay between its steps."""
        self._candidates = Candidates.none()
        self._found = 0
        """How many there were at first."""
        self._seen: tuple[int, Amount | None] = 0, None
        """What was evicted, and there, when that look ended."""
        self._evicting = False
        self._expired_before = 0.0
        self._said = 0
        self.evicted = 0
        """Chunks, in all."""
        self.stuck = 0
        """Chunks that could not be deleted since the last look."""

    # Between other work

    def run(self, end: float) -> None:
        """Does what is due until `end`.

        Raises:
            OSError: the directory can't be read or written.
        """
        with self._turn:
            self._exchange()
            looked = False
            while self._leads:
                if not looked and self._look_is_due():
                    self._go_on_looking()
                    looked = self._look is None
                elif not self._evict(0, SLICE):
                    return
                if self._clock() >= end:
                    return

    def close(self) -> None:
        """Tells the others the latest, and gives the lease back."""
        with self._turn:
            if self._leads:
                self._fullness.publish()
            self._stop()
            self._lease.release()

    # With each store

    def make_room(self, nbytes: int) -> None:
        """A chunk's file of so many bytes is about to be written. A medium that fails here has no say: `run`
        tells of it."""
        with contextlib.suppress(OSError):
            if self._turn.acquire(blocking=False):
                try:
                    self._exchange()
                    if self._leads:
                        self._look_for_stores(nbytes)
                finally:
                    self._turn.release()
            if self._leads:
                self._evict(nbytes)

    def _look_for_stores(self, nbytes: int) -> None:
        """Looks where stores can't wait for `run` to do it: further where there is nothing to evict meanwhile."""
        for _ in range(URGENT if not self._candidates else 1):
            if not (self._fullness.estimate is None or self._must_evict(nbytes)) or not self._look_is_due():
                return
            self._go_on_looking()

    # Among the others

    def _exchange(self) -> None:
        """Every second or so: whose turn it is to sweep, and how full the directory is."""
        began = self._clock()
        if began < self._exchange_at:
            return
        self._exchange_at = began + TELL_EVERY
        led, self._leads = self._leads, self._lease.held(self._writer.beat)
        if self._limits.capacity is not None:
            self._fullness.tell()
            if not (led and self._leads):
                self._fullness.read()
            if self._leads:
                self._fullness.gather()
                self._fullness.publish()
        if led and not self._leads:
            self._stop()
        now = self._clock()
        self._exchange_at = now + max(TELL_EVERY, TELL_REST * (now - began))

    def _stop(self) -> None:
        self._leads = False
        self._look = None
        self._look_at = self._clock()
        self._candidates = Candidates.none()

    # Looking

    def _look_is_due(self) -> bool:
        """Whether to begin one, or to go on with it: when its time has come, or when most of what the last one
        has found is used up, more must go, and something has changed since."""
        if self._look is not None or self._clock() >= self._look_at:
            return True
        few = len(self._candidates) <= self._found // 4 and self.stuck < STUCK
        return few and self._must_evict(0) and self._seen != (self.evicted, self._fullness.estimate)

    def _go_on_looking(self) -> None:
        began = self._clock()
        if self._look is None:
            self._look, self._busy = self._whole_look(), 0.0
        try:
            next(self._look)
        except StopIteration:
            self._look = None
            self._look_at = self._clock() + max(EVERY, REST * (self._busy + self._clock() - began))
        except OSError:
            self._look = None
            self._look_at = began + EVERY
            raise
        self._busy += self._clock() - began

    def _whole_look(self) -> Iterator[None]:
        now = self._writer.beat()
        remove_dead(self._root, now)
        began = self._fullness.growths()
        survey = Survey(self._root, now, self._on_server(now - self._clock()))
        yield from survey.steps()
        self._say_stuck()
        self._fullness.count(survey.total, began)
        self._candidates = survey.candidates()
        self._found = len(self._candidates)
        self._seen = self.evicted, self._fullness.estimate
        self._expired_before = now - self._limits.ttl if self._limits.ttl is not None else 0.0
        if self._limits.capacity is not None:
            self._fullness.publish()

    def _on_server(self, ahead: float) -> LastUse:
        """`last_use` in the time of a server whose clock is `ahead` of ours by so much."""

        def last_use(path: str) -> float:
            used = self._last_use(path)
            return used + ahead if used else 0.0

        return last_use

    # Evicting

    def _must_evict(self, nbytes: int) -> bool:
        """Whether chunks must go before so many bytes are written: from above the high mark down to the low."""
        total = self._fullness.estimate
        if total is None:
            return False
        if total.bytes + nbytes > self._limits.high:
            self._evicting = True
        elif total.bytes <= self._limits.low:
            self._evicting = False
        return self._evicting

    def _evict(self, nbytes: int, chunks: int = 0) -> int:
        """Evicts what is oldest as long as that must be: for so many bytes that are stored, or so many chunks.
        Returns how many have gone."""
        count = 0
        goal = self._pace(nbytes) * nbytes
        while (goal > 0 or count < chunks) and self.stuck < STUCK:
            candidate = self._candidates.pop()
            if candidate is None:
                break
            if not self._must_evict(nbytes) and candidate.used >= self._expired_before:
                self._candidates.put_back(candidate, candidate.used)
                break
            if self._delete(candidate):
                goal -= candidate.nbytes
                count += 1
        return count

    def _pace(self, nbytes: int) -> float:
        """How many bytes are evicted with each that is stored."""
        total, capacity = self._fullness.estimate, self._limits.capacity
        if total is None or capacity is None or not self._must_evict(nbytes):
            return 0.0
        least, most = PACE
        above = (total.bytes - self._limits.high) / max(capacity - self._limits.high, 1.0)
        return min(max(least + (most - least) * above, least), most)

    def _delete(self, candidate: Candidate) -> bool:
        """Deletes a chunk that has not been used since; whether that has made room."""
        try:
            used = os.lstat(candidate.path).st_mtime
            if used > candidate.used:
                self._candidates.put_back(candidate, used)
                return False
            os.unlink(candidate.path)  # noqa: PTH108 - a string: there are thousands
        except OSError as error:
            self.stuck += error.errno not in GONE
            return False
        self.evicted += 1
        self._on_evicted(candidate)
        return True

    def _say_stuck(self) -> None:
        if self.stuck and self.stuck != self._said:
            log.warning("%s: %d chunks can't be deleted and are left where they are", self._root, self.stuck)
            self._said = self.stuck
        self.stuck = 0
