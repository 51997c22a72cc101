"""What lies in a path, for `kvcascade check`, `ls` and `clear`: beside running engines, or without any."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvcascade.configs.units import format_size
from kvcascade.errors import ConfigError, TierError
from kvcascade.tiers.base import Probe, StoredNamespace
from kvcascade.tiers.blocks import block_size, direct_works
from kvcascade.tiers.envelope import FORMAT
from kvcascade.tiers.files import free_bytes, mapped, nearest_existing

from .folder import (
    EngineFolder,
    NamespaceFolder,
    engine_folders,
    engine_name,
    holder,
    namespace_folders,
)
from .opening import lacking_space, plan_for
from .stored import DiskStored

if TYPE_CHECKING:
    from .settings import DiskSettings

__all__ = ["clear", "probe", "stored"]


def probe(settings: "DiskSettings", chunk_bytes: int | None) -> Probe:
    """Looks whether the tier would open, without changing anything."""
    found = Probe()
    try:
        with mapped(Path(settings.path)):
            _look(settings, chunk_bytes, found)
    except (ConfigError, TierError) as error:
        found.problems.append(str(error))
    return found


def _look(settings: "DiskSettings", chunk_bytes: int | None, found: Probe) -> None:
    path = Path(settings.path)
    there = nearest_existing(path)
    found.facts.append(("path", f"{path} ({'exists' if there == path else f'will be made in {there}'})"))
    if not there.is_dir() or not os.access(
        there, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
    ):
        wanted = "a folder" if not there.is_dir() else "writable for this user"
        found.problems.append(f"path: {there} is not {wanted}, so {path} can't be used")
        return
    block = block_size(there)
    direct = direct_works(there, block)
    found.facts.append(("direct I/O", f"yes, in blocks of {block} bytes" if direct else "no, uses the page cache"))
    engines = engine_folders(path)
    _look_at_space(settings, engines, found)
    for engine in engines:
        held = holder(engine)
        found.facts.append((engine.name, f"in use by {held}" if held else "free"))
        found.problems += [f"path: {text}" for text in _too_new(engine)]
    if chunk_bytes is not None:
        found.chunks = plan_for(settings, chunk_bytes, block).chunks


def _look_at_space(settings: "DiskSettings", engines: list[Path], found: Probe) -> None:
    path = Path(settings.path)
    free, total = free_bytes(nearest_existing(path))
    found.facts.append(("free space", f"{format_size(free)} of {format_size(total)}"))
    found.facts.append(("capacity", format_size(settings.capacity)))
    usual = engines[0] if engines else path / "engine-0"
    mine = next((engine for engine in engines if not holder(engine)), usual)
    if problem := lacking_space(settings, mine):
        found.problems.append(problem)


def _too_new(engine: Path) -> Iterator[str]:
    for folder in namespace_folders(engine):
        if folder.format > FORMAT:
            yield f"{folder.path} is in format {folder.format}, of a newer version; this one knows {FORMAT}"


def stored(settings: "DiskSettings", engine_id: str | None) -> list[StoredNamespace]:
    """What each engine's folder holds of each namespace, or that of one engine.

    Raises:
        TierError: the disk can't be read.
    """
    path = Path(settings.path)
    with mapped(path):
        return [
            DiskStored(folder, engine, settings.on_corrupt == "quarantine")
            for engine in engine_folders(path)
            if engine_id is None or engine.name == engine_name(engine_id)
            for folder in namespace_folders(engine)
        ]


def clear(path: Path, tenant: str | None) -> list[str]:
    """Removes the namespaces of `tenant`, or all of them where it is None.

    Raises:
        ConfigError: an engine is using one of them; nothing was removed.
        TierError: the disk can't be changed.
    """
    with mapped(path), ExitStack() as locks:
        doomed = []
        for engine in engine_folders(path):
            folders = [folder for folder in namespace_folders(engine) if tenant in (None, folder.tenant)]
            if not folders and tenant is not None:
                continue
            if not (locked := EngineFolder.lock(engine)):
                raise ConfigError(
                    f"path: {engine} is in use by {holder(engine)}; end it first. Nothing was removed"
                )
            locks.callback(locked.close)
            doomed.append((locked, folders))
        return [line for locked, folders in doomed for line in _cleared(locked, folders)]


def _cleared(engine: EngineFolder, folders: list[NamespaceFolder]) -> Iterator[str]:
    for folder in folders:
        nbytes = folder.nbytes
        gone = folder.remove()
        yield f"removed {folder.path} ({format_size(nbytes)})" + ("" if gone else "; foreign files in it are left")
    if not engine.remove_if_empty() and not namespace_folders(engine.path):
        yield f"left {engine.path}: foreign files are in it"
