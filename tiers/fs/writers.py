"""Who writes into a shared directory: one folder for each engine, which holds its temporaries.

A temporary that its writer has left behind is removed, but never one of a writer that lives: on this host a
process is asked for, by its number and the time at which it was started; one on another host counts as living
until its folder has not been touched for an hour, on the server's clock.
"""

import contextlib
import hashlib
import itertools
import os
import re
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvcascade.tiers.boot import boot_id

from .layout import GONE, Access, listed, server_time, writers_folder

__all__ = ["Identity", "Writer", "dead", "epoch_of", "living", "remove", "remove_dead"]

STALE = 3600.0
"""Seconds without a sign of life after which a writer on another host counts as dead."""
SILENT = 180.0
"""Seconds without one after which it does not keep others from using the directory any more."""

IN = "in-"
"""Begins the name of the file that says in which epoch a writer is."""

_SEPARATOR = "~"


class Identity(NamedTuple):
    """Names one opening of a tier, everywhere and for good; a folder's name."""

    host: str
    """For people."""
    machine: str
    """Stands for the boot of a machine and the set of processes that can be seen there (a container has its
    own)."""
    pid: int
    started: int
    """When the process was started, in the machine's ticks; 0 where that can't be told."""
    namespace: str
    """The first digits of the namespace's digest."""
    exclusive: bool
    token: str

    @classmethod
    def new(cls, namespace: str, exclusive: bool) -> "Identity":
        pid = os.getpid()
        host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:40]
        token = secrets.token_hex(4)
        return cls(host, _machine(), pid, _started(pid), namespace[:12], exclusive, token)

    @classmethod
    def parse(cls, name: str) -> "Identity | None":
        try:
            host, machine, pid, started, namespace, use, token = name.split(_SEPARATOR)
            found = cls(host, machine, int(pid), int(started), namespace, use == "exclusive", token)
        except ValueError:
            return None
        return found if str(found) == name and 0 < found.pid < 1 << 31 else None

    def __str__(self) -> str:
        use = "exclusive" if self.exclusive else "shared"
        parts = (self.host, self.machine, self.pid, self.started, self.namespace, use, self.token)
        return _SEPARATOR.join(map(str, parts))

    @property
    def in_words(self) -> str:
        return f"process {self.pid} on {self.host}"

    @property
    def lives(self) -> bool | None:
        """Whether its process runs; None where that can't be told from here."""
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it is another user's
        return _started(self.pid) in (self.started, 0)


def _machine() -> str:
    """The same text in two processes only if each can ask for the other by its number."""
    try:
        processes = str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        processes = ""
    seen = "\0".join((boot_id(), processes, socket.gethostname()))
    return hashlib.sha256(seen.encode()).hexdigest()[:12]


def _started(pid: int) -> int:
    """0 where that can't be told, -1 for a process that has ended and is not reaped yet."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return -1 if state in (b"Z", b"X") else int(fields[18])
    except (OSError, IndexError, ValueError):
        return 0


class Writer:
    """This engine among the writers."""

    def __init__(self, root: Path, identity: Identity, access: Access) -> None:
        self.identity = identity
        self.folder = writers_folder(root) / str(identity)
        self._access = access
        self._attempts = itertools.count()
        self._stamp = ""

    def enter(self) -> None:
        """Makes the folder.

        Raises:
            OSError: it can't be made.
        """
        self._access.make_folder(self.folder)
        self._note()

    def be_in(self, stamp: str) -> None:
        """Says in which epoch this engine is; "": in any. Where that can't be written, it is in any as well."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{IN}*"):
                path.unlink(missing_ok=True)
        self._stamp = stamp
        self._note()

    def _note(self) -> None:
        if self._stamp:
            with contextlib.suppress(OSError):
                os.close(self._access.create(self.folder / f"{IN}{self._stamp}"))

    def temporary(self) -> str:
        """A path that nobody has used or will use."""
        return f"{self.folder}/{threading.get_ident()}-{next(self._attempts)}"

    def beat(self) -> float:
        """Shows that this engine lives. Returns the server's time.

        Raises:
            OSError: the server can't be reached.
        """
        try:
            return server_time(self.folder)
        except OSError as error:
            if error.errno not in GONE:
                raise
        self.enter()  # it was taken for dead, and lives
        return server_time(self.folder)

    def leave(self) -> None:
        """Removes the folder with what is in it. A medium that fails here has no say: others will do it."""
        with contextlib.suppress(OSError):
            remove([*listed(self.folder), self.folder])


def living(root: Path, now: float, stale: float = STALE) -> Iterator[Identity]:
    """The writers that live, `now` on the server's clock: on other hosts, all that showed it in `stale` seconds.

    Raises:
        OSError: the directory can't be read.
    """
    for identity, _, touched in _writers(root):
        if _lives(identity, now - touched <= stale):
            yield identity


def dead(root: Path, now: float) -> Iterator[tuple[Identity, list[Path]]]:
    """The writers that don't, and what they have left: temporaries, then the folder itself.

    Raises:
        OSError: the directory can't be read.
    """
    for identity, folder, touched in _writers(root):
        if not _lives(identity, now - touched <= STALE):
            yield identity, [*listed(folder), folder]


def epoch_of(root: Path, identity: Identity) -> str:
    """The stamp of the epoch that a writer is in; "" where it does not say.

    Raises:
        OSError: the directory can't be read.
    """
    said = [
        path.name.removeprefix(IN)
        for path in listed(writers_folder(root) / str(identity))
        if path.name.startswith(IN)
    ]
    return said[0] if len(said) == 1 else ""


def remove_dead(root: Path, now: float) -> int:
    """Removes what dead writers have left; returns how many they were. What can't be removed stays.

    Raises:
        OSError: the directory can't be read.
    """
    count = 0
    for _, left in dead(root, now):
        with contextlib.suppress(OSError):
            remove(left)
            count += 1
    return count


def remove(left: Sequence[Path]) -> None:
    """Removes what a dead writer has left.

    Raises:
        OSError: it can't be removed.
    """
    for path in left[:-1]:
        path.unlink(missing_ok=True)
    left[-1].rmdir()


def _lives(identity: Identity, seems_so: bool) -> bool:
    known = identity.lives
    return seems_so if known is None else known


def _writers(root: Path) -> Iterator[tuple[Identity, Path, float]]:
    for folder in listed(writers_folder(root)):
        identity = Identity.parse(folder.name)
        if identity is None:
            continue
        try:
            touched = folder.stat().st_mtime
        except OSError:
            continue  # it has just gone
        yield identity, folder, touched
