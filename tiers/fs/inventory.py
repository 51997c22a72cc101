"""What lies in a directory, for `kvcascade check`, `ls` and `clear`: beside running engines, or without any."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvcascade.configs.units import format_size
from kvcascade.errors import ConfigError, TierError
from kvcascade.tiers.base import Holding, Probe
from kvcascade.tiers.blocks import block_size, direct_works
from kvcascade.tiers.files import free_bytes, mapped, nearest_existing
from kvcascade.types import Namespace

from .layout import (
    NAMESPACE_NAME,
    OWN_NAME,
    Home,
    chunks,
    fans,
    footprint,
    homes,
    sweeper_folder,
    writers_folder,
)
from .opening import access_of, check_use, too_new
from .writers import Identity, living, remove_dead

if TYPE_CHECKING:
    from .settings import FsSettings

__all__ = ["clear", "holdings", "probe"]


def probe(settings: "FsSettings", chunk_bytes: int | None) -> Probe:
    """Looks whether the tier would open, without changing anything."""
    found = Probe()
    try:
        with mapped(Path(settings.path)):
            access_of(settings)
            _look(settings, found)
    except (ConfigError, TierError) as error:
        found.problems.append(str(error))
    if chunk_bytes is not None and settings.capacity is not None:
        found.chunks = settings.capacity // footprint(chunk_bytes)
    return found


def _look(settings: "FsSettings", found: Probe) -> None:
    path = Path(settings.path)
    there = nearest_existing(path)
    found.facts.append(("path", f"{path} ({'exists' if there == path else f'will be made in {there}'})"))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        wanted = "a folder" if not there.is_dir() else "writable for this user"
        found.problems.append(f"path: {there} is not {wanted}, so {path} can't be used")
        return
    direct = direct_works(there, block_size(there))
    found.facts.append(("direct I/O", "yes" if direct else "found out at start"))
    free, total = free_bytes(there)
    found.facts.append(("free space", f"{format_size(free)} of {format_size(total)}"))
    found.facts.append(("capacity", _capacity(settings)))
    others = [identity.in_words for identity in living(path, time.time())]
    found.facts.append(("in use by", ", ".join(others) or "nobody"))
    found.problems += filter(None, map(too_new, homes(path)))
    check_use(path, settings.exclusive, None, time.time())


def _capacity(settings: "FsSettings") -> str:
    if settings.capacity is None:
        return "none: nothing is evicted"
    return f"{format_size(settings.capacity)}, {'hard' if settings.exclusive else 'soft'}"


def holdings(path: Path) -> list[Holding]:
    """What the directory holds of each namespace, of all its epochs.

    Raises:
        TierError: the directory can't be read.
    """
    with mapped(path):
        users = list(living(path, time.time())) if path.is_dir() else []
        return [_holding(home, users) for home in homes(path)]


def _holding(home: Home, users: list[Identity]) -> Holding:
    files = [info for _, info in _files(home)]
    times = [info.st_mtime for info in files]
    return Holding(
        place=str(home.path),
        namespace=str(Namespace(tuple(sorted(home.fields.items())))),
        chunks=len(files),
        bytes=sum(info.st_size for info in files),
        oldest=min(times, default=None),
        newest=max(times, default=None),
        used_by=", ".join(user.in_words for user in users if _uses(user, home)),
        tenant=home.fields.get("tenant", ""),
    )


def _files(home: Home) -> Iterator[tuple[str, os.stat_result]]:
    return (chunk for epoch in home.epochs() for fan in fans(epoch) for chunk in chunks(fan))


def _uses(user: Identity, home: Home) -> bool:
    return bool(user.namespace) and home.path.name.startswith(user.namespace)


def clear(path: Path, tenant: str | None) -> list[str]:
    """Removes the namespaces of `tenant`, or all of them where it is None.

    Raises:
        ConfigError: an engine is using one of them; nothing was removed.
        TierError: the directory can't be changed.
    """
    with mapped(path):
        doomed = [home for home in homes(path) if tenant in (None, home.fields.get("tenant", ""))]
        for user in living(path, time.time()):
            if any(_uses(user, home) for home in doomed):
                raise ConfigError(f"path: {path} is in use by {user.in_words}; end it first. Nothing was removed")
        lines = [_remove(home) for home in doomed]
        if not homes(path):
            remove_dead(path, time.time())
            _remove_own([*_numbered(sweeper_folder(path))], [writers_folder(path), sweeper_folder(path)])
            _remove_own([], [path / OWN_NAME])
        return lines


def _remove(home: Home) -> str:
    nbytes = sum(info.st_size for _, info in _files(home))
    names = [folder for folder in home.marks.glob("*") if folder.is_dir()]
    for name in names:
        _remove_own(_numbered(name), [name])
    _remove_own(home.quarantine.glob("*.chunk"), [home.quarantine, home.marks])
    for epoch in home.epochs():
        for fan in fans(epoch):
            _remove_own((Path(file) for file, _ in chunks(fan)), [fan])
        _remove_own([], [epoch])
    if [entry.name for entry in home.path.iterdir()] == [NAMESPACE_NAME]:
        _remove_own([home.path / NAMESPACE_NAME], [home.path])
    left = "; foreign files in it are left" if home.path.exists() else ""
    return f"removed {home.path} ({format_size(nbytes)}){left}"


def _numbered(folder: Path) -> Iterator[Path]:
    return (file for file in folder.glob("*") if file.name.isdecimal())


def _remove_own(files: Iterable[Path], folders: Iterable[Path]) -> None:
    """Removes the files, and those folders that are empty then."""
    for file in files:
        file.unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
