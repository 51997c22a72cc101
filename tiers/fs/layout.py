"""Where everything lies in a shared directory.

    PATH/.kvcascade/writers/WRITER/        temporaries of one engine; the folder's mtime says that it lives
    PATH/.kvcascade/writers/WRITER/in-STAMP    the epoch that it is in
    PATH/.kvcascade/writers/WRITER/grown   by how much it has made the directory grow
    PATH/.kvcascade/sweeper/total          how full the directory is
    PATH/.kvcascade/sweeper/N              leases of the sweeper; the highest number counts
    PATH/NAMESPACE/namespace.json          what the digest NAMESPACE stands for
    PATH/NAMESPACE/epochs/NAME/N           generations of named epochs; the highest number counts
    PATH/NAMESPACE/epochs/STAMP.json       which epoch a STAMP stands for
    PATH/NAMESPACE/quarantine/             corrupt chunks, a few
    PATH/NAMESPACE/STAMP/FAN/CHUNK         chunks of one epoch: NAMESPACE and STAMP are 32 hexadecimal digits,
                                           CHUNK is the key in hexadecimal, FAN its first two digits

Whatever else lies there is foreign, and never touched. A chunk's file is whole blocks: one of
envelope, then those of the payload.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvcascade.tiers.described import DescribedFolder
from kvcascade.tiers.envelope import HEADER_BYTES, Envelope, Flaw, parse
from kvcascade.tiers.stored import UNKNOWN
from kvcascade.types import Entry, Key, Namespace

__all__ = [
    "BLOCK",
    "GONE",
    "OWN_NAME",
    "Access",
    "Home",
    "chunks",
    "entry",
    "fans",
    "footprint",
    "header",
    "homes",
    "key_of",
    "listed",
    "looks_whole",
    "named_key",
    "place",
    "server_time",
    "sweeper_folder",
    "writers_folder",
]

BLOCK = 4096
"""Bytes of a chunk's header. The largest block that direct I/O asks for anywhere: the engines that share a
directory may be on different machines."""
OWN_NAME = ".kvcascade"
EPOCHS_NAME = "epochs"
QUARANTINE_NAME = "quarantine"
GONE = (errno.ENOENT, errno.ESTALE)
"""What a file system answers where a file is not, or no longer, there."""
LONGEST_KEY = 64
"""Bytes. Names of longer keys are hashes: some file systems take no more than 143 characters."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_FAN = re.compile(r"[0-9a-f]{2}")
_CHUNK = re.compile(r"(?:[0-9a-f]{2}){1,64}|x[0-9a-f]{64}")


def footprint(nbytes: int) -> int:
    """Bytes of the file of a chunk with `nbytes` payload bytes."""
    return BLOCK + -(-nbytes // BLOCK) * BLOCK


def looks_whole(info: os.stat_result) -> bool:
    """Whether a file has the length of a chunk, whichever."""
    return info.st_size > BLOCK and info.st_size % BLOCK == 0


def place(epoch: str, key: Key) -> str:
    """The path of a chunk in the folder of its epoch."""
    if len(key) <= LONGEST_KEY:
        name = key.hex()
        return f"{epoch}/{name[:2]}/{name}"
    digest = hashlib.sha256(key).hexdigest()
    return f"{epoch}/{digest[:2]}/x{digest}"


def named_key(path: str) -> Key | None:
    """The key of a chunk's file as its name says; None for a long one."""
    name = path.rpartition("/")[2]
    return None if name.startswith("x") else bytes.fromhex(name)


def key_of(path: str) -> Key | None:
    """The key of a chunk's file; None where it does not say."""
    key = named_key(path)
    if key is not None:
        return key
    envelope = header(path)
    return None if isinstance(envelope, Flaw) else envelope.key


def writers_folder(root: Path) -> Path:
    return root / OWN_NAME / "writers"


def sweeper_folder(root: Path) -> Path:
    return root / OWN_NAME / "sweeper"


def server_time(folder: Path) -> float:
    """What time it is on the server: it sets the folder's mtime to its own clock.

    Raises:
        OSError: it can't be asked.
    """
    os.utime(folder)
    return folder.stat().st_mtime


class Access(NamedTuple):
    """Who may read and write what is stored."""

    mode: int = 0o600
    group: int | None = None

    @property
    def folder_mode(self) -> int:
        """As for files, with x where there is r; new files take over the group of their folder."""
        return self.mode | (self.mode & 0o444) >> 2 | (0o2000 if self.group is not None else 0)

    def make_folder(self, path: Path) -> None:
        """Makes the folder, and those above it, where they are missing.

        Raises:
            OSError: it can't be made like this.
        """
        try:
            path.mkdir(0o700)
        except FileExistsError:
            return
        except FileNotFoundError:
            self.make_folder(path.parent)
            self.make_folder(path)
            return
        if self.group is not None:
            os.chown(path, -1, self.group)
        if self.folder_mode != 0o700:
            path.chmod(self.folder_mode)

    def create(self, path: Path | str, flags: int = 0) -> int:
        """A file descriptor for writing a file that was not there before.

        Raises:
            OSError: it can't be made, or is there.
        """
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, self.mode)
        if self.mode != 0o600:
            os.fchmod(fd, self.mode)  # whatever the umask
        return fd


class Home(DescribedFolder):
    """The folder of one namespace. Where its description is damaged nobody knows whose it is."""

    @property
    def namespace(self) -> Namespace:
        return UNKNOWN if self.damaged else super().namespace

    @property
    def marks(self) -> Path:
        return self.path / EPOCHS_NAME

    @property
    def quarantine(self) -> Path:
        return self.path / QUARANTINE_NAME

    def epochs(self) -> list[Path]:
        """The folders of all epochs, those that are over, too."""
        return [self.path / name for name in _names(self.path) if _DIGEST.fullmatch(name)]


def homes(root: Path) -> list[Home]:
    """The namespaces in the directory, which need not exist; also those whose description is damaged."""
    found = [Home(root / name) for name in sorted(_names(root)) if _DIGEST.fullmatch(name)]
    return [home for home in found if home.described or home.damaged]


def fans(epoch: Path) -> list[Path]:
    """The folders of an epoch in which chunks lie."""
    return [epoch / name for name in sorted(_names(epoch)) if _FAN.fullmatch(name)]


def chunks(fan: Path, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, os.stat_result]]:
    """Path and facts of each chunk in a folder whose file's name is `wanted`; what goes meanwhile is left out."""
    try:
        with os.scandir(fan) as listed:
            found = [one for one in listed if _CHUNK.fullmatch(one.name) and wanted(one.name)]
    except OSError as error:
        if error.errno in GONE:
            return
        raise
    for one in found:
        try:
            info = one.stat(follow_symlinks=False)
        except OSError as error:
            if error.errno in GONE:
                continue
            raise
        if stat.S_ISREG(info.st_mode):
            yield one.path, info


def entry(path: str, info: os.stat_result, stamp: bytes) -> Entry | None:
    """What a chunk's file says of itself; None where it is no chunk of `stamp`, or can't be read."""
    envelope = header(path)
    if isinstance(envelope, Flaw) or envelope.stamp != stamp or footprint(envelope.nbytes) != info.st_size:
        return None
    if not path.endswith(place("", envelope.key)):
        return None
    return Entry(envelope.key, envelope.nbytes, envelope.written, info.st_mtime)


def header(path: str) -> Envelope | Flaw:
    """What a chunk's file says of itself, or what is wrong with that."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return Flaw.NO_ENVELOPE
    try:
        return parse(os.read(fd, HEADER_BYTES))
    except OSError:
        return Flaw.NO_ENVELOPE
    finally:
        os.close(fd)


def listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing where there is none.

    Raises:
        OSError: it can't be listed.
    """
    return [folder / name for name in _names(folder)]


def _names(folder: Path) -> Sequence[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - only names are wanted
    except OSError as error:
        if error.errno in (*GONE, errno.ENOTDIR):
            return []
        raise
