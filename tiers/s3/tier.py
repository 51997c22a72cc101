"""The s3 tier: chunks in objects that many engines share."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvcascade.errors import TierError
from kvcascade.tiers.base import OpenContext, Tier
from kvcascade.tiers.calls import Calls
from kvcascade.tiers.envelope import Envelope, Flaw, checksum, flaw_of, pack, parse
from kvcascade.types import MAX_KEY_BYTES, Buffer, Capabilities, Changes, Entry, Key, Outcome, Usage

from .bucket import Found, Got, Object, Put, Written
from .layout import ENVELOPE, WRITTEN, is_chunk, key_in, metadata, place
from .opening import Opened, open_bucket
from .upkeep import Upkeep
from .warming import Warming

if TYPE_CHECKING:
    from .settings import S3Settings

__all__ = ["S3Tier"]


class Era(NamedTuple):
    """What the tier is in between two moves to another epoch."""

    stamp: bytes
    path: str
    """What the names of its chunks begin with."""


class S3Tier(Tier):
    """Chunks in a bucket that other engines use as well, each chunk an object.

    An object is there with all of its bytes, or not at all, and of two writers of one chunk both succeed. What is
    read is verified, so that whatever others do to the bucket ends in a miss. `usage` is rough: what this engine
    has put there and taken away.

    Notes:
        Each call works in the era that it finds when it begins; the objects of an era have names of its own.
        `_moving` covers moves to another epoch, with their I/O; `_counting` the counts; `_tending` the
        signs of life.
    """

    capabilities = Capabilities(persistent=True, shared=True)

    def __init__(self, opened: Opened, settings: "S3Settings", now: Callable[[], float] = time.time) -> None:
        self._opened = opened
        self._bucket = opened.bucket
        self._patience = settings.deadline
        self._ttl = settings.ttl
        self._warm = settings.warm
        self._now = now
        self._era: Era | None = _era_of(opened)
        self._chunks = self._bytes = 0
        self._begin(arrived=True)
        _open.add(self)

    def _begin(self, arrived: bool) -> None:
        """Everything that belongs to one process."""
        self._calls = Calls(f"the s3 tier at {self._bucket.name}/{self._opened.home.path}")
        self._moving = threading.Lock()
        self._counting = threading.Lock()
        self._tending = threading.Lock()
        self._upkeep = Upkeep(self._opened, arrived)
        self._warming = Warming(self._pages(self._era)) if self._warm else None

    @classmethod
    def open(cls, settings: "S3Settings", context: OpenContext) -> "S3Tier":
        """Enters the bucket.

        Raises:
            ConfigError: it can never be opened like this.
            TierUnavailable: it can't be opened now.
        """
        return cls(open_bucket(settings, context), settings)

    # -- asking

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        with self._calls:
            era = self._era
            if era is None:
                return [False] * len(keys)
            there = []
            for found in self._bucket.find([place(era.path, key) for key in keys], self._end()):
                if isinstance(found, TierError):
                    raise found
                there.append(self._is_there(found))
            return there if era is self._era else [False] * len(keys)

    def _is_there(self, found: Found | None, nbytes: int | None = None) -> bool:
        """Whether a chunk seems to be there, as far as the store tells; of `nbytes` payload bytes, where that is
        asked."""
        if found is None or found.nbytes <= ENVELOPE:
            return False
        written = _time(found.fields.get(WRITTEN, ""))
        if written is not None and self._expired(written):
            return False
        return nbytes is None or found.nbytes == ENVELOPE + nbytes

    def _expired(self, written: float) -> bool:
        return self._ttl is not None and self._now() - written > self._ttl

    def entries(self) -> Iterator[Entry]:
        with self._calls:
            era = self._era
        return (found for page in self._pages(era) for found in page)

    def _pages(self, era: Era | None) -> Iterator[list[Entry]]:
        following = ""
        while era is not None and era is self._era:
            with self._calls:
                page = self._bucket.page(era.path, self._end(), following)
                entries = [found for one in page.objects if (found := self._entry(one)) is not None]
            yield entries
            following = page.following
            if not following:
                return

    def _entry(self, found: Object) -> Entry | None:
        """What a list says of a chunk; of one whose name does not say its key, what its envelope says."""
        if not is_chunk(found.name) or found.nbytes <= ENVELOPE or self._expired(found.modified):
            return None
        key = key_in(found.name)
        if key is None:
            envelope = parse(self._bucket.read(found.name, self._end(), ENVELOPE) or b"")
            if isinstance(envelope, Flaw):
                return None
            key = envelope.key
        return Entry(key, found.nbytes - ENVELOPE, found.modified, found.modified)

    def usage(self) -> Usage:
        with self._calls:
            return Usage(max(0, self._chunks), max(0, self._bytes), None)

    def footprint(self, nbytes: int) -> int:
        return ENVELOPE + nbytes

    # -- reading

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        with self._calls:
            era = self._era
            if era is None:
                return [Outcome.MISSING] * len(keys)
            outcomes = self._read(era, keys, buffers)
            return outcomes if era is self._era else [Outcome.MISSING] * len(keys)

    def _read(self, era: Era, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        end = self._end()
        wanted = [
            (place(era.path, key), (memoryview(bytearray(ENVELOPE)), buffer))
            for key, buffer in zip(keys, buffers, strict=True)
        ]
        outcomes = []
        for key, (name, (envelope, buffer)), got in zip(keys, wanted, self._bucket.get(wanted, end), strict=True):
            if isinstance(got, TierError):
                outcomes.append(Outcome.failed(got))
            elif got is None:
                outcomes.append(Outcome.MISSING)
            else:
                outcomes.append(self._verified(era, name, key, envelope, buffer, got))
        return outcomes

    def _verified(self, era: Era, name: str, key: Key, envelope: Buffer, buffer: Buffer, got: Got) -> Outcome:
        expected = ENVELOPE + len(buffer)
        flaw: Flaw | None = Flaw.OTHER_LENGTH
        if got.received == expected and got.nbytes in (expected, -1):
            flaw = flaw_of(envelope, buffer, era.stamp, key)
        if flaw is None and self._ttl is None:
            return Outcome.OK
        found = parse(envelope)
        if found is Flaw.NEWER_FORMAT:
            return Outcome.MISSING
        if flaw is not None:
            return self._reject(name, got)
        if isinstance(found, Envelope) and self._expired(found.written):
            self._remove(name)
            return Outcome.MISSING
        return Outcome.OK

    def _reject(self, name: str, got: Got) -> Outcome:
        """What was read is not what was stored: the object goes, unless another one has taken its place."""
        (now,) = self._bucket.find([name], self._end())
        if isinstance(now, TierError):
            return Outcome.failed(now)
        if now is None or now.etag != got.etag or got.nbytes not in (now.nbytes, -1):
            return Outcome.MISSING
        self._remove(name)
        return Outcome.CORRUPT

    # -- removing

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        with self._calls:
            return self._delete(self._era, keys)

    def _delete(self, era: Era | None, keys: Sequence[Key]) -> list[Outcome]:
        outcomes = [Outcome.MISSING] * len(keys)
        if era is None:
            return outcomes
        end = self._end()
        first = {key: at for at, key in reversed([*enumerate(keys)])}
        names = [place(era.path, key) for key in first]
        doomed: dict[int, str] = {}
        for at, name, found in zip(first.values(), names, self._bucket.find(names, end), strict=True):
            if isinstance(found, TierError):
                outcomes[at] = Outcome.failed(found)
            elif found is not None:
                doomed[at] = name
                self._count(-1, -found.nbytes)
        for at, failure in zip(doomed, self._bucket.delete(doomed.values(), end), strict=True):
            outcomes[at] = Outcome.OK if failure is None else Outcome.failed(failure)
        return outcomes

    # -- writing

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        with self._calls:
            era = self._era
            if victims:
                self._delete(era, victims)
            given = dict(zip(keys, buffers, strict=True))
            outcomes = dict.fromkeys(given, Outcome.REFUSED)
            if era is not None:
                outcomes |= self._write(era, {key: given[key] for key in given if 0 < len(key) <= MAX_KEY_BYTES})
            return [outcomes[key] for key in keys]

    def _write(self, era: Era, given: dict[Key, Buffer]) -> dict[Key, Outcome]:
        """Where the store keeps what it has, it is asked what that is only then; else before."""
        end = self._end()
        outcomes = self._put(era, given, end, only_new=True) if self._bucket.keeps else {}
        if len(outcomes) == len(given):
            return outcomes
        outcomes |= self._present(era, {key: given[key] for key in given if key not in outcomes}, end)
        return outcomes | self._put(era, {key: given[key] for key in given if key not in outcomes}, end)

    def _present(self, era: Era, given: dict[Key, Buffer], end: float) -> dict[Key, Outcome]:
        """The outcomes of those that are there already."""
        outcomes = {}
        names = [place(era.path, key) for key in given]
        for (key, buffer), found in zip(given.items(), self._bucket.find(names, end), strict=True):
            if isinstance(found, TierError):
                outcomes[key] = Outcome.failed(found)
            elif self._is_there(found, len(buffer)):
                outcomes[key] = Outcome.OK
        return outcomes

    def _put(self, era: Era, given: dict[Key, Buffer], end: float, only_new: bool = False) -> dict[Key, Outcome]:
        """The outcomes, but for those that the store has kept."""
        outcomes = {}
        puts = (self._sealed(era, key, buffer) for key, buffer in given.items())
        for (key, buffer), written in zip(given.items(), self._bucket.put(puts, end, only_new), strict=True):
            if isinstance(written, TierError):
                outcomes[key] = Outcome.failed(written)
            elif written is Written.FULL:
                outcomes[key] = Outcome.REFUSED
            elif written is Written.DONE:
                outcomes[key] = Outcome.OK if era is self._era else Outcome.REFUSED
                self._count(1, ENVELOPE + len(buffer))
        return outcomes

    def _sealed(self, era: Era, key: Key, buffer: Buffer) -> Put:
        envelope = Envelope(era.stamp, key, len(buffer), self._now(), time.time_ns(), checksum(buffer))
        return Put(place(era.path, key), (memoryview(pack(envelope, ENVELOPE)), buffer), metadata(envelope))

    # -- moving to another epoch

    def move_to(self, epoch: str) -> None:
        with self._calls, self._moving:
            self._era = None  # nothing is served until it is known that the old epoch is void
            opened = self._opened
            opened.epoch = opened.epochs.move(opened.epoch, epoch, self._end())
            with suppress(TierError):
                opened.arrive(self._end())
            self._era = _era_of(opened)

    def _wait_for_epoch(self) -> None:
        """Who only reads enters its epoch once somebody who writes has begun it."""
        with self._moving:
            if self._opened.epoch is None:
                self._opened.enter(self._end())
                self._era = _era_of(self._opened)

    # -- housekeeping

    def maintain(self, budget: float) -> Changes:
        """Gives signs of life, and lists a part of the namespace where the tier shall be warm."""
        with self._calls:
            if self._tending.acquire(blocking=False):
                try:
                    if self._opened.epoch is None:
                        self._wait_for_epoch()
                    self._upkeep.run(self._end())
                finally:
                    self._tending.release()
        if self._warming is None:
            return Changes()
        era = self._era
        appeared = self._warming.take(budget)
        return Changes(appeared) if era is self._era else Changes()

    def close(self) -> None:
        _open.discard(self)
        if self._calls.close():
            self._opened.presence.leave(self._end())
            self._bucket.close()

    def _forked(self) -> None:
        """In a fork, which goes on with connections of its own."""
        self._opened.forked()
        self._begin(arrived=False)

    def _end(self) -> float:
        """When a call that begins now has taken too long."""
        return time.monotonic() + self._patience

    def _remove(self, name: str) -> None:
        """Removes an object that is of no use; where that fails it stays of no use."""
        for _ in self._bucket.delete([name], self._end()):
            pass

    def _count(self, chunks: int, nbytes: int) -> None:
        with self._counting:
            self._chunks += chunks
            self._bytes += nbytes


def _time(text: str) -> float | None:
    """Unix time; None where somebody has written something else: the envelope will tell."""
    try:
        return float(text)
    except ValueError:
        return None


def _era_of(opened: Opened) -> Era | None:
    return None if opened.stamp is None else Era(opened.stamp, opened.home.epoch(opened.stamp))


_open: "weakref.WeakSet[S3Tier]" = weakref.WeakSet()


def _after_fork() -> None:
    for tier in list(_open):
        tier._forked()


os.register_at_fork(after_in_child=_after_fork)
