"""What lies in a path, for `kvcascade check`, `ls` and `clear`: beside running engines, or without any."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvcascade.configs.units import format_size
from kvcascade.errors import ConfigError, TierError
from kvcascade.tiers.base import Holding, Probe
from kvcascade.tiers.blocks import block_size, direct_works
from kvcascade.tiers.envelope import FORMAT, Flaw, parse
from kvcascade.tiers.files import free_bytes, mapped, nearest_existing
from kvcascade.types import Namespace

from .folder import (
    EngineFolder,
    NamespaceFolder,
    engine_folders,
    holder,
    namespace_folders,
)
from .index import LmdbIndex
from .marks import Epoch, Session
from .opening import lacking_space, plan_for
from .slabs import extents_in

if TYPE_CHECKING:
    from .settings import DiskSettings

__all__ = ["clear", "holdings", "probe"]


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
        version = folder.description["format"]
        if version > FORMAT:
            yield f"{folder.path} is in format {version}, of a newer version; this one knows {FORMAT}"


def holdings(path: Path) -> list[Holding]:
    """What each engine's folder holds of each namespace.

    Raises:
        TierError: the disk can't be read.
    """
    with mapped(path):
        return [
            _holding(folder, holder(engine))
            for engine in engine_folders(path)
            for folder in namespace_folders(engine)
        ]


def _holding(folder: NamespaceFolder, used_by: str) -> Holding:
    written = _written(folder) if folder.description["format"] == FORMAT else np.zeros(0)
    return Holding(
        place=str(folder.path),
        namespace=str(Namespace(tuple(sorted(folder.fields.items())))),
        chunks=len(written),
        bytes=folder.nbytes,
        oldest=float(written.min()) if len(written) else None,
        newest=float(written.max()) if len(written) else None,
        used_by=used_by,
        tenant=folder.fields.get("tenant", ""),
    )


def _written(folder: NamespaceFolder) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The times at which the chunks were written that are there."""
    if opened := LmdbIndex.opened_here(folder.index):
        return opened.records()[1]["written"]
    epoch = Epoch.read(folder.path)
    if epoch is None:
        return np.zeros(0)
    session = Session.read(folder.path)
    if not (session and session.index_is_whole and folder.index.exists()):
        return _written_by_envelopes(folder, epoch)
    index = LmdbIndex.for_reading(folder.index)
    try:
        return index.records()[1]["written"] if index.mark() == epoch.mark else np.zeros(0)
    finally:
        index.close()


def _written_by_envelopes(folder: NamespaceFolder, epoch: Epoch) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """As `_written`, where no index can be trusted."""
    stamp = Namespace(tuple(sorted(folder.fields.items()))).stamp(epoch.mark)
    written = {}
    for path, _, slot_bytes, nbytes in extents_in(folder.path):
        with path.open("rb", buffering=0) as file:
            for start in range(0, nbytes, slot_bytes):
                file.seek(start)
                envelope = parse(file.read(folder.block))
                if not isinstance(envelope, Flaw) and envelope.stamp == stamp:
                    written[envelope.key] = envelope.written
    return np.array(list(written.values()))


def clear(path: Path, tenant: str | None) -> list[str]:
    """Removes the namespaces of `tenant`, or all of them where it is None.

    Raises:
        ConfigError: an engine is using one of them; nothing was removed.
        TierError: the disk can't be changed.
    """
    with mapped(path), ExitStack() as locks:
        doomed = []
        for engine in engine_folders(path):
            folders = [
                folder for folder in namespace_folders(engine) if tenant in (None, folder.fields.get("tenant", ""))
            ]
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
