"""The disk tier: slabs, an index over them, and the rules that keep the two in step."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvcascade.errors import TierError, TierRefused, TierUnavailable
from kvcascade.tiers.base import OpenContext, Tier
from kvcascade.tiers.blocks import Frame, Frames, Scratch
from kvcascade.tiers.calls import Calls
from kvcascade.tiers.envelope import Envelope, checksum, flaw_of, pack
from kvcascade.types import MAX_KEY_BYTES, Buffer, Capabilities, Changes, Entry, Key, Outcome, Usage

from .index import Location, Use
from .ledger import Ledger
from .marks import Epoch
from .opening import Opened, open_folder
from .slabs import Slot

if TYPE_CHECKING:
    from .settings import DiskSettings

__all__ = ["DiskTier"]

log = logging.getLogger("kvcascade.tiers.disk")

PORTION = 64
"""Chunks that are written, or read, at a time."""
PERSIST_EVERY = 5.0
"""Seconds: the most that recency may be behind after SIGKILL."""
RECENCY_BATCH = 512
PATIENCE = 1.0
"""Seconds a write waits in all for readers to leave slots that are needed."""
TICK = 1e-6


class Era(NamedTuple):
    """What the tier is in between two moves to another epoch."""

    mark: str
    stamp: bytes


@dataclass(slots=True, eq=False)
class Written:
    """Chunks whose bytes are on the medium; they wait for their commit."""

    era: Era
    portion: dict[Key, Location]
    outcome: Outcome = Outcome.REFUSED


class DiskTier(Tier):
    """Chunks on a local disk: private to one engine, bounded, there again after a restart.

    Notes:
        A chunk is findable once its entry is committed to the index, after its bytes are written. What is removed
        is doomed first, and goes with the next commit, in one transaction with what that one adds; only then is
        its slot given away again, and not while a reader uses it. Writers that come while another one commits are
        committed together.

        `_committing` covers commits, with their I/O, and a move to another epoch: who holds it knows that the mark
        does not change. `_lock` covers the ledger and recency, in memory. Order: `_committing`, `_lock`, then the
        locks of the slabs.
    """

    capabilities = Capabilities(persistent=True, batches=True, bounded=True)
    patience: ClassVar[float] = PATIENCE

    def __init__(self, opened: Opened, durable: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._opened = opened
        self._durable = durable
        self._clock = clock
        self._plan = opened.plan
        self._index = opened.index
        self._slabs = opened.slabs
        self._scan = opened.scan
        self._era: Era | None = self._era_of(opened.epoch)
        self._calls = Calls(f"the disk tier at {opened.folder.path}")
        self._committing = threading.Lock()
        self._written: deque[Written] = deque()
        self._lock = threading.Lock()
        self._maintaining = threading.Lock()
        self._ledger = Ledger(opened.plan.block)
        self._ledger.chunks, self._ledger.bytes, self._sequence = opened.found
        self._scratch = Scratch()
        self._touched: dict[Key, Use] = {}
        self._last_tick = 0.0
        self._persisted = clock()
        self._appeared: list[Entry] = []
        self._vanished: list[Key] = []

    @classmethod
    def open(cls, settings: "DiskSettings", context: OpenContext) -> "DiskTier":
        """Locks an engine's folder in the path and takes over what is there of the namespace.

        Raises:
            ConfigError: it can never be opened like this.
            TierUnavailable: it can't be opened now.
        """
        return cls(open_folder(settings, context), settings.durability != "none")

    # -- asking

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        with self._calls:
            return self._index.contains(keys) if self._era is not None else [False] * len(keys)

    def entries(self) -> Iterator[Entry]:
        with self._calls:
            if self._era is None:
                return iter(())
            with self._lock:
                touched = dict(self._touched)
                doomed = set(self._ledger.doomed)
            found = []
            for key, nbytes, written, known in zip(*self._index.columns(), strict=True):
                if key not in doomed:
                    when, uses = touched.get(key, known)
                    found.append(Entry(key, nbytes, written, when, uses or known.uses))
            return iter(found)

    def usage(self) -> Usage:
        with self._calls, self._lock:
            return Usage(self._ledger.chunks, self._ledger.bytes, self._capacity)

    @property
    def _capacity(self) -> int:
        return max(0, self._plan.capacity - self._slabs.retired)

    def footprint(self, nbytes: int) -> int:
        return self._ledger.footprint(nbytes)

    # -- reading

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        with self._calls:
            outcomes: list[Outcome] = []
            for start in range(0, len(keys), PORTION):
                end = start + PORTION
                outcomes += self._read_portion(keys[start:end], buffers[start:end])
            return outcomes

    def _read_portion(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        era = self._era
        if era is None:
            return [Outcome.MISSING] * len(keys)
        try:
            pinned = self._pin(keys)
        except TierError as error:
            return [Outcome.failed(error)] * len(keys)
        outcomes = [Outcome.MISSING] * len(keys)
        try:
            for i, outcome in self._read_pinned(keys, buffers, pinned, era):
                outcomes[i] = outcome
        finally:
            self._slabs.unpin(location.slot for location in pinned.values())
        return outcomes if self._era == era else [Outcome.MISSING] * len(keys)

    def _pin(self, keys: Sequence[Key]) -> dict[int, Location]:
        """Where the keys lie that are there, by place in the batch; their slots stay theirs until `unpin`."""
        found = [(i, location) for i, location in enumerate(self._index.lookup(keys)) if location is not None]
        pinned = self._slabs.pin([(location.slot, location.sequence) for _, location in found])
        return dict(compress(found, pinned))

    def _read_pinned(
        self, keys: Sequence[Key], buffers: Sequence[Buffer], pinned: dict[int, Location], era: Era
    ) -> Iterator[tuple[int, Outcome]]:
        fitting = []
        for i, location in pinned.items():
            if location.nbytes == len(buffers[i]):
                fitting.append(i)
            else:
                yield i, self._reject(era, keys[i], location)
        slots = [pinned[i].slot for i in fitting]
        with Frames(self._scratch, [buffers[i] for i in fitting], self._plan.block, self._opened.direct) as frames:
            errors = self._slabs.read(slots, frames)
            for i, frame, error in zip(fitting, frames, errors, strict=True):
                if error is not None:
                    yield i, self._faulted(era, keys[i], pinned[i], error)
                elif flaw_of(frame.header, frame.payload, era.stamp, keys[i]) is None:
                    yield i, Outcome.OK
                else:
                    yield i, self._reject(era, keys[i], pinned[i], frame)

    def _reject(self, era: Era, key: Key, location: Location, frame: Frame | None = None) -> Outcome:
        """What was read is not what was stored: the entry goes, unless it had gone already."""
        try:
            if not self._doom_at(key, location):
                return Outcome.MISSING
        except TierError as error:
            return Outcome.failed(error)
        if frame is not None:
            self._opened.quarantine.keep(f"{location.sequence:016x}", frame.header, frame.payload)
            self._slabs.fault(location.slot)
        self._commit(era)
        return Outcome.CORRUPT

    def _faulted(self, era: Era, key: Key, location: Location, error: OSError) -> Outcome:
        """The medium failed on a slot. The second time the slot is not used any more."""
        cause = TierUnavailable(f"a chunk can't be read: {error.strerror}")
        cause.__cause__ = error
        if self._slabs.fault(location.slot):
            try:
                if self._doom_at(key, location):
                    with self._lock:
                        self._vanished.append(key)
                    self._commit(era)
            except TierError:
                pass  # the entry stays, and is tried again by the next reader
        return Outcome.failed(cause)

    # -- removing

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        with self._calls:
            era = self._era
            if era is None:
                return [Outcome.MISSING] * len(keys)
            try:
                doomed = self._doom(keys, self._index.lookup(keys))
                error = self._commit(era)
            except TierError as failed:
                return [Outcome.failed(failed)] * len(keys)
            there = Outcome.OK if error is None else Outcome.failed(error)
            return [there if was else Outcome.MISSING for was in doomed]

    def _doom(self, keys: Sequence[Key], found: Sequence[Location | None]) -> list[bool]:
        """Marks keys to go with the next commit; which of them were there and not marked yet."""
        return [
            location is not None and self._doom_found(key, location)
            for key, location in zip(keys, found, strict=True)
        ]

    def _doom_at(self, key: Key, location: Location) -> bool:
        """Marks a key to go, if it still lies where it was found."""
        return self._index.lookup([key])[0] == location and self._doom_found(key, location)

    def _doom_found(self, key: Key, location: Location) -> bool:
        with self._lock:
            if key in self._ledger.doomed or not self._slabs.holds(location.slot, location.sequence):
                return False
            self._ledger.doom(key, location)
            return True

    # -- writing

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        with self._calls:
            era = self._era
            if era is None:
                return [Outcome.REFUSED] * len(keys)
            try:
                found = self._index.lookup([*victims, *keys])
            except TierError as error:
                return [Outcome.failed(error)] * len(keys)
            self._doom(victims, found[: len(victims)])
            outcomes: dict[Key, Outcome] = {}
            chunks = self._admit(keys, buffers, found[len(victims) :], outcomes)
            outcomes |= self._store(era, chunks)
            if any(
                victim in self._ledger.doomed for victim in victims
            ):  # nothing was written that took them along
                self._commit(era)
            return [outcomes[key] for key in keys]

    def _admit(
        self,
        keys: Sequence[Key],
        buffers: Sequence[Buffer],
        there: Sequence[Location | None],
        outcomes: dict[Key, Outcome],
    ) -> dict[Key, Buffer]:
        """The chunks to write; puts the outcome of the others into `outcomes`."""
        admitted: dict[Key, Buffer] = {}
        with self._lock:
            for key, buffer, location in zip(keys, buffers, there, strict=True):
                if key in admitted or key in outcomes:
                    continue
                if location is not None and key not in self._ledger.doomed:
                    outcomes[key] = Outcome.OK
                elif self._takes(key, buffer) and self._ledger.admit(len(buffer), self._capacity):
                    admitted[key] = buffer
                else:
                    outcomes[key] = Outcome.REFUSED
        return admitted

    def _takes(self, key: Key, buffer: Buffer) -> bool:
        return 0 < len(key) <= MAX_KEY_BYTES and self.footprint(len(buffer)) <= self._plan.extent_bytes

    def _store(self, era: Era, chunks: dict[Key, Buffer]) -> dict[Key, Outcome]:
        """Writes and commits admitted chunks, in portions for which there are slots."""
        outcomes: dict[Key, Outcome] = {}
        left = list(chunks)
        deadline = time.monotonic() + self.patience
        while left:
            size = self.footprint(len(chunks[left[0]]))
            alike = next((n for n, key in enumerate(left) if self.footprint(len(chunks[key])) != size), len(left))
            sequences = self._sequences(min(alike, PORTION))
            slots = self._slabs.take(size, sequences)
            if slots:
                now = time.time()
                locations = [
                    Location(slot, len(chunks[key]), sequence, now)
                    for key, slot, sequence in zip(left, slots, sequences, strict=False)
                ]
                portion = dict(zip(left, locations, strict=False))
                outcomes |= self._write_portion(era, portion, chunks)
            elif self._make_free(era, deadline):
                continue
            else:
                outcomes[left[0]] = Outcome.REFUSED
                self._give_up(len(chunks[left[0]]))
            left = left[max(1, len(slots)) :]
        return outcomes

    def _make_free(self, era: Era, deadline: float) -> bool:
        """Tries to free a slot: of what is doomed, else of what readers still use."""
        with self._lock:
            doomed = bool(self._ledger.doomed)
        if doomed:
            return self._commit(era) is None
        return self._slabs.wait_for_readers(max(0.0, deadline - time.monotonic()))

    def _write_portion(
        self, era: Era, portion: dict[Key, Location], chunks: dict[Key, Buffer]
    ) -> dict[Key, Outcome]:
        keys = list(portion)
        payloads = [chunks[key] for key in keys]
        slots = [location.slot for location in portion.values()]
        with Frames(self._scratch, payloads, self._plan.block, self._opened.direct) as frames:
            self._seal(era, frames, portion)
            errors = self._slabs.write(slots, frames)
        if self._durable and None in errors:
            errors = self._synced(slots, errors)
        outcomes = {}
        for key, error in zip(keys, errors, strict=True):
            if error is not None:
                outcomes[key] = self._not_written(portion.pop(key), error)
        return outcomes | self._publish(era, portion)

    def _seal(self, era: Era, frames: Sequence[Frame], portion: dict[Key, Location]) -> None:
        for frame, (key, location) in zip(frames, portion.items(), strict=True):
            total = checksum(frame.payload)
            envelope = Envelope(era.stamp, key, location.nbytes, location.written, location.sequence, total)
            frame.header[:] = pack(envelope, self._plan.block)

    def _synced(self, slots: Sequence[Slot], errors: list[OSError | None]) -> list[OSError | None]:
        try:
            self._slabs.sync(slots)
        except OSError as error:
            return [already or error for already in errors]
        return errors

    def _not_written(self, location: Location, error: OSError) -> Outcome:
        self._slabs.fault(location.slot)
        self._slabs.release([location.slot])
        self._give_up(location.nbytes)
        cause = TierUnavailable(f"a chunk can't be written: {error.strerror}")
        cause.__cause__ = error
        return Outcome.failed(cause)

    def _give_up(self, nbytes: int) -> None:
        with self._lock:
            self._ledger.settle(nbytes, there=False)

    def _sequences(self, count: int) -> range:
        """Numbers that no earlier write has, in this opening or another: the time in ns, advanced if need be."""
        with self._lock:
            first = max(self._sequence + 1, time.time_ns())
            self._sequence = first + count - 1
            return range(first, first + count)

    # -- committing

    def _publish(self, era: Era, portion: dict[Key, Location]) -> dict[Key, Outcome]:
        """Makes written chunks findable, unless the epoch has moved on meanwhile. A key that another writer has
        brought first keeps that one's bytes."""
        written = Written(era, portion)
        self._written.append(written)
        with self._committing:
            if self._written:  # else somebody has committed it together with theirs
                self._publish_all([self._written.popleft() for _ in range(len(self._written))])
        return dict.fromkeys(portion, written.outcome)

    def _publish_all(self, group: Sequence[Written]) -> None:
        """One transaction for all that was written while others committed."""
        era = self._era  # a move may end it meanwhile
        current = [written for written in group if written.era == era]
        added = [item for written in current for item in written.portion.items()]
        outcome, new = Outcome.OK, [False] * len(added)
        try:
            new = self._transact(era, added)
        except TierRefused:
            outcome = Outcome.REFUSED
        except TierError as error:
            outcome = Outcome.failed(error)
        for written in current:
            written.outcome = outcome
        late = [at for written in group if written.era != era for at in written.portion.values()]
        self._settle([at for _, at in added] + late, new + [False] * len(late))

    def _settle(self, locations: Sequence[Location], there: Sequence[bool]) -> None:
        """Ends the admission of chunks: they are findable now, or their slots are free again."""
        slots = [location.slot for location in locations]
        with self._lock:
            for location, is_there in zip(locations, there, strict=True):
                self._ledger.settle(location.nbytes, is_there)
            self._slabs.publish(compress(slots, there))
            self._slabs.release(slot for slot, is_there in zip(slots, there, strict=True) if not is_there)

    def _commit(self, era: Era | None) -> TierError | None:
        """Removes what is doomed from the index. Returns what went wrong; then it goes with a later commit."""
        with self._committing:
            try:
                self._transact(era, [])
            except TierError as error:
                return error
        return None

    def _transact(self, era: Era | None, added: list[tuple[Key, Location]]) -> list[bool]:
        """One transaction: all that is doomed goes, `added` comes. Returns which were not there already."""
        if era is None or era != self._era:
            raise TierRefused("the epoch has moved on")
        with self._lock:
            doomed = list(self._ledger.doomed)
        if not doomed and not added:
            return []
        new = self._index.commit(doomed, added)
        with self._lock:
            self._slabs.release(location.slot for location in self._ledger.removed(doomed))
        return new

    def move_to(self, epoch: str) -> None:
        with self._calls:
            self._era = None  # nothing is served from here on, until it is known that the old chunks are void
            with self._committing:
                self._begin_era(epoch)

    def _begin_era(self, epoch: str) -> None:
        try:
            begun = Epoch.begin(self._opened.folder.path, epoch, "reset")
        except OSError as error:
            raise TierUnavailable(f"the mark of the new epoch can't be written: {error.strerror}") from error
        self._index.reset(begun.mark)
        with self._lock:
            self._ledger.clear()
            self._touched.clear()
            self._appeared.clear()
            self._slabs.release_all()
        self._scan_is_over()
        self._era = self._era_of(begun)

    def _era_of(self, epoch: Epoch) -> Era:
        return Era(epoch.mark, self._opened.namespace.stamp(epoch.mark))

    # -- housekeeping

    def touch(self, keys: Sequence[Key]) -> None:
        with self._calls, self._lock:
            now = max(time.time(), self._last_tick)
            for key in keys:
                now += TICK
                before = self._touched.pop(key, None)
                self._touched[key] = Use(now, before.uses if before else 0)
            self._last_tick = now

    def note_uses(self, uses: Mapping[Key, int]) -> None:
        with self._calls, self._lock:
            for key, count in uses.items():
                if key in self._touched:
                    self._touched[key] = self._touched[key]._replace(uses=count)

    def maintain(self, budget: float) -> Changes:
        with self._calls:
            end = self._clock() + budget
            if self._maintaining.acquire(blocking=False):
                try:
                    if self._clock() - self._persisted >= PERSIST_EVERY:
                        self._persist_recency()
                    while self._scan is not None and self._clock() < end:
                        self._scan_slice()
                finally:
                    self._maintaining.release()
            with self._lock:
                changes = Changes(tuple(self._appeared), tuple(self._vanished))
                self._appeared, self._vanished = [], []
            return changes

    def _persist_recency(self) -> None:
        self._persisted = self._clock()
        while True:
            with self._lock:
                batch = {key: self._touched[key] for key in list(self._touched)[:RECENCY_BATCH]}
            if not batch:
                return
            with self._committing:
                self._index.note_used(batch)
            with self._lock:
                for key, use in batch.items():
                    if self._touched.get(key) == use:
                        del self._touched[key]

    def _scan_slice(self) -> None:
        """Takes the next chunks into the index that a power cut has left without them."""
        scan, era = self._scan, self._era
        if scan is None or era is None:
            return
        found = scan.slice()
        with self._committing:
            if self._era != era:
                return
            if not found:
                self._scan_is_over()
                return
            kept = self._newest(found, era.stamp)
            try:
                self._transact(era, list(kept.items()))
            finally:
                self._settle_scanned(found, kept)

    def _newest(self, found: Sequence[tuple[Slot, Envelope | None]], stamp: bytes) -> dict[Key, Location]:
        """Of what was found: chunks of this epoch, newer than what the index has, as far as they fit."""
        newest: dict[Key, Location] = {}
        for slot, envelope in sorted(found, key=lambda one: one[1].sequence if one[1] else 0):
            if envelope and envelope.stamp == stamp and self._slabs.fits(slot, envelope.nbytes):
                newest[envelope.key] = Location(slot, envelope.nbytes, envelope.sequence, envelope.written)
        known = self._index.lookup(list(newest))
        kept = {}
        with self._lock:
            for (key, location), old in zip(newest.items(), known, strict=True):
                if old is not None and old.sequence >= location.sequence:
                    continue
                if old is not None and key not in self._ledger.doomed:
                    self._ledger.doom(key, old)
                if self._ledger.admit(location.nbytes, self._capacity):
                    kept[key] = location
                self._sequence = max(self._sequence, location.sequence)
        return kept

    def _settle_scanned(self, found: Sequence[tuple[Slot, Envelope | None]], kept: dict[Key, Location]) -> None:
        there = {
            key: location
            for (key, location), known in zip(kept.items(), self._index.lookup(list(kept)), strict=True)
            if known == location
        }
        slots = {location.slot: location.sequence for location in there.values()}
        for slot, _ in found:
            self._slabs.settle(slot, slots.get(slot))
        with self._lock:
            for key, location in kept.items():
                self._ledger.settle(location.nbytes, key in there)
            self._appeared += [Entry(key, at.nbytes, at.written, at.written) for key, at in there.items()]

    def _scan_is_over(self) -> None:
        if self._scan is None:
            return
        self._scan = None
        try:
            self._opened.session.write(self._opened.folder.path)
        except OSError as error:
            log.warning("%s: a restart will look for chunks again: %s", self._opened.folder.path, error.strerror)

    def close(self) -> None:
        if not self._calls.close():
            return
        try:
            self._persist_recency()
            self._index.sync()
            self._slabs.sync()
            if self._scan is None:
                replace(self._opened.session, clean=True).write(self._opened.folder.path)
        except (TierError, OSError) as error:
            log.warning("%s: was not closed cleanly: %s", self._opened.folder.path, error)
        finally:
            self._opened.close()
