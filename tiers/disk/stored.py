"""What lies in the folder of one namespace, seen from outside an engine."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import random

from kvcascade.errors import ConfigError
from kvcascade.tiers.envelope import FORMAT, flaw_of
from kvcascade.tiers.files import disk_bytes, mapped
from kvcascade.tiers.stored import Holding, Reading, Removed, StoredChunk, StoredEpoch, StoredNamespace
from kvcascade.types import Entry, Outcome

from .catalog import Catalog, Extents
from .folder import NamespaceFolder, holder
from .index import Row
from .marks import Epoch
from .plan import footprint
from .removal import locked, remove

__all__ = ["DiskStored"]


class DiskStored(StoredNamespace):
    """A folder of slabs, which belongs to one engine. The token of a chunk is its location."""

    def __init__(self, folder: NamespaceFolder, engine: Path, quarantines: bool) -> None:
        self.namespace = folder.namespace
        self.place = str(folder.path)
        self._folder = folder
        self._engine = engine
        self._quarantines = quarantines
        self._catalog = Catalog(folder)

    @property
    def locked_by(self) -> str:
        with mapped(self._engine):
            return holder(self._engine)

    def holding(self) -> Holding:
        with mapped(self._folder.path):
            epoch = self._catalog.epoch()
            written = self._catalog.written(epoch) if epoch else []
            return Holding(
                place=self.place,
                namespace=str(self.namespace),
                chunks=len(written),
                bytes=self._folder.nbytes,
                oldest=min(written, default=None),
                newest=max(written, default=None),
                used_by=self.locked_by,
                tenant=self._folder.tenant,
            )

    def chunks(self, prefix: str = "", share: float = 1.0) -> Iterator[StoredChunk]:
        with mapped(self._folder.path):
            epoch = self._catalog.epoch()
            if epoch is None:
                return
            facts, paths = self._facts(epoch), Extents.of(self._folder.path).paths
            rows = self._catalog.rows(epoch)
            for row in sorted(rows, key=lambda row: row.location.slot):  # as they are read fastest
                if row.key.hex().startswith(prefix) and (share >= 1 or random() < share):
                    yield _chunk(row, facts, paths)

    def _facts(self, epoch: Epoch) -> StoredEpoch:
        if epoch.epoch or epoch.origin == "start":
            return StoredEpoch(f"weights {epoch.epoch}" if epoch.epoch else "unnamed", epoch.epoch, void=False)
        # After a reset to weights without a name: an engine that starts begins another epoch.
        return StoredEpoch("private", None, void=not self.locked_by)

    def read(self, chunks: Sequence[StoredChunk]) -> list[Reading]:
        with mapped(self._folder.path):
            epoch = self._catalog.epoch()
            if epoch is None:
                return [Reading(Outcome.MISSING)] * len(chunks)
            stamp, extents = self.namespace.stamp(epoch.mark), Extents.of(self._folder.path)
            readings = [self._read(chunk, stamp, extents) for chunk in chunks]
            doubtful = [i for i, reading in enumerate(readings) if not reading.outcome.ok]
            found = [(chunks[i].entry.key, chunks[i].token) for i in doubtful]
            there = self._catalog.still_there(found, epoch) if found else []
            for i, still in zip(doubtful, there, strict=True):
                if not still:
                    readings[i] = Reading(Outcome.MISSING)
            return readings

    def _read(self, chunk: StoredChunk, stamp: bytes, extents: Extents) -> Reading:
        block, nbytes = self._folder.block, chunk.entry.nbytes
        try:
            raw = extents.read(chunk.token.slot, footprint(nbytes, block))
        except OSError as error:
            return Reading.failed(error)
        payload = raw[block : block + nbytes]
        if flaw := flaw_of(raw[:block], payload, stamp, chunk.entry.key):
            return Reading(Outcome.CORRUPT, flaw=flaw)
        return Reading(Outcome.OK, payload, sequence=chunk.sequence)

    def remove(self, chunks: Iterable[StoredChunk], quarantine: bool = False) -> Removed:
        if quarantine and not self._quarantines:
            raise ConfigError(f"path: {self.place} has room for a quarantine only with on_corrupt: quarantine")
        with mapped(self._folder.path):
            found = ((chunk.entry.key, chunk.token) for chunk in chunks)
            return remove(self._folder, self._engine, found, quarantine)

    def sweep(self, dry_run: bool) -> Removed:
        with mapped(self._folder.path):
            if self.locked_by or self._folder.format > FORMAT:
                return Removed()
            epoch = self._catalog.epoch()
            rows = self._catalog.rows(epoch) if epoch else []
            if epoch is None or not rows or self._facts(epoch).void:
                return self._sweep_all(len(rows), dry_run)
            return self._sweep_half_done(dry_run)

    def _sweep_all(self, chunks: int, dry_run: bool) -> Removed:
        swept = Removed(chunks, self._folder.nbytes, 1)
        if not dry_run:
            with locked(self._engine) as engine:
                self._folder.remove()
                engine.remove_if_empty()
        return swept

    def _sweep_half_done(self, dry_run: bool) -> Removed:
        files = self._folder.half_done()
        swept = Removed(0, sum(map(disk_bytes, files)), len(files))
        if files and not dry_run:
            with locked(self._engine):
                for file in files:
                    file.unlink(missing_ok=True)
        return swept


def _chunk(row: Row, epoch: StoredEpoch, paths: dict[int, str]) -> StoredChunk:
    location = row.location
    place = f"{paths.get(location.slot.extent, 'no extent')} slot {location.slot.place}"
    entry = Entry(row.key, location.nbytes, location.written, row.used)
    return StoredChunk(entry, epoch, place, location.sequence, location)
