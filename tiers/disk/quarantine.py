"""Corrupt chunks, kept for inspection in a folder of bounded size."""

import contextlib
import os
import threading
from pathlib import Path

from kvcascade.types import Buffer

__all__ = ["Quarantine"]


class Quarantine:
    """At most `limit` bytes of corrupt chunks, the latest ones; none where it is 0. Thread-safe."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()

    def keep(self, name: str, header: Buffer, payload: Buffer) -> None:
        """Keeps what was read in the file `name`.chunk. A medium that fails here has no say."""
        nbytes = len(header) + len(payload)
        if nbytes > self._limit:
            return
        with self._lock, contextlib.suppress(OSError):
            self.trim(nbytes)
            self._folder.mkdir(0o700, exist_ok=True)
            fd = os.open(
                self._folder / f"{name}.chunk", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
            )
            with os.fdopen(fd, "wb") as file:
                file.write(header)
                file.write(payload)

    def trim(self, coming: int = 0) -> None:
        """Removes the oldest until `coming` bytes fit in.

        Raises:
            OSError: the medium failed.
        """
        if not self._folder.is_dir():
            return
        kept = sorted(self._folder.glob("*.chunk"), key=lambda path: path.stat().st_mtime)
        total = sum(path.stat().st_size for path in kept) + coming
        for path in kept:
            if total <= self._limit:
                break
            total -= path.stat().st_size
            path.unlink()
