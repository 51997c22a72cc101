"""What lies in a bucket of one namespace, seen from outside the engines that share it."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from random import random
from typing import NamedTuple

from kvcascade.errors import ConfigError, TierError, TierRefused
from kvcascade.tiers.envelope import FORMAT, Envelope, Flaw, flaw_of, parse
from kvcascade.tiers.stored import Holding, Reading, Removed, StoredChunk, StoredEpoch, StoredNamespace
from kvcascade.types import Buffer, Entry, Namespace, Outcome

from .bucket import Bucket, Got, Object
from .engines import Sign, signs_of_life
from .epochs import Epoch, Epochs
from .layout import ENVELOPE, Home, is_chunk, key_in, place, stamp_in

__all__ = ["S3Stored"]

_BATCH = 1000


class _Slot(NamedTuple):
    """Memory for one object, as it was listed."""

    envelope: Buffer
    payload: Buffer

    @classmethod
    def of(cls, found: Object) -> "_Slot":
        memory = memoryview(bytearray(found.nbytes))
        return cls(memory[:ENVELOPE], memory[ENVELOPE:])


class Cleared(NamedTuple):
    """What was removed of a namespace."""

    objects: int
    bytes: int
    leaves: bool
    """Whether something foreign is left."""


class S3Stored(StoredNamespace):
    """An object for each chunk; names say which epoch it is of."""

    def __init__(self, bucket: Bucket, home: Home, said: dict[str, object], patience: float) -> None:
        """`said`: the namespace's description; `patience`: seconds for a request."""
        fields = said.get("fields")
        named = fields.items() if isinstance(fields, dict) else ()
        self.namespace = Namespace(tuple((str(name), str(value)) for name, value in named))
        self.place = f"s3://{bucket.name}/{home.path}"
        self._format = said.get("format")
        self._bucket = bucket
        self._home = home
        self._patience = patience
        self._epochs = Epochs(bucket, home, self.namespace)

    @property
    def tenant(self) -> str:
        """The stack's `namespace`, "" for none."""
        return dict(self.namespace.fields).get("tenant", "")

    # -- listing

    def holding(self) -> Holding:
        count = nbytes = 0
        oldest = newest = None
        for found in self._objects():
            count, nbytes = count + 1, nbytes + found.nbytes
            oldest = min(oldest or found.modified, found.modified)
            newest = max(newest or found.modified, found.modified)
        signs = signs_of_life(self._bucket, self._home, self._end())
        users = [sign.in_words for sign in signs if sign.lives]
        self._bucket.close()
        return Holding(
            place=self.place,
            namespace=str(self.namespace),
            chunks=count,
            bytes=nbytes,
            oldest=oldest,
            newest=newest,
            used_by=", ".join(users),
            tenant=self.tenant,
        )

    def chunks(self, prefix: str = "", share: float = 1.0) -> Iterator[StoredChunk]:
        if self._format != FORMAT:
            return
        epochs = self._by_stamp()
        for found in self._objects():
            key = key_in(found.name)
            if (key is not None and not key.hex().startswith(prefix)) or (share < 1 and random() >= share):
                continue
            epoch = epochs.get(stamp_in(found.name)) or StoredEpoch("unknown", None, void=False)
            chunk = self._chunk(found, epoch)
            if chunk.entry.key.hex().startswith(prefix):
                yield chunk
        self._bucket.close()

    def _objects(self) -> Iterator[Object]:
        return (found for found in self._bucket.list(self._home.path, self._end) if is_chunk(found.name))

    def _by_stamp(self) -> dict[str, StoredEpoch]:
        """What is known of epochs."""
        signs = signs_of_life(self._bucket, self._home, self._end())
        stamps = {sign.stamp for sign in signs if sign.lives}
        return {
            stamp: self._facts(epoch, stamp in stamps) for stamp, epoch in self._epochs.notes(self._end()).items()
        }

    def _facts(self, epoch: Epoch, in_use: bool) -> StoredEpoch:
        if not self._epochs.is_over(epoch, self._end()):
            return StoredEpoch(epoch.in_words, epoch.name, void=False)
        words = epoch.in_words if epoch.private else f"{epoch.in_words}, over"
        return StoredEpoch(words, None, void=not in_use)

    def _chunk(self, found: Object, epoch: StoredEpoch) -> StoredChunk:
        key, sequence = key_in(found.name), 0
        if key is None:
            envelope = parse(self._bucket.read(found.name, self._end(), ENVELOPE) or b"")
            if isinstance(envelope, Envelope):
                key, sequence = envelope.key, envelope.sequence
            else:
                key = bytes.fromhex(found.name.rpartition("/x")[2])
        entry = Entry(key, max(0, found.nbytes - ENVELOPE), found.modified, found.modified)
        return StoredChunk(entry, epoch, f"s3://{self._bucket.name}/{found.name}", sequence, found)

    # -- reading

    def read(self, chunks: Sequence[StoredChunk]) -> list[Reading]:
        slots = [_Slot.of(chunk.token) for chunk in chunks]
        wanted = [(chunk.token.name, slot) for chunk, slot in zip(chunks, slots, strict=True)]
        answers = self._bucket.get(wanted, self._end())
        readings = [self._reading(*one) for one in zip(chunks, slots, answers, strict=True)]
        self._bucket.close()
        return readings

    def _reading(self, chunk: StoredChunk, slot: _Slot, got: Got | TierError | None) -> Reading:
        if isinstance(got, TierError):
            return Reading(Outcome.failed(got))
        if got is None:
            return Reading(Outcome.MISSING)
        envelope = parse(slot.envelope)
        if envelope is Flaw.NEWER_FORMAT:
            return Reading(Outcome.failed(TierRefused("a chunk was written by a newer version")))
        flaw = _flaw(chunk.token.name, slot, envelope, got)
        if flaw is None and isinstance(envelope, Envelope):
            return Reading(Outcome.OK, slot.payload, sequence=envelope.sequence)
        (now,) = self._bucket.find([chunk.token.name], self._end())
        if isinstance(now, TierError):
            return Reading(Outcome.failed(now))
        unchanged = (
            now is not None and now.etag == got.etag and len(slot.envelope) + len(slot.payload) == now.nbytes
        )
        return Reading(Outcome.CORRUPT, flaw=flaw) if unchanged else Reading(Outcome.MISSING)

    # -- removing

    def remove(self, chunks: Iterable[StoredChunk], quarantine: bool = False) -> Removed:
        if quarantine:
            raise ConfigError("a bucket keeps no quarantine; copy what is to be kept with tools of your own")
        removed = Removed()
        listed = iter(chunks)
        while batch := [chunk.token for chunk in islice(listed, _BATCH)]:
            same = self._unchanged(batch)
            self._bucket.erase([one.name for one in same], self._end())
            removed = removed.plus(Removed(len(same), sum(one.nbytes for one in same)))
        self._bucket.close()
        return removed

    def _unchanged(self, objects: list[Object]) -> list[Object]:
        """Those that are still what was listed."""
        same = []
        found = self._bucket.find([one.name for one in objects], self._end())
        for one, now in zip(objects, found, strict=True):
            if isinstance(now, TierError):
                raise now
            if now is not None and (now.nbytes, now.etag) == (one.nbytes, one.etag):
                same.append(one)
        return same

    def clear(self) -> Cleared:
        """Removes everything that is ours, chunks first and the description last."""
        ours = [found for found in self._bucket.list(self._home.path, self._end) if self._home.owns(found.name)]
        ours.sort(key=lambda found: (not is_chunk(found.name), found.name == self._home.description))
        for start in range(0, len(ours), _BATCH):
            self._bucket.erase([found.name for found in ours[start : start + _BATCH]], self._end())
        left = self._bucket.page(self._home.path, self._end(), most=1).objects
        self._bucket.close()
        return Cleared(len(ours), sum(found.nbytes for found in ours), bool(left))

    # -- sweeping

    def sweep(self, dry_run: bool) -> Removed:
        if self._format != FORMAT:
            return Removed()
        swept = super().sweep(dry_run)
        signs = list(signs_of_life(self._bucket, self._home, self._end()))
        if not any(sign.lives for sign in signs) and next(self._objects(), None) is None:
            return swept.plus(self._sweep_all(dry_run))
        useless = [sign.name for sign in signs if not sign.lives] + self._useless_notes(signs)
        if not dry_run:
            self._bucket.erase(useless, self._end())
        self._bucket.close()
        return swept.plus(Removed(others=len(useless)))

    def _sweep_all(self, dry_run: bool) -> Removed:
        """What is left of a namespace that holds no chunk and that nobody uses."""
        if not dry_run:
            return Removed(others=self.clear().objects)
        names = [found.name for found in self._bucket.list(self._home.path, self._end)]
        return Removed(others=sum(map(self._home.owns, names)))

    def _useless_notes(self, signs: list[Sign]) -> list[str]:
        """Of epochs that are over, in which nothing lies, and in which no engine is."""
        stamps = {sign.stamp for sign in signs if sign.lives}
        return [
            self._home.note(bytes.fromhex(stamp))
            for stamp, epoch in self._epochs.notes(self._end()).items()
            if stamp not in stamps and self._epochs.is_over(epoch, self._end()) and self._is_empty(stamp)
        ]

    def _is_empty(self, stamp: str) -> bool:
        return not self._bucket.page(self._home.epoch(bytes.fromhex(stamp)), self._end(), most=1).objects

    def _end(self) -> float:
        return time.monotonic() + self._patience


def _flaw(name: str, slot: _Slot, envelope: Envelope | Flaw, got: Got) -> Flaw | None:
    if isinstance(envelope, Flaw):
        return envelope
    if not name.endswith(place("/", envelope.key)):
        return Flaw.OTHER_KEY
    if got.received != len(slot.envelope) + len(slot.payload) or got.nbytes not in (got.received, -1):
        return Flaw.OTHER_LENGTH
    return flaw_of(slot.envelope, slot.payload, bytes.fromhex(stamp_in(name)), envelope.key)
