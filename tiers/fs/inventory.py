"""What lies in a directory, for `kvcascade check`, `ls` and `clear`: beside running engines, or without any."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvcascade.configs.units import format_size
from kvcascade.errors import ConfigError, TierError
from kvcascade.tiers.base import Probe, StoredNamespace
from kvcascade.tiers.blocks import block_size, direct_works
from kvcascade.tiers.files import free_bytes, mapped, nearest_existing

from .fullness import TOTAL_NAME
from .layout import OWN_NAME, Access, Home, footprint, homes, listed, sweeper_folder, writers_folder
from .opening import access_of, check_use, too_new
from .stored import FsStored, remove_home, remove_own
from .survey import Survey
from .writers import living, remove_dead

if TYPE_CHECKING:
    from .settings import FsSettings

__all__ = ["clear", "probe", "stored"]


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
        found.soft = None if settings.exclusive else settings.watermarks
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
    if shortage := _shortage(settings, path, free):
        found.facts.append(("warning", shortage))
    others = [identity.in_words for identity in living(path, time.time())]
    found.facts.append(("in use by", ", ".join(others) or "nobody"))
    found.problems += filter(None, map(too_new, homes(path)))
    check_use(path, settings.exclusive, None, time.time())


def _capacity(settings: "FsSettings") -> str:
    if settings.capacity is None:
        return "none: nothing is evicted"
    return f"{format_size(settings.capacity)}, {'hard' if settings.exclusive else 'soft'}"


def _shortage(settings: "FsSettings", path: Path, free: int) -> str:
    """What is wrong where the file system has no room for the capacity, beside the chunks that lie here; "" where
    it has. They are only added up where it matters."""
    if settings.capacity is None or free >= settings.capacity:
        return ""
    survey = Survey(path, time.time(), tidy=False)
    for _ in survey.steps():
        pass
    if free + survey.total.bytes >= settings.capacity:
        return ""
    ours = format_size(survey.total.bytes)
    return (
        f"{format_size(settings.capacity)} of capacity are more than the file system has: {format_size(free)} "
        f"are free and {ours} are in use here already. It fills up before anything is evicted, "
        f"and what has no room is refused"
    )


def stored(settings: "FsSettings") -> list[StoredNamespace]:
    """What the directory holds of each namespace.

    Raises:
        TierError: the directory can't be read.
    """
    path = Path(settings.path)
    with mapped(path):
        access = access_of(settings)
        return [FsStored(path, home, access) for home in homes(path)]


def clear(path: Path, tenant: str | None) -> list[str]:
    """Removes the namespaces of `tenant`, or all of them where it is None.

    Raises:
        ConfigError: an engine is using one of them; nothing was removed.
        TierError: the directory can't be changed.
    """
    with mapped(path):
        kept = [FsStored(path, home, Access()) for home in homes(path) if tenant in (None, home.tenant)]
        holdings = [one.holding() for one in kept]
        for holding in holdings:
            if holding.used_by:
                raise ConfigError(
                    f"path: {path} is in use by {holding.used_by}; end it first. Nothing was removed"
                )
        lines = [_cleared(Home(Path(holding.place)), holding.bytes) for holding in holdings]
        if not homes(path):
            remove_dead(path, time.time())
            leases = (file for file in listed(sweeper_folder(path)) if _is_ours(file.name))
            remove_own(leases, [writers_folder(path), sweeper_folder(path), path / OWN_NAME])
        return lines


def _is_ours(name: str) -> bool:
    return name.isdecimal() or name == TOTAL_NAME


def _cleared(home: Home, nbytes: int) -> str:
    left = "" if remove_home(home) else "; foreign files in it are left"
    return f"removed {home.path} ({format_size(nbytes)}){left}"
