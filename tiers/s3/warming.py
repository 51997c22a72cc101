"""What is in the bucket at start, told in parts."""

import threading
import time
from collections.abc import Iterator

from kvcascade.errors import TierError
from kvcascade.types import Entry

__all__ = ["Warming"]

MOST = 1 << 18
"""Chunks that are told: as many as the manager keeps answers for."""


class Warming:
    """Takes in a list part by part, between other work, up to `MOST` chunks of it.

    Notes:
        `_lock` covers the list, one thread takes from it at a time; others leave empty-handed.
    """

    def __init__(self, pages: Iterator[list[Entry]]) -> None:
        self._pages = pages
        self._lock = threading.Lock()
        self._left = MOST

    def take(self, seconds: float) -> tuple[Entry, ...]:
        """What comes next: a part at least, more of them within this time.

        Raises:
            TierError: the medium failed. The list ends here: what it lacks is found out by asking.
        """
        if not self._left or not self._lock.acquire(blocking=False):
            return ()
        try:
            return tuple(self._take(time.monotonic() + seconds))
        finally:
            self._lock.release()

    def _take(self, end: float) -> list[Entry]:
        found: list[Entry] = []
        while self._left:
            try:
                page = next(self._pages, None)
            except TierError:
                self._left = 0
                raise
            if page is None:
                self._left = 0
                break
            found += page
            self._left = max(0, self._left - len(page))
            if time.monotonic() >= end:
                break
        return found
