"""What lies in the folder of one namespace, seen from outside an engine."""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import random
from typing import NamedTuple

import numpy as np

from kvcascade.errors import ConfigError
from kvcascade.tiers.envelope import FORMAT, HEADER_BYTES, Flaw, flaw_of, parse
from kvcascade.tiers.files import disk_bytes, mapped
from kvcascade.tiers.raw import read_raw
from kvcascade.tiers.stored import Holding, Reading, Removed, StoredChunk, StoredEpoch, StoredNamespace
from kvcascade.types import Entry, Key, Outcome

from .folder import EngineFolder, NamespaceFolder, holder
from .index import IndexDamaged, LmdbIndex, Location, Row
from .marks import Epoch, Session
from .plan import QUARANTINED, footprint
from .quarantine import Quarantine
from .slabs import Slot, extents_in

__all__ = ["DiskStored"]

BATCH = 256
"""Chunks that are removed in one transaction."""


class Extents(NamedTuple):
    """Where the slots of a folder are, by the number of the extent."""

    paths: dict[int, str]
    slot_bytes: dict[int, int]

    @classmethod
    def of(cls, folder: Path) -> "Extents":
        found = list(extents_in(folder))
        return cls({n: str(path) for path, n, _, _ in found}, {n: size for _, n, size, _ in found})

    def offset(self, slot: Slot) -> int:
        return slot.place * self.slot_bytes[slot.extent]


class DiskStored(StoredNamespace):
    """The index says what there is; where it can't be trusted, the envelopes in the slots do."""

    def __init__(self, folder: NamespaceFolder, engine: Path, quarantines: bool) -> None:
        self.namespace = folder.namespace
        self.place = str(folder.path)
        self._folder = folder
        self._engine = engine
        self._quarantines = quarantines

    @property
    def locked_by(self) -> str:
        return holder(self._engine)

    # -- listing

    def holding(self) -> Holding:
        with mapped(self._folder.path):
            written = self._written()
            return Holding(
                place=self.place,
                namespace=str(self.namespace),
                chunks=len(written),
                bytes=self._folder.nbytes,
                oldest=float(written.min()) if len(written) else None,
                newest=float(written.max()) if len(written) else None,
                used_by=self.locked_by,
                tenant=self._folder.tenant,
            )

    def _written(self) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        """The times at which the chunks were written that are there."""
        epoch = self._epoch()
        with self._index() as index:
            if epoch is None or (index is not None and index.mark() != epoch.mark):
                return np.zeros(0)
            if index is not None:
                return index.records()[1]["written"]
        return np.array([row.location.written for row in self._by_envelopes(epoch)])

    def chunks(self, prefix: str = "", share: float = 1.0) -> Iterator[StoredChunk]:
        with mapped(self._folder.path):
            epoch = self._epoch()
            if epoch is None:
                return
            facts = self._facts(epoch)
            paths = Extents.of(self._folder.path).paths
            for row in self._rows(epoch):
                if row.key.hex().startswith(prefix) and (share >= 1 or random() < share):
                    yield _chunk(row, facts, paths)

    def _epoch(self) -> Epoch | None:
        return Epoch.read(self._folder.path) if self._folder.format == FORMAT else None

    def _facts(self, epoch: Epoch) -> StoredEpoch:
        if epoch.epoch or epoch.origin == "start":
            return StoredEpoch(f"weights {epoch.epoch}" if epoch.epoch else "unnamed", epoch.epoch, void=False)
        # After a reset to weights without a name: an engine that starts begins another epoch.
        return StoredEpoch("private", None, void=not self.locked_by)

    def _rows(self, epoch: Epoch) -> list[Row]:
        with self._index() as index:
            if index is not None:
                return list(index.rows()) if index.mark() == epoch.mark else []
        return self._by_envelopes(epoch)

    @contextlib.contextmanager
    def _index(self) -> Iterator[LmdbIndex | None]:
        """The index, where what it says is whole."""
        if opened := LmdbIndex.opened_here(self._folder.index):
            yield opened
            return
        session = Session.read(self._folder.path)
        index = None
        if session and session.index_is_whole and self._folder.index.exists():
            with contextlib.suppress(IndexDamaged):
                index = LmdbIndex.for_reading(self._folder.index)
        try:
            yield index
        finally:
            if index is not None:
                index.close()

    def _by_envelopes(self, epoch: Epoch) -> list[Row]:
        """The newest write of each key that stands in a slot."""
        stamp = self.namespace.stamp(epoch.mark)
        newest: dict[Key, Row] = {}
        for path, number, slot_bytes, nbytes in extents_in(self._folder.path):
            with path.open("rb", buffering=0) as file:
                for place in range(nbytes // slot_bytes):
                    file.seek(place * slot_bytes)
                    envelope = parse(file.read(HEADER_BYTES))
                    if isinstance(envelope, Flaw) or envelope.stamp != stamp:
                        continue
                    found = Location(Slot(number, place), envelope.nbytes, envelope.sequence, envelope.written)
                    known = newest.get(envelope.key)
                    if known is None or known.location.sequence < found.sequence:
                        newest[envelope.key] = Row(envelope.key, found, envelope.written)
        return list(newest.values())

    # -- reading

    def read(self, chunks: Sequence[StoredChunk]) -> list[Reading]:
        with mapped(self._folder.path):
            epoch = self._epoch()
            if epoch is None:
                return [Reading(Outcome.MISSING)] * len(chunks)
            stamp = self.namespace.stamp(epoch.mark)
            extents = Extents.of(self._folder.path)
            readings = [self._read(chunk, stamp, extents) for chunk in chunks]
            doubtful = [i for i, reading in enumerate(readings) if not reading.outcome.ok]
            there = self._still_there([chunks[i] for i in doubtful], epoch)
            for i, still in zip(doubtful, there, strict=True):
                if not still:
                    readings[i] = Reading(Outcome.MISSING)
            return readings

    def _read(self, chunk: StoredChunk, stamp: bytes, extents: Extents) -> Reading:
        location: Location = chunk.token
        try:
            raw = self._raw(location, extents)
        except OSError as error:
            return Reading.failed(error)
        header, payload = raw[: self._block], raw[self._block :][: location.nbytes]
        flaw = flaw_of(header, payload, stamp, chunk.entry.key)
        if flaw is not None:
            return Reading(Outcome.CORRUPT, flaw=flaw)
        return Reading(Outcome.OK, payload, sequence=location.sequence)

    @property
    def _block(self) -> int:
        return max(self._folder.block, HEADER_BYTES)

    def _raw(self, location: Location, extents: Extents) -> memoryview:
        """All of a slot that a chunk takes; nothing where the extent has gone."""
        if location.slot.extent not in extents.paths:
            return memoryview(b"")
        nbytes = footprint(location.nbytes, self._block)
        try:
            return read_raw(extents.paths[location.slot.extent], extents.offset(location.slot), nbytes)[0]
        except FileNotFoundError:
            return memoryview(b"")

    def _still_there(self, chunks: Sequence[StoredChunk], epoch: Epoch) -> list[bool]:
        """Whether each chunk still lies where it was listed: a slot may have been given to another meanwhile."""
        if not chunks:
            return []
        with self._index() as index:
            if index is None:
                known = {row.key: row.location for row in self._by_envelopes(epoch)}
                return [known.get(chunk.entry.key) in (chunk.token, None) for chunk in chunks]
            if index.mark() != epoch.mark:
                return [False] * len(chunks)
            found = index.lookup([chunk.entry.key for chunk in chunks])
        return [location == chunk.token for location, chunk in zip(found, chunks, strict=True)]

    # -- removing

    def remove(self, chunks: Iterable[StoredChunk], quarantine: bool = False) -> Removed:
        if quarantine and not self._quarantines:
            raise ConfigError(
                f"path: {self._folder.path} has room for a quarantine only with on_corrupt: quarantine"
            )
        left = iter(chunks)
        batch = list(islice(left, BATCH))
        epoch = self._epoch()
        if not batch or epoch is None:
            return Removed()
        removed = Removed()
        with mapped(self._folder.path), self._locked() as engine, self._index_for_writing() as index:
            while batch:
                removed = removed.plus(self._remove(batch, epoch, index, quarantine))
                batch = list(islice(left, BATCH))
            if removed.chunks:
                self._give_back(epoch, engine)
        return removed

    @contextlib.contextmanager
    def _locked(self) -> Iterator[EngineFolder]:
        locked = EngineFolder.lock(self._engine)
        if locked is None:
            raise ConfigError(f"path: {self._engine} is in use by {holder(self._engine)}; end it first")
        try:
            yield locked
        finally:
            locked.close()

    @contextlib.contextmanager
    def _index_for_writing(self) -> Iterator[LmdbIndex | None]:
        with self._index() as index:
            whole = index is not None
        if not whole:
            yield None
            return
        size = self._folder.index.stat().st_size
        index = LmdbIndex.for_writing(self._folder.index, 2 * size, size, max_readers=64, sync=True, metasync=True)
        try:
            yield index
        finally:
            index.close()

    def _remove(
        self, batch: Sequence[StoredChunk], epoch: Epoch, index: LmdbIndex | None, quarantine: bool
    ) -> Removed:
        there = self._still_there(batch, epoch)
        gone: list[tuple[Key, Location]] = [
            (chunk.entry.key, chunk.token) for chunk, still in zip(batch, there, strict=True) if still
        ]
        extents = Extents.of(self._folder.path)
        if quarantine:
            self._keep(gone, extents)
        if index is not None:
            index.commit([key for key, _ in gone], [])
        self._wipe([location.slot for _, location in gone], extents)
        return Removed(len(gone), sum(footprint(location.nbytes, self._block) for _, location in gone))

    def _keep(self, gone: Sequence[tuple[Key, Location]], extents: Extents) -> None:
        kept = Quarantine(self._folder.quarantine, QUARANTINED * max(extents.slot_bytes.values(), default=0))
        for _, location in gone[-QUARANTINED:]:
            raw = self._raw(location, extents)
            kept.keep(f"{location.sequence:016x}", raw[: self._block], raw[self._block :])

    def _wipe(self, slots: Sequence[Slot], extents: Extents) -> None:
        """Overwrites the envelopes, so that a search after a power cut does not find these chunks again."""
        for number in {slot.extent for slot in slots} & extents.paths.keys():
            fd = os.open(extents.paths[number], os.O_WRONLY | os.O_CLOEXEC)
            try:
                for slot in slots:
                    if slot.extent == number:
                        os.pwrite(fd, bytes(self._block), extents.offset(slot))
                os.fsync(fd)
            finally:
                os.close(fd)

    def _give_back(self, epoch: Epoch, engine: EngineFolder) -> None:
        """Removes extents in which nothing lies any more, and the folder where that is all."""
        used = {row.location.slot.extent for row in self._rows(epoch)}
        if not used:
            self._folder.remove()
            engine.remove_if_empty()
        for number, path in Extents.of(self._folder.path).paths.items() if used else ():
            if number not in used:
                Path(path).unlink()

    # -- sweeping

    def sweep(self, dry_run: bool) -> Removed:
        with mapped(self._folder.path):
            if self.locked_by or self._folder.format > FORMAT:
                return Removed()
            epoch = self._epoch()
            rows = self._rows(epoch) if epoch else []
            if epoch is None or not rows or self._facts(epoch).void:
                return self._all(len(rows), dry_run)
            return self._half_done(dry_run)

    def _all(self, chunks: int, dry_run: bool) -> Removed:
        swept = Removed(chunks, self._folder.nbytes, 1)
        if not dry_run:
            with self._locked() as engine:
                self._folder.remove()
                engine.remove_if_empty()
        return swept

    def _half_done(self, dry_run: bool) -> Removed:
        files = self._folder.half_done()
        swept = Removed(0, sum(map(disk_bytes, files)), len(files))
        if files and not dry_run:
            with self._locked():
                for file in files:
                    file.unlink(missing_ok=True)
        return swept


def _chunk(row: Row, epoch: StoredEpoch, paths: dict[int, str]) -> StoredChunk:
    location = row.location
    place = f"{paths.get(location.slot.extent, 'no extent')} slot {location.slot.place}"
    entry = Entry(row.key, location.nbytes, location.written, row.used)
    return StoredChunk(entry, epoch, place, location.sequence, location)
