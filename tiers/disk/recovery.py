"""What a start finds: an index that can be trusted, fitted to the capacity, or envelopes to build one from."""

import logging
import mmap
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvcascade.tiers.envelope import Envelope, Flaw, parse

from .index import LmdbIndex, Location, Row
from .plan import EXTENT_PER_SLOT, Plan, footprint
from .slabs import Slabs, Slot

__all__ = ["Found", "Scan", "adopt", "fit", "shorten"]

log = logging.getLogger("kvcascade.tiers.disk")

BATCH = 256
"""Entries that are changed in one transaction."""


INDEX_ENTRY = 48
"""Bytes that an entry takes in the index beyond its key, in pages that may be half empty."""


class Found(NamedTuple):
    """All that an index lists and that is there."""

    chunks: int
    bytes: int
    """Of the slots that the chunks need."""
    sequence: int
    """The highest one."""


def adopt(index: LmdbIndex, slabs: Slabs, block: int) -> Found:
    """Takes the slots that the index lists as used, without reading any of them. What points to no slot, or to
    one that another entry has, is removed from the index.

    Raises:
        TierError: the index can't be read or written.
    """
    keys, records = index.records()
    taken = slabs.adopt(records)
    if strays := [key for key, good in zip(keys, taken.tolist(), strict=True) if not good]:
        log.warning("%s: %d entries without their chunk are removed", index.path, len(strays))
        index.commit(strays, [])
    good = records[taken]
    slots = block + -(-good["nbytes"].astype(np.int64) // block) * block
    return Found(len(good), int(slots.sum()), int(good["sequence"].max(initial=0)))


def fit(index: LmdbIndex, slabs: Slabs, plan: Plan, found: Found) -> Found:
    """Drops the least recently used chunks until the others fit in the capacity, and gives back the room of
    extents beyond the plan, moving chunks out of it.

    Raises:
        TierError: the index can't be read or written.
        OSError: the medium failed.
    """
    if found.bytes <= plan.capacity and slabs.excess <= 0 and index.live_bytes() <= plan.index_limit:
        return found
    kept, dropped = _divide(index, plan)
    _forget(index, dropped)
    slabs.release(row.location.slot for row in dropped)
    moved, lost = _give_back(index, slabs, plan, kept)
    log.warning(
        "%s: %d chunks were dropped and %d moved to fit into the capacity", index.path, len(dropped) + lost, moved
    )
    return _sums(index, plan.block)


def _sums(index: LmdbIndex, block: int) -> Found:
    """The sums of what the index lists."""
    rows = list(index.rows())
    slots = (footprint(row.location.nbytes, block) for row in rows)
    return Found(len(rows), sum(slots), max((row.location.sequence for row in rows), default=0))


def _divide(index: LmdbIndex, plan: Plan) -> tuple[list[Row], list[Row]]:
    """Rows to keep and rows to drop."""
    rows = sorted(index.rows(), key=lambda row: row.used, reverse=True)
    left, index_left = plan.capacity, plan.index_limit
    for place, row in enumerate(rows):
        left -= footprint(row.location.nbytes, plan.block)
        index_left -= 2 * (len(row.key) + INDEX_ENTRY)
        if left < 0 or index_left < 0:
            return rows[:place], rows[place:]
    return rows, []


def _forget(index: LmdbIndex, rows: list[Row]) -> None:
    for start in range(0, len(rows), BATCH):
        index.commit([row.key for row in rows[start : start + BATCH]], [])


def shorten(slabs: Slabs) -> None:
    """Gives back the room of extents beyond the plan, with all that lies in it.

    Raises:
        OSError: the medium failed.
    """
    for extent in reversed(slabs.extents):
        if slabs.excess <= 0:
            return
        slabs.cut(extent, _kept(slabs, extent.slots, extent.slot_bytes))


def _kept(slabs: Slabs, slots: int, slot_bytes: int) -> int:
    return max(0, slots - -(-slabs.excess // (slot_bytes + EXTENT_PER_SLOT)))


def _give_back(index: LmdbIndex, slabs: Slabs, plan: Plan, rows: list[Row]) -> tuple[int, int]:
    """Moves chunks out of the ends of extents until these can be cut off; (chunks moved, chunks lost)."""
    by_slot = {row.location.slot: row for row in rows}
    moved = lost = 0
    for extent in reversed(slabs.extents):
        if slabs.excess <= 0:
            break
        keep = _kept(slabs, extent.slots, extent.slot_bytes)
        slabs.vacate(extent, keep)
        leaving = [by_slot[slot] for p in range(keep, extent.slots) if (slot := Slot(extent.number, p)) in by_slot]
        for start in range(0, len(leaving), BATCH):
            homeless = _move(index, slabs, plan, leaving[start : start + BATCH])
            _forget(index, homeless)
            lost += len(homeless)
        moved += len(leaving)
        slabs.cut(extent, keep)
    return moved - lost, lost


def _move(index: LmdbIndex, slabs: Slabs, plan: Plan, rows: list[Row]) -> list[Row]:
    """Copies chunks to other slots; returns those for which there is none."""
    moves: list[tuple[bytes, Location]] = []
    homeless = []
    for row in rows:
        old = row.location
        nbytes = footprint(old.nbytes, plan.block)
        slots = slabs.take(nbytes, [old.sequence])
        if not slots:
            homeless.append(row)
            continue
        slabs.copy(old.slot, slots[0], nbytes)
        moves.append((row.key, old._replace(slot=slots[0])))
    slabs.sync(location.slot for _, location in moves)
    index.move(moves)
    slabs.publish(location.slot for _, location in moves)
    return homeless


class Scan:
    """Looks through all slots for envelopes, in slices, after a power cut made the index worthless."""

    def __init__(self, slabs: Slabs, block: int) -> None:
        """Takes all slots out of use until they were looked at."""
        self._slabs = slabs
        self._block = block
        self._memory = memoryview(mmap.mmap(-1, max(block, mmap.PAGESIZE)))[:block]
        slabs.hold_for_scan()
        self._left: Iterator[Slot] = iter(
            [Slot(extent.number, place) for extent in slabs.extents for place in range(extent.slots)]
        )

    def slice(self) -> list[tuple[Slot, Envelope | None]]:
        """The next slots with what stands in them; [] at the end."""
        return [(slot, self._envelope(slot)) for slot in islice(self._left, BATCH)]

    def _envelope(self, slot: Slot) -> Envelope | None:
        self._memory[:] = bytes(self._block)
        try:
            self._slabs.read_raw(slot, self._memory)
        except OSError:
            self._slabs.fault(slot)
            return None
        envelope = parse(self._memory)
        return None if isinstance(envelope, Flaw) else envelope
