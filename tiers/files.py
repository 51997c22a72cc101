"""Small files that must survive a power cut, what a folder takes on the disk, and errors of file systems."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvcascade.errors import ConfigError, TierUnavailable

__all__ = [
    "TEMPORARY",
    "disk_bytes",
    "free_bytes",
    "mapped",
    "nearest_existing",
    "read_json",
    "sync_folder",
    "write_durably",
]

TEMPORARY = ".tmp"


def write_durably(path: Path, content: dict[str, Any]) -> None:
    """Replaces the file, so that after a power cut it is there with the old or with the new content, whole.

    Raises:
        OSError: it can't be made durable.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(content, indent=1, ensure_ascii=False).encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(path)
    sync_folder(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """The content; None where there is no such file, or nothing in it that makes sense."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def sync_folder(folder: Path) -> None:
    """Makes the names in the folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def disk_bytes(path: Path) -> int:
    """What a file takes on the disk; 0 where it is gone."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[None]:
    """Turns errors of the file system into ours.

    Raises:
        ConfigError: it will fail again like this.
        TierUnavailable: it may work later.
    """
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError) as error:
        why = "is not a folder" if isinstance(error, FileExistsError) else f"can't be used: {error.strerror}"
        raise ConfigError(f"path: {error.filename or path} {why}") from error
    except OSError as error:
        if error.errno in (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP):
            raise ConfigError(f"path: {error.filename or path} can't be used: {error.strerror}") from error
        raise TierUnavailable(f"{error.filename or path} can't be used now: {error.strerror}") from error


def free_bytes(path: Path) -> tuple[int, int]:
    """(bytes free for this user, bytes in all) of the file system of `path`."""
    usage = shutil.disk_usage(path)
    return usage.free, usage.total
