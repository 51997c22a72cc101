"""Removing chunks from a namespace's folder that no engine has open."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, islice
from pathlib import Path

from kvcascade.errors import ConfigError
from kvcascade.tiers.stored import Removed
from kvcascade.types import Key

from .catalog import Catalog, Extents
from .folder import EngineFolder, NamespaceFolder, holder
from .index import LmdbIndex, Location
from .plan import QUARANTINED, footprint
from .quarantine import Quarantine

__all__ = ["locked", "remove"]

BATCH = 256
"""Chunks that are removed in one transaction."""

Found = tuple[Key, Location]


@contextlib.contextmanager
def locked(engine: Path) -> Iterator[EngineFolder]:
    """
    Raises:
        ConfigError: an engine has the folder.
        OSError: it can't be locked.
    """
    lock = EngineFolder.lock(engine)
    if lock is None:
        raise ConfigError(f"path: {engine} is in use by {holder(engine)}; end it first")
    try:
        yield lock
    finally:
        lock.close()


def remove(folder: NamespaceFolder, engine: Path, found: Iterable[Found], quarantine: bool) -> Removed:
    """Removes chunks that still lie where they were found. Extents, and the folder, in which nothing is left then,
    are given back.

    Raises:
        ConfigError: an engine has the folder.
        TierError, OSError: the medium failed.
    """
    catalog, left = Catalog(folder), iter(found)
    epoch, batch = catalog.epoch(), list(islice(left, BATCH))
    if not batch or epoch is None:
        return Removed()
    removed = Removed()
    with locked(engine) as lock, _index(folder, catalog) as index:
        while batch:
            there = list(compress(batch, catalog.still_there(batch, epoch)))
            removed = removed.plus(_remove(folder, there, index, quarantine))
            batch = list(islice(left, BATCH))
        if removed.chunks:
            _give_back(folder, {row.location.slot.extent for row in catalog.rows(epoch)}, lock)
    return removed


@contextlib.contextmanager
def _index(folder: NamespaceFolder, catalog: Catalog) -> Iterator[LmdbIndex | None]:
    """The index, open for writing, where what it says is whole."""
    with catalog.index() as index:
        whole = index is not None
    if not whole:
        yield None
        return
    size = folder.index.stat().st_size
    # Removing takes room, too: twice the size is enough for copies of all pages.
    index = LmdbIndex.for_writing(folder.index, 2 * size, size, max_readers=64, sync=True, metasync=True)
    try:
        yield index
    finally:
        index.close()


def _remove(folder: NamespaceFolder, found: Sequence[Found], index: LmdbIndex | None, quarantine: bool) -> Removed:
    extents = Extents.of(folder.path)
    if quarantine:
        kept = Quarantine(folder.quarantine, QUARANTINED * max(extents.slot_bytes.values(), default=0))
        for _, location in found[-QUARANTINED:]:
            raw = extents.read(location.slot, footprint(location.nbytes, folder.block))
            kept.keep(f"{location.sequence:016x}", raw[: folder.block], raw[folder.block :])
    if index is not None:
        index.commit([key for key, _ in found], [])
    _wipe([location for _, location in found], extents, folder.block)
    return Removed(len(found), sum(footprint(location.nbytes, folder.block) for _, location in found))


def _wipe(locations: Sequence[Location], extents: Extents, block: int) -> None:
    """Overwrites the envelopes, so that a search after a power cut does not find these chunks again."""
    for number in {location.slot.extent for location in locations} & extents.paths.keys():
        fd = os.open(extents.paths[number], os.O_WRONLY | os.O_CLOEXEC)
        try:
            for location in locations:
                if location.slot.extent == number:
                    os.pwrite(fd, bytes(block), extents.offset(location.slot))
            os.fsync(fd)
        finally:
            os.close(fd)


def _give_back(folder: NamespaceFolder, used: set[int], engine: EngineFolder) -> None:
    if not used:
        folder.remove()
        engine.remove_if_empty()
        return
    for number, path in Extents.of(folder.path).paths.items():
        if number not in used:
            Path(path).unlink()
