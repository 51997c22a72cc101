"""Who may sweep: one engine at a time."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from .layout import GONE, Access
from .writers import Identity

__all__ = ["Lease"]

EXPIRES = 60.0
"""Seconds without renewal after which a lease is free, on the server's clock."""
RENEW_EVERY = 10.0
"""Seconds between two looks at it."""


class Lease:
    """A lease in a folder of numbered files, of which the highest counts: its text names the holder, its mtime is
    the last renewal. It is free when it has expired, or when its holder was a process of this host that has ended.

    The next number is created exclusively, so that of several engines that find the lease free one gets it. Should
    a holder that was stopped for long go on, it finds a higher number, or its own gone. Not thread-safe.
    """

    def __init__(self, folder: Path, owner: Identity, access: Access, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._owner = owner
        self._access = access
        self._clock = clock
        self._number = 0
        self._looked = clock() - RENEW_EVERY

    def held(self, server_now: Callable[[], float]) -> bool:
        """Whether this engine has the lease now; takes it if it is free. Asks the server every few seconds only.

        Raises:
            OSError: the server can't be asked.
        """
        now = self._clock()
        if now - self._looked < RENEW_EVERY:
            return self._number > 0
        self._looked = now
        if self._number:
            self._renew()
        if not self._number:
            self._take(server_now())
        return self._number > 0

    def is_free(self, now: float) -> bool:
        """Whether it could be taken, `now` on the server's clock.

        Raises:
            OSError: the server can't be asked.
        """
        last = max(self._numbers(), default=0)
        return not last or self._free(last, now)

    def release(self) -> None:
        """Gives it back. A medium that fails here has no say: it expires."""
        if self._number:
            with contextlib.suppress(OSError):
                os.utime(self._path(self._number), (0, 0))
            self._number = 0

    def _renew(self) -> None:
        try:
            os.utime(self._path(self._number))
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._number = 0
        if self._number != max(self._numbers(), default=0):
            self._number = 0

    def _take(self, now: float) -> None:
        if not self.is_free(now):
            return
        last = max(self._numbers(), default=0)
        self._access.make_folder(self._folder)
        try:
            fd = self._access.create(self._path(last + 1))
        except FileExistsError:
            return  # another engine was faster
        try:
            os.write(fd, str(self._owner).encode())
        finally:
            os.close(fd)
        if max(self._numbers(), default=0) != last + 1:
            self._path(last + 1).unlink(missing_ok=True)  # the list was old; others are further
            return
        self._number = last + 1
        for number in self._numbers():
            if number <= last:
                self._path(number).unlink(missing_ok=True)

    def _free(self, number: int, now: float) -> bool:
        try:
            owner = Identity.parse(self._path(number).read_text())
            renewed = self._path(number).stat().st_mtime
        except OSError as error:
            if error.errno not in GONE:
                raise
            return False  # it is just changing hands
        return now - renewed > EXPIRES or (owner is not None and owner.lives is False)

    def _path(self, number: int) -> Path:
        return self._folder / str(number)

    def _numbers(self) -> list[int]:
        try:
            return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]
        except OSError as error:
            if error.errno in GONE:
                return []
            raise
