"""Which chunks were used, by this engine, and when their files were last told so."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

from kvcascade.types import Key

from .layout import GONE

__all__ = ["Recency"]

DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
EVERY = 3600.0
"""Seconds: a file's mtime is set by a hit only when it is older than that."""
REMEMBERED = 65_536
"""Keys, at most, that wait to be told, and that are known to be fresh."""
USES = 1 << 18
"""Keys, at most, of which the last use is known to more than the hour: 262,144, in about 50 MB."""
TICK = 1e-6
"""Seconds between two uses of the same moment, so that their order is kept."""


class Recency:
    """Hits, on their way to the files' mtimes. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._used: dict[Key, None] = {}
        self._fresh: dict[Key, float] = {}
        """Key -> when its file was last known to be fresh, oldest first."""
        self._uses: dict[Key, float] = {}
        """Key -> its last use, the least recent first."""
        self._latest = 0.0

    def last_use(self, key: Key) -> float:
        """When it was used last, in the clock's time; 0 where that is not known."""
        return self._uses.get(key, 0.0)

    def note(self, key: Key) -> None:
        """The chunk was used."""
        with self._lock:
            self._use(key)
            if self._clock() - self._fresh.get(key, -EVERY) >= EVERY:
                self._used[key] = None
                if len(self._used) > REMEMBERED:
                    del self._used[next(iter(self._used))]

    def written(self, key: Key) -> None:
        """The chunk's file was just written."""
        with self._lock:
            self._use(key)
            self._used.pop(key, None)
            self._remember(key)

    def gone(self, key: Key) -> None:
        """The chunk was removed."""
        with self._lock:
            self._uses.pop(key, None)

    def persist(self, path_of: Callable[[Key], str], server_now: Callable[[], float], end: float) -> None:
        """Sets the mtimes of files that were used, as far as they are old, until `end`.

        Raises:
            OSError: the server can't be asked.
        """
        now = None
        while self._used and (now is None or self._clock() < end):
            if now is None:
                now = server_now()
            with self._lock:
                key = next(iter(self._used))
                del self._used[key]
                self._remember(key)
            _refresh(Path(path_of(key)), now - EVERY)

    def forget(self) -> None:
        """Nothing of what was used is there any more."""
        with self._lock:
            self._used.clear()
            self._fresh.clear()
            self._uses.clear()

    def _use(self, key: Key) -> None:
        self._latest = max(self._latest + TICK, self._clock())
        self._uses.pop(key, None)
        self._uses[key] = self._latest
        if len(self._uses) > USES:
            del self._uses[next(iter(self._uses))]

    def _remember(self, key: Key) -> None:
        self._fresh.pop(key, None)
        self._fresh[key] = self._clock()
        if len(self._fresh) > REMEMBERED:
            del self._fresh[next(iter(self._fresh))]


def _refresh(path: Path, before: float) -> None:
    try:
        if path.lstat().st_mtime < before:
            os.utime(path)
    except OSError as error:
        if error.errno not in (*GONE, *DENIED):
            raise
