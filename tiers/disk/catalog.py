"""What a namespace's folder holds, for those who look at it from outside."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvcascade.tiers.envelope import FORMAT, HEADER_BYTES, Envelope, Flaw, parse
from kvcascade.tiers.raw import read_raw
from kvcascade.types import Buffer, Key

from .folder import NamespaceFolder
from .index import IndexDamaged, LmdbIndex, Location, Row
from .marks import Epoch, Session
from .slabs import Slot, extents_in

__all__ = ["Catalog", "Extents"]


class Extents(NamedTuple):
    """Where the slots are, by the number of the extent."""

    paths: dict[int, str]
    slot_bytes: dict[int, int]

    @classmethod
    def of(cls, folder: Path) -> "Extents":
        found = list(extents_in(folder))
        return cls({n: str(path) for path, n, _, _ in found}, {n: size for _, n, size, _ in found})

    def offset(self, slot: Slot) -> int:
        return slot.place * self.slot_bytes[slot.extent]

    def read(self, slot: Slot, nbytes: int) -> Buffer:
        """The first bytes of a slot; fewer where the extent ends before, none where it has gone.

        Raises:
            OSError: the medium failed.
        """
        if slot.extent not in self.paths:
            return memoryview(b"")
        try:
            return read_raw(self.paths[slot.extent], self.offset(slot), nbytes)[0]
        except FileNotFoundError:
            return memoryview(b"")


class Catalog:
    """The index says what there is; where it can't be trusted, the envelopes in the slots do.

    Works beside the engine that has the folder: each call sees what is committed when it begins. All calls raise
    TierError or OSError where the medium fails.
    """

    def __init__(self, folder: NamespaceFolder) -> None:
        self._folder = folder

    def epoch(self) -> Epoch | None:
        """The one that the chunks belong to; None where nothing here can be told."""
        known = self._folder.format == FORMAT and self._folder.block > 0
        return Epoch.read(self._folder.path) if known else None

    @contextlib.contextmanager
    def index(self) -> Iterator[LmdbIndex | None]:
        """The index, where what it says is whole."""
        if opened := LmdbIndex.opened_here(self._folder.index):
            yield opened
            return
        index = None
        session = Session.read(self._folder.path)
        if session and session.index_is_whole and self._folder.index.exists():
            with contextlib.suppress(IndexDamaged):
                index = LmdbIndex.for_reading(self._folder.index)
        try:
            yield index
        finally:
            if index is not None:
                index.close()

    def written(self, epoch: Epoch) -> Sequence[float]:
        """The Unix times at which the chunks of the epoch were written."""
        with self.index() as index:
            if index is not None:
                times: list[float] = index.records()[1]["written"].tolist()
                return times if index.mark() == epoch.mark else []
        return [row.location.written for row in self._by_envelopes(epoch)]

    def rows(self, epoch: Epoch) -> list[Row]:
        """The chunks of the epoch."""
        with self.index() as index:
            if index is not None:
                return list(index.rows()) if index.mark() == epoch.mark else []
        return self._by_envelopes(epoch)

    def still_there(self, found: Sequence[tuple[Key, Location]], epoch: Epoch) -> list[bool]:
        """Whether each chunk still lies where it was found: its slot may have been given to another meanwhile."""
        with self.index() as index:
            if index is not None:
                if index.mark() != epoch.mark:
                    return [False] * len(found)
                now = index.lookup([key for key, _ in found])
                return [location == known for location, (_, known) in zip(now, found, strict=True)]
        extents = Extents.of(self._folder.path)
        stamp = self._folder.namespace.stamp(epoch.mark)
        return [
            isinstance(envelope := parse(extents.read(location.slot, HEADER_BYTES)), Envelope)
            and (envelope.stamp, envelope.key, envelope.sequence) == (stamp, key, location.sequence)
            for key, location in found
        ]

    def _by_envelopes(self, epoch: Epoch) -> list[Row]:
        """The newest write of each key that stands in a slot."""
        stamp = self._folder.namespace.stamp(epoch.mark)
        newest: dict[Key, Row] = {}
        for path, number, slot_bytes, nbytes in extents_in(self._folder.path):
            with path.open("rb", buffering=0) as file:
                for place in range(nbytes // slot_bytes):
                    envelope = parse(os.pread(file.fileno(), HEADER_BYTES, place * slot_bytes))
                    if isinstance(envelope, Flaw) or envelope.stamp != stamp:
                        continue
                    found = Location(Slot(number, place), envelope.nbytes, envelope.sequence, envelope.written)
                    known = newest.get(envelope.key)
                    if known is None or known.location.sequence < found.sequence:
                        newest[envelope.key] = Row(envelope.key, found, envelope.written)
        return list(newest.values())
