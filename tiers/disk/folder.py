"""The folders on the disk: one for each engine, locked, and in it one for each namespace."""

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import time
from pathlib import Path
from urllib.parse import quote

from kvcascade.errors import ConfigError
from kvcascade.tiers.described import NAMESPACE_NAME, DescribedFolder
from kvcascade.tiers.envelope import FORMAT
from kvcascade.tiers.files import TEMPORARY, disk_bytes, read_json, sync_folder, write_durably
from kvcascade.types import Namespace

from .index import INDEX_NAME, LOCK_NAME
from .marks import EPOCH_NAME, SESSION_NAME
from .slabs import EXTENT_NAME

__all__ = [
    "EngineFolder",
    "NamespaceFolder",
    "Others",
    "engine_folders",
    "engine_name",
    "holder",
    "namespace_folders",
]

ENGINE_LOCK = "lock"
QUARANTINE_NAME = "quarantine"
QUARANTINED_NAME = re.compile(r"[0-9a-f]+\.chunk")
COMPACTED_NAME = INDEX_NAME + ".compact"
_ENGINE = re.compile(r"engine-.+")
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_OWN_NAMES = {EPOCH_NAME, SESSION_NAME, INDEX_NAME, LOCK_NAME, COMPACTED_NAME}
ENGINES = 4096
LOCK_TRIES = 5
LOCK_PAUSE = 0.02
"""Seconds. `kvcascade check` looks whether a folder is locked by locking it itself, for a moment."""


def engine_folders(path: Path) -> list[Path]:
    """The folders of engines in `path`, which need not exist."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(f for f in path.iterdir() if _ENGINE.fullmatch(f.name) and (f / ENGINE_LOCK).is_file())
    return []


def engine_name(engine_id: str) -> str:
    """The name of an engine's folder."""
    return f"engine-{quote(engine_id, safe='')}"


def namespace_folders(engine: Path) -> list["NamespaceFolder"]:
    """The namespaces in an engine's folder; what is not ours is left out."""
    with contextlib.suppress(FileNotFoundError):
        folders = [NamespaceFolder(f) for f in sorted(engine.iterdir()) if _NAMESPACE.fullmatch(f.name)]
        return [folder for folder in folders if folder.described]
    return []


def holder(engine: Path) -> str:
    """Which process has the engine's folder now, in words; "" for none. Changes nothing."""
    try:
        fd = os.open(engine / ENGINE_LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return _owner(engine)
    finally:
        os.close(fd)
    return ""


def _owner(engine: Path) -> str:
    owner = read_json(engine / ENGINE_LOCK) or {}
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


class EngineFolder:
    """The folder of one engine, locked as long as this lives. A lock goes with its process, however that ends."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._pid = os.getpid()

    @classmethod
    def take(cls, path: Path, engine_id: str, place: int = 0) -> "EngineFolder":
        """Locks the folder of `engine_id` in `path`, or for "" that of `place`, or else the first that is free;
        makes what is missing.

        Raises:
            ConfigError: another process has it.
            OSError: it can't be made or locked.
        """
        make_folders(path)
        if engine_id:
            folder = path / engine_name(engine_id)
            if taken := cls.lock(folder, create=True):
                return taken
            raise ConfigError(
                f"path: the folder {folder} is in use by {_owner(folder)}; "
                f"give each engine an id of its own, or end that one"
            )
        for number in (place, *(other for other in range(ENGINES) if other != place)):
            if taken := cls.lock(path / f"engine-{number}", create=True):
                return taken
        raise ConfigError(f"path: all {ENGINES} folders of engines in {path} are in use")

    @classmethod
    def lock(cls, folder: Path, create: bool = False) -> "EngineFolder | None":
        """Locks the folder; None where another process has it."""
        for attempt in range(LOCK_TRIES):
            time.sleep(LOCK_PAUSE if attempt else 0)
            if create:
                folder.mkdir(0o700, exist_ok=True)
            fd = os.open(folder / ENGINE_LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            if cls._locked(fd, folder / ENGINE_LOCK):
                owner = {"pid": os.getpid(), "host": socket.gethostname()}
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps(owner).encode(), 0)
                return cls(folder, fd)
            os.close(fd)
        return None

    @staticmethod
    def _locked(fd: int, path: Path) -> bool:
        """Whether `fd` is locked now, and still the file of that name (a `clear` may have removed it)."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(fd), path.stat())
        except (BlockingIOError, FileNotFoundError):
            return False

    def remove_if_empty(self) -> bool:
        """Removes the folder where nothing but the lock is in it."""
        if any(entry.name != ENGINE_LOCK for entry in self.path.iterdir()):
            return False
        (self.path / ENGINE_LOCK).unlink()
        self.path.rmdir()
        return True

    def close(self) -> None:
        """Gives the lock back. In a fork nothing happens: the lock is the parent's."""
        if self._fd >= 0 and os.getpid() == self._pid:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


class NamespaceFolder(DescribedFolder):
    """The folder of one namespace of one engine."""

    @property
    def block(self) -> int:
        """Bytes of the blocks that everything in here is aligned to; 0 where that is not known."""
        block = self.description.get("block")
        return block if isinstance(block, int) else 0

    @property
    def index(self) -> Path:
        return self.path / INDEX_NAME

    @property
    def quarantine(self) -> Path:
        return self.path / QUARANTINE_NAME

    @classmethod
    def of(cls, engine: Path, namespace: Namespace) -> "NamespaceFolder":
        return cls(engine / namespace.digest.hex())

    def check_format(self) -> None:
        """
        Raises:
            ConfigError: a newer version wrote this.
        """
        if self.format > FORMAT:
            raise ConfigError(
                f"path: {self.path} was written in format {self.format}, by a newer version; this one knows "
                f"{FORMAT}. It is left untouched: use another `path`, or the newer version"
            )

    def prepare(self, namespace: Namespace, block: int) -> None:
        """Makes the folder and its description, and removes what an ended process left half done."""
        self.path.mkdir(0o700, exist_ok=True)
        for path in self.half_done():
            path.unlink()
        wanted = {"format": FORMAT, "block": block, "fields": dict(namespace.fields)}
        if self.description != wanted:
            write_durably(self.path / NAMESPACE_NAME, wanted)
            sync_folder(self.path.parent)
            self.description = wanted

    def half_done(self) -> list[Path]:
        """Files that a process which has ended was about to finish."""
        return [path for path in self.own_files() if path.name.endswith(TEMPORARY) or path.name == COMPACTED_NAME]

    def own_files(self) -> list[Path]:
        """All that is ours in here, the description last."""
        files = [path for path in self.path.iterdir() if _is_ours(path.name.removesuffix(TEMPORARY))]
        if self.quarantine.is_dir():
            files += [path for path in self.quarantine.iterdir() if QUARANTINED_NAME.fullmatch(path.name)]
        return sorted(files, key=lambda path: (path.name == NAMESPACE_NAME, path.name != INDEX_NAME, path.name))

    @property
    def nbytes(self) -> int:
        return sum(map(disk_bytes, self.own_files()))

    @property
    def last_used(self) -> float:
        """Unix time at which an engine last wrote here."""
        times = [0.0]
        for name in (SESSION_NAME, INDEX_NAME):
            with contextlib.suppress(FileNotFoundError):
                times.append((self.path / name).stat().st_mtime)
        return max(times)

    def empty(self) -> None:
        """Removes all that is ours but the description."""
        for path in self.own_files():
            if path.name != NAMESPACE_NAME:
                path.unlink(missing_ok=True)

    def remove(self) -> bool:
        """Removes all that is ours; False where foreign files keep the folder."""
        for path in self.own_files():
            path.unlink(missing_ok=True)
        for folder in (self.quarantine, self.path):
            with contextlib.suppress(OSError):
                folder.rmdir()
        return not self.path.exists()


def _is_ours(name: str) -> bool:
    return name == NAMESPACE_NAME or name in _OWN_NAMES or bool(EXTENT_NAME.fullmatch(name))


class Others:
    """The other namespaces in an engine's folder: they go first when room is needed, the least recently used
    one before the others."""

    def __init__(self, engine: Path, current: NamespaceFolder) -> None:
        others = [folder for folder in namespace_folders(engine) if folder.path != current.path]
        known = [folder for folder in others if folder.format <= FORMAT]
        self._folders = sorted(known, key=lambda folder: folder.last_used, reverse=True)
        self._sizes = [folder.nbytes for folder in self._folders]
        self._fixed = sum(folder.nbytes for folder in others if folder not in known)

    @property
    def nbytes(self) -> int:
        return sum(self._sizes) + self._fixed

    def drop_oldest(self) -> bool:
        """Removes the least recently used one; False where none is left."""
        if not self._folders:
            return False
        self._folders.pop().remove()
        self._sizes.pop()
        return True


def make_folders(path: Path) -> None:
    """Makes `path`, with all that is missing above it, for this user alone."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(0o700, exist_ok=True)
