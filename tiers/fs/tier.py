"""The fs tier: chunks in files that many engines share."""

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvcascade.errors import TierUnavailable
from kvcascade.tiers.base import OpenContext, Tier
from kvcascade.tiers.calls import Calls
from kvcascade.tiers.envelope import Envelope, checksum
from kvcascade.types import MAX_KEY_BYTES, Buffer, Capabilities, Changes, Entry, Key, Outcome, Usage

from .chunkfile import ChunkFiles, Verdict, facts, same_file
from .fullness import Amount, Fullness
from .layout import GONE, chunks, entry, fans, footprint, looks_whole, named_key, place, sweeper_folder
from .lease import Lease
from .opening import Opened, open_directory
from .quarantine import Quarantine
from .recency import Recency
from .room import HardRoom, SoftRoom
from .survey import Candidate
from .sweeper import Limits, Sweeper
from .takeover import take_over

if TYPE_CHECKING:
    from .settings import FsSettings

__all__ = ["FsTier"]

log = logging.getLogger("kvcascade.tiers.fs")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BEAT_EVERY = 60.0
"""Seconds between two signs of life."""
PATIENCE = 1.0
"""Seconds for which `close` tells files that they were used."""
EVICTED = 1 << 16
"""Evicted keys, at most, of which is told at a time."""


class Era(NamedTuple):
    """What the tier is in between two moves to another epoch."""

    stamp: bytes
    folder: str


class FsTier(Tier):
    """Chunks in a directory that other engines use as well, each chunk a file.

    A file is written under a name that nobody else has, and renamed: so it is there with all of its bytes, or not
    at all, and of two writers of one chunk both succeed. Nothing is locked. What is read is verified, so that
    whatever others do to the directory ends in a miss. `usage` is an estimate of what is there where there is a
    capacity, else what this engine has put there and taken away.

    With `exclusive` the tier is a private, bounded one: what is there is known, and never above the capacity.

    Notes:
        Each call works in the era that it finds when it begins; the files of an era lie in a folder of their own.
        `_moving` covers moves to another epoch, with their I/O.
    """

    def __init__(
        self, opened: Opened, settings: "FsSettings", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._opened = opened
        self._clock = clock
        self._now = time.time
        self._ttl = settings.ttl
        self._era: Era | None = self._era_of(opened)
        self._files = ChunkFiles(opened.direct, settings.durability, opened.access)
        self._calls = Calls(f"the fs tier at {opened.root}")
        self._moving = threading.Lock()
        self._maintaining = threading.Lock()
        self._recency = Recency(clock)
        self._beaten = clock()
        self._quarantine = (
            Quarantine(opened.home.quarantine, opened.access) if settings.on_corrupt == "quarantine" else None
        )
        self._fullness = Fullness(opened.root, opened.writer, opened.access)
        self._sweeper: Sweeper | None = None
        self._evicted: deque[Key] = deque(maxlen=EVICTED)
        if settings.exclusive and settings.capacity is not None:
            self.capabilities = Capabilities(persistent=True, bounded=True)
            self._room: SoftRoom | HardRoom = take_over(opened.root, self._era.folder, settings.capacity)
        else:
            self.capabilities = Capabilities(persistent=True, shared=True)
            self._room = SoftRoom(self._fullness, settings.capacity)
            self._sweeper = self._make_sweeper(settings)

    def _make_sweeper(self, settings: "FsSettings") -> Sweeper | None:
        if settings.capacity is None and settings.ttl is None:
            return None
        root, writer = self._opened.root, self._opened.writer
        lease = Lease(sweeper_folder(root), writer.identity, self._opened.access, self._clock)
        limits = Limits(settings.capacity, settings.watermarks, settings.ttl)
        return Sweeper(root, limits, lease, writer, self._fullness, self._clock, self._last_use, self._has_evicted)

    @classmethod
    def open(cls, settings: "FsSettings", context: OpenContext) -> "FsTier":
        """Enters the directory.

        Raises:
            ConfigError: it can never be opened like this.
            TierUnavailable: it can't be opened now.
        """
        opened = open_directory(settings, context)
        with ExitStack() as undo, _mapped():
            undo.callback(opened.writer.leave)
            tier = cls(opened, settings)
            undo.pop_all()
            return tier

    # -- asking

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        with self._calls, _mapped():
            era = self._era
            if era is None:
                return [False] * len(keys)
            there = [self._there(facts(place(era.folder, key))) for key in keys]
            return there if era is self._era else [False] * len(keys)

    def entries(self) -> Iterator[Entry]:
        with self._calls:
            era = self._era
        return self._list(era) if era is not None else iter(())

    def _list(self, era: Era) -> Iterator[Entry]:
        with self._calls, _mapped():
            folders = fans(Path(era.folder))
        for folder in folders:
            with self._calls, _mapped():
                found = [entry(path, info, era.stamp) for path, info in chunks(folder)]
            yield from (one for one in found if one is not None and not self._expired(one.written))

    def usage(self) -> Usage:
        with self._calls:
            evictions = self._sweeper.evicted if self._sweeper is not None else 0
            return self._room.usage._replace(evictions=evictions)

    def footprint(self, nbytes: int) -> int:
        return footprint(nbytes)

    # -- reading

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        with self._calls:
            era = self._era
            if era is None:
                return [Outcome.MISSING] * len(keys)
            outcomes = [self._read(era, key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
            return outcomes if era is self._era else [Outcome.MISSING] * len(keys)

    def _read(self, era: Era, key: Key, buffer: Buffer) -> Outcome:
        path = place(era.folder, key)
        try:
            found = self._files.read(path, buffer, era.stamp, key)
            if found.verdict is Verdict.RIGHT:
                if self._expired(found.written):
                    self._remove(path, key, footprint(len(buffer)))
                    return Outcome.MISSING
                self._recency.note(key)
                return Outcome.OK
            if found.verdict is Verdict.ABSENT:
                self._room.missed(key, path)
            if found.verdict is Verdict.WRONG and found.info is not None:
                return self._reject(path, key, found.info)
        except OSError as error:
            return _failed("read", error)
        return Outcome.MISSING

    def _expired(self, written: float) -> bool:
        return self._ttl is not None and self._now() - written > self._ttl

    def _reject(self, path: str, key: Key, read: os.stat_result) -> Outcome:
        """What was read is not what was stored: the file goes, unless another one has taken its place."""
        with self._room.changing():
            now = facts(path)
            if now is None or not same_file(now, read):
                return Outcome.MISSING
            if self._quarantine is not None:
                self._quarantine.keep(path)
            Path(path).unlink(missing_ok=True)
            self._room.gone(key, read.st_size)
        return Outcome.CORRUPT

    # -- removing

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        with self._calls:
            era = self._era
            return [self._delete(era, key) for key in keys]

    def _delete(self, era: Era | None, key: Key) -> Outcome:
        if era is None:
            return Outcome.MISSING
        path = place(era.folder, key)
        try:
            info = facts(path)
            if info is not None and self._remove(path, key, info.st_size):
                return Outcome.OK
        except OSError as error:
            return _failed("deleted", error)
        self._room.missed(key, path)
        return Outcome.MISSING

    def _remove(self, path: str, key: Key, nbytes: int) -> bool:
        with self._room.changing():
            try:
                Path(path).unlink()
            except OSError as error:
                if error.errno not in GONE:
                    raise
                return False
            self._room.gone(key, nbytes)
            return True

    # -- writing

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        with self._calls:
            era = self._era
            for victim in victims:
                self._delete(era, victim)
            outcomes: dict[Key, Outcome] = {}
            for key, buffer in zip(keys, buffers, strict=True):
                if key not in outcomes:
                    outcomes[key] = self._write(era, key, buffer)
            return [outcomes[key] for key in keys]

    def _write(self, era: Era | None, key: Key, buffer: Buffer) -> Outcome:
        if era is None or not 0 < len(key) <= MAX_KEY_BYTES:
            return Outcome.REFUSED
        path = place(era.folder, key)
        try:
            if self._there(facts(path), len(buffer)):
                self._recency.note(key)
                return Outcome.OK
            if self._sweeper is not None:
                self._sweeper.make_room(footprint(len(buffer)))
            if not self._room.admit(footprint(len(buffer))):
                return Outcome.REFUSED
            return self._store(era, path, key, buffer)
        except OSError as error:
            return Outcome.REFUSED if error.errno in NO_ROOM else _failed("written", error)

    def _there(self, info: os.stat_result | None, nbytes: int | None = None) -> bool:
        """Whether a chunk seems to be there, as far as a file's facts tell; of `nbytes` payload bytes, where that
        is asked. A file's mtime is never before its write."""
        if info is None or not looks_whole(info) or self._expired(info.st_mtime):
            return False
        return nbytes is None or info.st_size == footprint(nbytes)

    def _store(self, era: Era, path: str, key: Key, buffer: Buffer) -> Outcome:
        temporary = self._opened.writer.temporary()
        stored = False
        try:
            envelope = Envelope(era.stamp, key, len(buffer), self._now(), time.time_ns(), checksum(buffer))
            self._fill(temporary, envelope, buffer)
            with self._room.changing():
                if era is self._era:
                    self._files.commit(temporary, path, len(buffer))
                    self._room.put(key, footprint(len(buffer)))
                    stored = True
        finally:
            if not stored:
                self._room.cancel(footprint(len(buffer)))
                with suppress(OSError):
                    Path(temporary).unlink(missing_ok=True)
        if stored:
            self._recency.written(key)
        return Outcome.OK if stored else Outcome.REFUSED

    def _fill(self, temporary: str, envelope: Envelope, buffer: Buffer) -> None:
        try:
            self._files.fill(temporary, envelope, buffer)
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._opened.writer.enter()  # this engine was taken for dead, and its folder removed
            self._files.fill(temporary, envelope, buffer)

    # -- moving to another epoch

    def move_to(self, epoch: str) -> None:
        with self._calls, self._moving:
            with self._room.changing():
                self._era = None  # nothing is served until it is known that the old epoch is void
            left = self._era_of(self._opened)
            with _mapped("the mark of the new epoch can't be written"):
                self._opened.move_to(epoch)
            self._room.leave(left.folder)
            self._recency.forget()
            self._era = self._era_of(self._opened)

    @staticmethod
    def _era_of(opened: Opened) -> Era:
        return Era(opened.stamp, str(opened.home.path / opened.stamp.hex()))

    # -- housekeeping

    def touch(self, keys: Sequence[Key]) -> None:
        with self._calls:
            for key in keys:
                self._recency.note(key)

    def maintain(self, budget: float) -> Changes:
        with self._calls:
            end = self._clock() + budget
            if self._maintaining.acquire(blocking=False):
                try:
                    with _mapped():
                        self._tend(end)
                finally:
                    self._maintaining.release()
            return Changes(evicted=tuple(self._evicted.popleft() for _ in range(len(self._evicted))))

    def _tend(self, end: float) -> None:
        if self._clock() - self._beaten >= BEAT_EVERY:
            self._opened.writer.beat()
            self._beaten = self._clock()
        self._persist_recency(end)
        if self._sweeper is not None:
            self._sweeper.run(end)
        elif isinstance(self._room, SoftRoom):
            self._fullness.tell()

    # -- evicting

    def _key_in(self, path: str) -> Key | None:
        """The key of a chunk's file in the era that this engine is in; None for one of another."""
        era = self._era
        return named_key(path) if era is not None and path.startswith(era.folder) else None

    def _last_use(self, path: str) -> float:
        key = self._key_in(path)
        return self._recency.last_use(key) if key is not None else 0.0

    def _has_evicted(self, candidate: Candidate) -> None:
        self._fullness.grow(Amount(-1, -candidate.nbytes))
        key = self._key_in(candidate.path)
        if key is not None:
            self._recency.gone(key)
            self._evicted.append(key)

    def _persist_recency(self, end: float) -> None:
        era = self._era
        if era is not None:
            self._recency.persist(lambda key: place(era.folder, key), self._opened.writer.beat, end)

    def close(self) -> None:
        if not self._calls.close():
            return
        try:
            self._persist_recency(self._clock() + PATIENCE)
        except OSError as error:
            log.warning("%s: recency is lost: %s", self._opened.root, error.strerror)
        finally:
            if self._sweeper is not None:
                self._sweeper.close()
            self._opened.writer.leave()


def _failed(what: str, error: OSError) -> Outcome:
    cause = TierUnavailable(f"a chunk can't be {what}: {error.strerror}")
    cause.__cause__ = error
    return Outcome.failed(cause)


@contextmanager
def _mapped(what: str = "the directory can't be used now") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierUnavailable(f"{what}: {error.strerror}") from error
