"""The index: which slot holds which key, in LMDB."""

import contextlib
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import lmdb
import numpy as np

from kvcascade.errors import ProtocolError, TierError, TierRefused, TierUnavailable
from kvcascade.types import MAX_KEY_BYTES, Key

from .slabs import Slot

__all__ = ["INDEX_NAME", "LOCK_NAME", "IndexDamaged", "LmdbIndex", "Location", "Row", "Use"]

INDEX_NAME = "index.lmdb"
LOCK_NAME = INDEX_NAME + "-lock"

_LOCATION = struct.Struct("<IIQQd")
_RECENCY_KEY = struct.Struct(">II")
_RECENCY = struct.Struct("<QdB")
_UNCOUNTED = struct.Struct("<Qd")
_RECORD = np.dtype(
    [("extent", "<u4"), ("place", "<u4"), ("nbytes", "<u8"), ("sequence", "<u8"), ("written", "<f8")]
)
_MARK = b"mark"


class Location(NamedTuple):
    """Where a chunk lies, and which write put it there."""

    slot: Slot
    nbytes: int
    """Payload bytes."""
    sequence: int
    written: float
    """Unix time."""

    def pack(self) -> bytes:
        return _LOCATION.pack(*self.slot, *self[1:])

    @classmethod
    def unpack(cls, raw: bytes | memoryview) -> Self:
        extent, place, nbytes, sequence, written = _LOCATION.unpack(raw)
        return cls(Slot(extent, place), nbytes, sequence, written)


class Row(NamedTuple):
    """An entry with its recency."""

    key: Key
    location: Location
    used: float


class Use(NamedTuple):
    """What the recency of a chunk says."""

    when: float
    """Unix time of the last use."""
    uses: int
    """Requests that have used it, 255 at most; 0: as many as are known already."""


class LmdbIndex:
    """One environment: entries by key, recency by slot, and the mark that the entries belong to.

    A recency is the sequence number of the write it belongs to, the time of the last use, and one byte that counts
    uses. One without that byte, as earlier versions wrote it, is of a chunk used once; the format of entries and
    envelopes is the same.

    Thread-safe. LMDB has one writer at a time; a reader sees the state between two commits. LMDB must not open a
    file twice in a process (jnwatson/py-lmdb#129), so opened ones are found again through `opened_here`. The
    environment belongs to the process that opened it: after a fork the child is refused (jnwatson/py-lmdb#346).
    """

    _opened: ClassVar[dict[str, "LmdbIndex"]] = {}
    _registry: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, path: Path, limit_bytes: int, **options: Any) -> None:
        """Opened by `for_writing` or `for_reading`. Options are those of `lmdb.open`.

        Raises:
            TierError: it can't be opened.
        """
        self.path = path
        self._limit_bytes = limit_bytes
        self._pid = os.getpid()
        with self._registry, _mapped(f"the index {path} can't be opened"):
            self._env = lmdb.open(str(path), subdir=False, max_dbs=3, mode=0o600, max_spare_txns=16, **options)
            self._opened[os.path.realpath(path)] = self
        try:
            with _mapped(f"the index {path} can't be used"):
                self._env.reader_check()
                self._entries = self._env.open_db(b"entries")
                self._recency = self._env.open_db(b"recency")
                self._meta = self._env.open_db(b"meta")
        except TierError:
            self.close()
            raise

    @classmethod
    def for_writing(
        cls, path: Path, map_bytes: int, limit_bytes: int, max_readers: int, sync: bool, metasync: bool
    ) -> Self:
        """
        Args:
            map_bytes: the most that the file may take.
            limit_bytes: of live pages, above which nothing new is taken.
            sync: each commit reaches the medium; with `metasync` also the last one before a power cut.

        Raises:
            TierError: it can't be opened.
        """
        return cls(path, limit_bytes, map_size=map_bytes, max_readers=max_readers, sync=sync, metasync=metasync)

    @classmethod
    def for_reading(cls, path: Path) -> Self:
        """An index that another process may be writing.

        Raises:
            TierError: it can't be opened.
        """
        return cls(path, 0, readonly=True)

    @classmethod
    def opened_here(cls, path: Path) -> "LmdbIndex | None":
        """The index that this process has open at this path."""
        with cls._registry:
            index = cls._opened.get(os.path.realpath(path))
        return index if index and index._pid == os.getpid() else None

    def check_process(self) -> None:
        """
        Raises:
            ProtocolError: this is a fork of the process that opened it.
        """
        if os.getpid() != self._pid:
            raise ProtocolError(f"{self.path} was opened by process {self._pid}; after a fork, open a tier anew")

    # -- reading

    @contextlib.contextmanager
    def _reading(self) -> Iterator[lmdb.Transaction]:
        self.check_process()
        with _mapped("the index can't be read"):
            try:
                transaction = self._env.begin(buffers=False)
            except lmdb.ReadersFullError:
                self._env.reader_check()  # processes that were killed leave their places taken
                transaction = self._env.begin(buffers=False)
            with transaction:
                yield transaction

    def mark(self) -> str:
        """The mark that the entries belong to; "" for none yet."""
        with self._reading() as transaction:
            return bytes(transaction.get(_MARK, b"", db=self._meta)).decode()

    def lookup(self, keys: Iterable[Key]) -> list[Location | None]:
        """Where each key lies.

        Raises:
            TierError: the index can't be read.
        """
        with self._reading() as transaction:
            raws = [
                transaction.get(key, db=self._entries) if 0 < len(key) <= MAX_KEY_BYTES else None for key in keys
            ]
        return [Location.unpack(raw) if raw is not None else None for raw in raws]

    def contains(self, keys: Iterable[Key]) -> list[bool]:
        """As `lookup`, without the place."""
        with self._reading() as transaction:
            return [
                0 < len(key) <= MAX_KEY_BYTES and transaction.get(key, db=self._entries) is not None
                for key in keys
            ]

    def records(self) -> tuple[list[Key], "np.ndarray[Any, np.dtype[Any]]"]:
        """All keys, and the fields of their locations in the same order."""
        with self._reading() as transaction:
            keys = [bytes(key) for key in transaction.cursor(self._entries).iternext(True, False)]
            raw = b"".join(transaction.cursor(self._entries).iternext(False, True))
        if len(raw) != len(keys) * _RECORD.itemsize:
            raise IndexDamaged(f"{self.path} holds entries of another length")
        return keys, np.frombuffer(raw, _RECORD)

    def _recency_of_writes(self) -> dict[int, Use]:
        """What is persisted of uses, by the sequence number of the write."""
        with self._reading() as transaction:
            raws = [_counted(raw) for raw in transaction.cursor(self._recency).iternext(False, True)]
        return {sequence: Use(when, uses) for sequence, when, uses in _RECENCY.iter_unpack(b"".join(raws))}

    def columns(self) -> tuple[list[Key], list[int], list[float], list[Use]]:
        """Keys, payload bytes, Unix times of write, and uses, of everything."""
        keys, records = self.records()
        written = records["written"].tolist()
        recency = self._recency_of_writes()
        uses = [
            recency.get(sequence) or Use(at, 1)
            for sequence, at in zip(records["sequence"].tolist(), written, strict=True)
        ]
        return keys, records["nbytes"].tolist(), written, uses

    def rows(self) -> Iterator[Row]:
        """Everything, with its location."""
        keys, records = self.records()
        recency = self._recency_of_writes()
        for key, (extent, place, nbytes, sequence, written) in zip(keys, records.tolist(), strict=True):
            location = Location(Slot(extent, place), nbytes, sequence, written)
            yield Row(key, location, recency[sequence].when if sequence in recency else written)

    def live_bytes(self) -> int:
        """Bytes of the pages that entries and recency are in."""
        with self._reading() as transaction:
            return self._live_bytes(transaction)

    # -- writing

    @contextlib.contextmanager
    def _writing(self) -> Iterator[lmdb.Transaction]:
        self.check_process()
        with _mapped("the index can't be written"), self._env.begin(write=True) as transaction:
            yield transaction

    def commit(self, removed: Iterable[Key], added: Sequence[tuple[Key, Location]]) -> list[bool]:
        """Removes and adds in one transaction: all of it or nothing. A key that is there keeps its location;
        returns which were added.

        Raises:
            TierRefused: there is no room for the new entries; nothing was changed.
            TierError: the index can't be written; nothing was changed.
        """
        with self._writing() as transaction:
            for key in removed:
                transaction.delete(key, db=self._entries)
            if added and self._live_bytes(transaction) > self._limit_bytes:
                raise TierRefused("the index is full: its keys are longer than 64 bytes")
            return [
                transaction.put(key, location.pack(), overwrite=False, db=self._entries) for key, location in added
            ]

    def _live_bytes(self, transaction: lmdb.Transaction) -> int:
        stats = [transaction.stat(db) for db in (self._entries, self._recency)]
        return sum(s["psize"] * (s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"]) for s in stats)

    def move(self, moved: Iterable[tuple[Key, Location]]) -> None:
        """Gives keys another location, in one transaction.

        Raises:
            TierError: the index can't be written; nothing was changed.
        """
        with self._writing() as transaction:
            for key, location in moved:
                transaction.put(key, location.pack(), db=self._entries)

    def note_used(self, used: Mapping[Key, Use]) -> None:
        """Persists uses; those of keys that are not there are dropped.

        Raises:
            TierError: the index can't be written.
        """
        with self._writing() as transaction:
            for key, use in used.items():
                raw = transaction.get(key, db=self._entries) if 0 < len(key) <= MAX_KEY_BYTES else None
                if raw is None:
                    continue
                location = Location.unpack(raw)
                place = _RECENCY_KEY.pack(*location.slot)
                uses = use.uses or _uses_of(transaction.get(place, db=self._recency), location.sequence)
                transaction.put(place, _RECENCY.pack(location.sequence, use.when, uses), db=self._recency)

    def reset(self, mark: str) -> None:
        """Removes everything; what comes belongs to `mark`. One transaction.

        Raises:
            TierError: the index can't be written; nothing was changed.
        """
        with self._writing() as transaction:
            transaction.drop(self._entries, delete=False)
            transaction.drop(self._recency, delete=False)
            transaction.put(_MARK, mark.encode(), db=self._meta)

    def sync(self) -> None:
        """Makes all commits durable.

        Raises:
            TierError: the medium failed.
        """
        self.check_process()
        with _mapped("the index can't be synced"):
            self._env.sync(True)

    def compact_to(self, path: Path) -> None:
        """Writes a copy without free pages.

        Raises:
            TierError: the medium failed.
        """
        self.check_process()
        with _mapped("the index can't be copied"):
            self._env.copy(str(path), compact=True)

    def close(self) -> None:
        """Ends all use. No other call may be running. In a fork, nothing is touched."""
        if os.getpid() != self._pid:
            return
        with self._registry:
            if self._opened.pop(os.path.realpath(self.path), None):
                self._env.close()


def _counted(raw: bytes | memoryview) -> bytes:
    """A persisted recency, with the count that it lacks where an earlier version wrote it."""
    return bytes(raw) + b"\x01" if len(raw) == _UNCOUNTED.size else bytes(raw)


def _uses_of(raw: bytes | memoryview | None, sequence: int) -> int:
    """How often the chunk of this write was used, by what is persisted at its slot."""
    known, _, uses = _RECENCY.unpack(_counted(raw)) if raw is not None else (0, 0.0, 1)
    return uses if known == sequence else 1


class IndexDamaged(TierError):
    """The file is not an index that LMDB can read."""


_DAMAGE = (
    lmdb.BadChecksumError,
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


@contextlib.contextmanager
def _mapped(what: str) -> Iterator[None]:
    try:
        yield
    except lmdb.MapFullError as error:
        raise TierRefused(f"{what}: no room left in its map") from error
    except _DAMAGE as error:
        raise IndexDamaged(f"{what}: {error}") from error
    except (lmdb.Error, OSError) as error:
        raise TierUnavailable(f"{what}: {error}") from error
