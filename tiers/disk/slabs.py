"""Slabs: where chunks lie. Extents of equal slots, which of them are free, and moving bytes in and out."""

import contextlib
import logging
import mmap
import os
import re
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvcascade.tiers.blocks import (
    MAX_CALL_BYTES,
    MAX_VIEWS,
    Frame,
    allocate,
    open_blocks,
    read_at,
    sync_data,
    write_at,
)
from kvcascade.tiers.files import sync_folder

from .plan import EXTENT_PER_SLOT, Plan, extent_cost, footprint

__all__ = ["EXTENT_NAME", "Extent", "Slabs", "Slot", "extents_in"]

log = logging.getLogger("kvcascade.tiers.disk")

EXTENT_NAME = re.compile(r"extent-(\d{6})-(\d{1,15})\.slab")
FAULTS_TO_RETIRE = 2

FREE, WRITING, LIVE, LIMBO, UNSCANNED, RETIRED = range(6)
_RELEASED = bytes(FREE if state in (LIVE, UNSCANNED) else state for state in range(256))
_CLOSED = bytes(RETIRED if state == FREE else state for state in range(256))


class Slot(NamedTuple):
    extent: int
    place: int


class Neighbours(Protocol):
    """What others left in the same engine folder, and must make room."""

    @property
    def nbytes(self) -> int: ...

    def drop_oldest(self) -> bool:
        """Removes one; False where there is none left."""
        ...


class Extent:
    """One file of `slots` slots of `slot_bytes` each. The file's name says the size, its length the number."""

    def __init__(self, path: Path, number: int, slot_bytes: int, slots: int, fd: int) -> None:
        self.path = path
        self.number = number
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.fd = fd
        self.free = slots
        self.states = bytearray(slots)
        self.sequences = array("Q", bytes(8 * slots))
        """Of the write that each slot was last given to: tells a reader whether it still means the same chunk."""

    @property
    def cost(self) -> int:
        return extent_cost(self.slots, self.slot_bytes)

    def take(self, wanted: int) -> list[int]:
        """Up to `wanted` free places, neighbours where there are that many in a row."""
        wanted = min(wanted, self.free)
        start = self.states.find(bytes([FREE]) * wanted)
        if start >= 0:
            return list(range(start, start + wanted))
        places = []
        for _ in range(wanted):
            start = self.states.find(FREE, start + 1)
            places.append(start)
        return places


def extents_in(folder: Path) -> Iterator[tuple[Path, int, int, int]]:
    """(path, number, slot bytes, file bytes) of the extents in `folder`, by number."""
    for path in sorted(folder.iterdir()):
        if match := EXTENT_NAME.fullmatch(path.name):
            yield path, int(match[1]), int(match[2]), path.stat().st_size


class Slabs:
    """The extents of one namespace.

    Thread-safe. `_lock` guards the maps and is never held over I/O; `_growing` lets one thread at a time create
    an extent. A slot goes FREE -> WRITING (`take`) -> LIVE (`publish`) -> FREE (`release`), by way of LIMBO while
    a reader still uses it. `pin` works only while the slot holds the write that the reader means.
    """

    def __init__(self, folder: Path, plan: Plan, direct: bool, durable: bool, neighbours: Neighbours) -> None:
        self._folder = folder
        self._plan = plan
        self._direct = direct
        self._durable = durable
        self._neighbours = neighbours
        self._lock = threading.Lock()
        self._unpinned = threading.Condition(self._lock)
        self._growing = threading.Lock()
        self._extents: dict[int, Extent] = {}
        self._pins: dict[Slot, int] = {}
        self._faults: dict[Slot, int] = {}
        self._said_full = False
        self.allocated = 0
        """Bytes that the extents take, the file system's share included."""
        self.retired = 0
        """Bytes of slots that are not used any more."""
        try:
            self._load()
        except OSError:
            self.close()
            raise

    def _load(self) -> None:
        for path, number, slot_bytes, nbytes in extents_in(self._folder):
            slots = nbytes // slot_bytes if slot_bytes and slot_bytes % self._plan.block == 0 else 0
            if not slots:  # a process died while it made the file
                path.unlink()
                continue
            if nbytes % slot_bytes:
                os.truncate(path, slots * slot_bytes)
            self._add(Extent(path, number, slot_bytes, slots, open_blocks(path, self._direct)))

    def _add(self, extent: Extent) -> None:
        self._extents[extent.number] = extent
        self.allocated += extent.cost

    @property
    def extents(self) -> list[Extent]:
        with self._lock:
            return list(self._extents.values())

    # -- slots

    def take(self, slot_bytes: int, sequences: Sequence[int]) -> list[Slot]:
        """Slots for as many of `sequences` as there is room for, from the first on."""
        slots = self._take_free(slot_bytes, sequences)
        while len(slots) < len(sequences):
            with self._growing:
                more = self._take_free(slot_bytes, sequences[len(slots) :])
                if not more and not self._grow(slot_bytes):
                    break
            slots += more
        if len(slots) < len(sequences):
            slots += self._take_larger(slot_bytes, sequences[len(slots) :])
        return slots

    def _take_free(self, slot_bytes: int, sequences: Sequence[int]) -> list[Slot]:
        with self._lock:
            return self._take_from((e for e in self._extents.values() if e.slot_bytes == slot_bytes), sequences)

    def _take_larger(self, slot_bytes: int, sequences: Sequence[int]) -> list[Slot]:
        with self._lock:
            larger = [extent for extent in self._extents.values() if extent.slot_bytes > slot_bytes]
            return self._take_from(sorted(larger, key=lambda extent: extent.slot_bytes), sequences)

    def _take_from(self, extents: Iterable[Extent], sequences: Sequence[int]) -> list[Slot]:
        slots: list[Slot] = []
        for extent in extents:
            if len(slots) == len(sequences):
                break
            for place in extent.take(len(sequences) - len(slots)) if extent.free else ():
                extent.states[place] = WRITING
                extent.sequences[place] = sequences[len(slots)]
                extent.free -= 1
                slots.append(Slot(extent.number, place))
        return slots

    def publish(self, slots: Iterable[Slot]) -> None:
        """The writes of these slots are committed."""
        with self._lock:
            for slot in slots:
                self._extents[slot.extent].states[slot.place] = LIVE

    def release(self, slots: Iterable[Slot]) -> None:
        """Nothing points to these slots any more: they are free once no reader uses them."""
        with self._lock:
            for slot in slots:
                self._release(self._extents[slot.extent], slot)

    def _release(self, extent: Extent, slot: Slot) -> None:
        if slot in self._pins:
            extent.states[slot.place] = LIMBO
            return
        if self._faults.get(slot, 0) >= FAULTS_TO_RETIRE:
            extent.states[slot.place] = RETIRED
            self.retired += extent.slot_bytes
            return
        extent.states[slot.place] = FREE
        extent.free += 1
        self._unpinned.notify_all()

    def release_all(self) -> None:
        """Frees whatever is committed or not looked at yet; slots being written belong to their writers."""
        with self._lock:
            read = [slot for slot in self._pins if self._extents[slot.extent].states[slot.place] in (LIVE, LIMBO)]
            for extent in self._extents.values():
                extent.states = extent.states.translate(_RELEASED)
            for slot in read:
                self._extents[slot.extent].states[slot.place] = LIMBO
            for extent in self._extents.values():
                extent.free = extent.states.count(FREE)
            self._unpinned.notify_all()

    def adopt(self, records: "np.ndarray[Any, np.dtype[Any]]") -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Takes slots as committed that an index lists (`extent`, `place`, `nbytes`, `sequence`). Returns which of
        the records are good: not those of slots that don't exist, are too small, or belong to another record."""
        taken = np.zeros(len(records), bool)
        for extent in self.extents:
            rows = np.flatnonzero(records["extent"] == extent.number)
            rows = rows[records["place"][rows] < extent.slots]
            rows = rows[records["nbytes"][rows] <= extent.slot_bytes - self._plan.block]
            places, first = np.unique(records["place"][rows], return_index=True)
            rows = rows[first]
            np.frombuffer(extent.states, np.uint8)[places] = LIVE
            np.frombuffer(extent.sequences, np.uint64)[places] = records["sequence"][rows]
            extent.free -= len(rows)
            taken[rows] = True
        return taken

    def hold_for_scan(self) -> None:
        """Takes every slot out of use until `settle` has said what it holds."""
        for extent in self.extents:
            extent.states = bytearray([UNSCANNED]) * extent.slots
            extent.free = 0

    def settle(self, slot: Slot, sequence: int | None) -> None:
        """Ends the wait of a slot: it holds this write, or nothing."""
        with self._lock:
            extent = self._extents[slot.extent]
            if sequence is None:
                self._release(extent, slot)
            else:
                extent.states[slot.place] = LIVE
                extent.sequences[slot.place] = sequence

    def fits(self, slot: Slot, nbytes: int) -> bool:
        """Whether the slot is large enough for a payload of `nbytes`."""
        return footprint(nbytes, self._plan.block) <= self._extents[slot.extent].slot_bytes

    def holds(self, slot: Slot, sequence: int) -> bool:
        """Whether the slot still holds this write."""
        with self._lock:
            return self._holds(slot, sequence)

    def _holds(self, slot: Slot, sequence: int) -> bool:
        extent = self._extents.get(slot.extent)
        if extent is None or slot.place >= extent.slots or extent.sequences[slot.place] != sequence:
            return False
        return extent.states[slot.place] in (LIVE, WRITING)  # a commit is seen just before its `publish`

    def pin(self, writes: Sequence[tuple[Slot, int]]) -> list[bool]:
        """Keeps slots from being used again until `unpin`; False for one that holds another write by now."""
        with self._lock:
            pinned = [self._holds(slot, sequence) for slot, sequence in writes]
            for (slot, _), holds in zip(writes, pinned, strict=True):
                if holds:
                    self._pins[slot] = self._pins.get(slot, 0) + 1
            return pinned

    def unpin(self, slots: Iterable[Slot]) -> None:
        with self._lock:
            for slot in slots:
                self._pins[slot] -= 1
                if self._pins[slot]:
                    continue
                del self._pins[slot]
                extent = self._extents[slot.extent]
                if extent.states[slot.place] == LIMBO:
                    self._release(extent, slot)

    def wait_for_readers(self, timeout: float) -> bool:
        """Waits until some slot has become free; False where none is about to, or it takes too long."""
        with self._unpinned:
            return bool(self._pins) and self._unpinned.wait(timeout)

    def fault(self, slot: Slot) -> bool:
        """Counts a fault of the medium; True where the slot must not be used again once it is released."""
        with self._lock:
            self._faults[slot] = self._faults.get(slot, 0) + 1
            return self._faults[slot] >= FAULTS_TO_RETIRE

    # -- extents

    def _grow(self, slot_bytes: int) -> bool:
        slots = self._slots_of_a_new_extent(slot_bytes)
        while not slots and (self._neighbours.drop_oldest() or self._drop_empty(slot_bytes)):
            slots = self._slots_of_a_new_extent(slot_bytes)
        if not slots:
            return False
        with self._lock:
            number = next(n for n in range(len(self._extents) + 1) if n not in self._extents)
        path = self._folder / f"extent-{number:06d}-{slot_bytes}.slab"
        try:
            extent = Extent(path, number, slot_bytes, slots, self._create(path, slots * slot_bytes))
        except OSError as error:
            if not self._said_full:
                log.warning("no space for another extent of %s: %s", self._folder, error.strerror)
            self._said_full = True
            return False
        with self._lock:
            self._add(extent)
        self._said_full = False
        return True

    @property
    def excess(self) -> int:
        """Bytes that the extents and the neighbours take beyond the plan; negative where there is room."""
        return self.allocated + self._neighbours.nbytes - self._plan.slabs

    def _slots_of_a_new_extent(self, slot_bytes: int) -> int:
        fitting = max(0, -self.excess - extent_cost(0, slot_bytes)) // (slot_bytes + EXTENT_PER_SLOT)
        return min(fitting, self._plan.extent_bytes // slot_bytes)

    def _create(self, path: Path, nbytes: int) -> int:
        fd = open_blocks(path, self._direct, create=True)
        try:
            allocate(fd, nbytes)
            if self._durable:
                os.fsync(fd)
                sync_folder(self._folder)
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        return fd

    def _drop_empty(self, wanted: int) -> bool:
        """Gives up an extent of another slot size that holds nothing."""
        with self._lock:
            empty = [e for e in self._extents.values() if e.free == e.slots and e.slot_bytes != wanted]
            if not empty:
                return False
            extent = self._extents.pop(empty[0].number)
        self._remove(extent)
        return True

    def _remove(self, extent: Extent) -> None:
        os.close(extent.fd)
        extent.path.unlink(missing_ok=True)
        self.allocated -= extent.cost
        self._faults = {slot: n for slot, n in self._faults.items() if slot.extent != extent.number}

    def vacate(self, extent: Extent, keep: int) -> None:
        """Gives out no slot of the extent from place `keep` on any more."""
        with self._lock:
            extent.states[keep:] = extent.states[keep:].translate(_CLOSED)
            extent.free = extent.states.count(FREE)

    def cut(self, extent: Extent, keep: int) -> None:
        """Gives up the slots of the extent from place `keep` on, with all that they hold. For the time before the
        first reader.

        Raises:
            OSError: the medium failed.
        """
        if not keep:
            with self._lock:
                del self._extents[extent.number]
            self._remove(extent)
            return
        os.ftruncate(extent.fd, keep * extent.slot_bytes)
        self.allocated -= extent.cost
        extent.slots = keep
        extent.states = extent.states[:keep]
        extent.sequences = extent.sequences[:keep]
        extent.free = extent.states.count(FREE)
        self.allocated += extent.cost

    # -- bytes

    def write(self, slots: Sequence[Slot], frames: Sequence[Frame]) -> list[OSError | None]:
        """Writes each frame into its slot; neighbours go in one call. What went wrong, by frame."""
        for frame in frames:
            if len(frame.detour):
                frame.before_write()
        return self._transfer(write_at, slots, frames)

    def read(self, slots: Sequence[Slot], frames: Sequence[Frame]) -> list[OSError | None]:
        """Reads each slot into its frame. What went wrong, by frame; a slot beyond the end of a truncated file
        leaves a header of zeros."""
        for frame in frames:
            frame.header[:] = bytes(len(frame.header))
        errors = self._transfer(read_at, slots, frames)
        for frame in frames:
            frame.after_read()
        return errors

    def _transfer(
        self,
        move: Callable[[int, Sequence[memoryview], int], object],
        slots: Sequence[Slot],
        frames: Sequence[Frame],
    ) -> list[OSError | None]:
        errors: list[OSError | None] = [None] * len(slots)
        runs = list(self._runs(slots, frames))
        while runs:
            run = runs.pop()
            extent = self._extents[slots[run[0]].extent]
            views = [view for i in run for view in frames[i].views]
            try:
                move(extent.fd, views, slots[run[0]].place * extent.slot_bytes)
            except OSError as error:
                if len(run) > 1:  # find out whose it is
                    runs += [[i] for i in run]
                else:
                    errors[run[0]] = error
        return errors

    def _runs(self, slots: Sequence[Slot], frames: Sequence[Frame]) -> Iterator[list[int]]:
        """Indices of frames that lie one after the other on the disk, few enough for one call."""
        run: list[int] = []
        views = nbytes = 0
        for i in sorted(range(len(slots)), key=slots.__getitem__):
            frame = frames[i]
            extent = self._extents[slots[i].extent]
            follows = run and slots[i] == (slots[run[-1]].extent, slots[run[-1]].place + 1)
            full = views + 3 > MAX_VIEWS or nbytes + frame.nbytes > MAX_CALL_BYTES
            if run and (not follows or full or frames[run[-1]].nbytes != extent.slot_bytes):
                yield run
                run, views, nbytes = [], 0, 0
            run.append(i)
            views += 3
            nbytes += frame.nbytes
        if run:
            yield run

    def read_raw(self, slot: Slot, memory: memoryview) -> int:
        """Reads the slot's first bytes into aligned memory; returns how many there were.

        Raises:
            OSError: the medium failed.
        """
        extent = self._extents[slot.extent]
        return read_at(extent.fd, [memory], slot.place * extent.slot_bytes)

    def copy(self, source: Slot, target: Slot, nbytes: int) -> None:
        """Copies the first `nbytes` (whole blocks) of one slot to another.

        Raises:
            OSError: the medium failed.
        """
        memory = memoryview(mmap.mmap(-1, nbytes))
        self.read_raw(source, memory)
        extent = self._extents[target.extent]
        write_at(extent.fd, [memory], target.place * extent.slot_bytes)

    def sync(self, slots: Iterable[Slot] | None = None) -> None:
        """Makes what was written durable: in the extents of these slots, or in all of them.

        Raises:
            OSError: the medium failed.
        """
        numbers = None if slots is None else {slot.extent for slot in slots}
        for extent in self.extents:
            if numbers is None or extent.number in numbers:
                sync_data(extent.fd)

    def close(self) -> None:
        with self._lock:
            extents, self._extents = self._extents, {}
        for extent in extents.values():
            with contextlib.suppress(OSError):
                os.close(extent.fd)
