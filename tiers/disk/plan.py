"""How a capacity is divided: all that will ever lie in an engine's folder, fixed before the first write."""

from dataclasses import dataclass

from kvcascade.configs.units import format_size
from kvcascade.errors import ConfigError

__all__ = ["Plan", "extent_cost", "footprint", "plan"]

SMALL_FILES = 128 << 10
"""Folders, locks, marks and their temporary copies, rounded up to the file system's blocks."""
INDEX_BASE = 384 << 10
INDEX_PER_ENTRY = 320
"""Bytes of LMDB pages that an entry of a key up to 64 bytes and its recency take, at half-filled pages."""
SMALL_CHUNK = 64 << 10
"""Cache groups differ in size: the index has room for entries as if all chunks were no larger than this."""
INDEX_COPIES_PER_ENTRY = 1024
INDEX_COPIES = 16 << 20
"""LMDB copies a page to change it, and frees the old one two commits later: room for copies of large batches."""
EXTENT_BYTES = 256 << 20
EXTENTS_OF_A_SMALL_DISK = 16
EXTENTS = 512
"""A process may usually hold 1,024 files open; above 128 GiB extents grow instead of their number."""
EXTENT_BASE = 8 << 10
EXTENT_PER_SLOT = 16
"""What the file system itself may take to map an extent that is written slot by slot, in any order."""
RESERVE_SHARE = 32
RESERVE = 64
MIN_CHUNKS = 4
QUARANTINED = 4
"""Corrupt chunks that are kept for inspection, where that is asked for."""


def footprint(nbytes: int, block: int) -> int:
    """Bytes of a slot for `nbytes` payload bytes: header block, payload, rounded up to whole blocks."""
    return block + -(-nbytes // block) * block


def extent_cost(slots: int, slot_bytes: int) -> int:
    """Bytes that an extent takes, with the file system's own share."""
    return slots * (slot_bytes + EXTENT_PER_SLOT) + EXTENT_BASE


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes, where no other unit is said. Slots are those of the engine's largest chunk."""

    block: int
    slot_bytes: int
    slots: int
    """Slots that fit on the disk."""
    chunks: int
    """Slots that are advertised; the others keep stores from waiting for the commit that frees their victims'."""
    extent_slots: int
    index_bytes: int
    """LMDB's map size."""
    index_limit: int
    """Above this many bytes in live pages the index takes nothing new, so that deleting always finds room."""
    slabs: int
    """For extents, this namespace's and all others', and everything else that others left."""

    @property
    def capacity(self) -> int:
        return self.chunks * self.slot_bytes

    @property
    def extent_bytes(self) -> int:
        return self.extent_slots * self.slot_bytes


def plan(capacity: int, chunk_bytes: int, block: int, quarantine: bool = False) -> Plan:
    """Divides `capacity`.

    Raises:
        ConfigError: it does not hold a few chunks.
    """
    slot_bytes = footprint(chunk_bytes, block)
    fixed = SMALL_FILES + (QUARANTINED * slot_bytes if quarantine else 0)
    slots = max(0, (capacity - fixed - INDEX_BASE) // slot_bytes)
    while (
        slots > 0
        and (excess := fixed + _index_bytes(slots, slot_bytes) + _slabs(slots, slot_bytes) - capacity) > 0
    ):
        slots -= max(1, excess // (2 * slot_bytes))
    reserve = max(1, min(RESERVE, slots // RESERVE_SHARE))
    if slots - reserve < MIN_CHUNKS:
        raise ConfigError(_too_small(capacity, chunk_bytes, fixed, slot_bytes))
    return Plan(
        block=block,
        slot_bytes=slot_bytes,
        slots=slots,
        chunks=slots - reserve,
        extent_slots=_extent_slots(slots, slot_bytes),
        index_bytes=_index_bytes(slots, slot_bytes),
        index_limit=INDEX_BASE // 2 + _entries(slots, slot_bytes) * INDEX_PER_ENTRY,
        slabs=capacity - fixed - _index_bytes(slots, slot_bytes),
    )


def _extent_slots(slots: int, slot_bytes: int) -> int:
    usual = min(EXTENT_BYTES // slot_bytes, -(-slots // EXTENTS_OF_A_SMALL_DISK))
    return max(1, usual, -(-slots // EXTENTS))


def _entries(slots: int, slot_bytes: int) -> int:
    return max(slots, slots * slot_bytes // SMALL_CHUNK)


def _index_bytes(slots: int, slot_bytes: int) -> int:
    entries = _entries(slots, slot_bytes)
    exact = INDEX_BASE + entries * INDEX_PER_ENTRY + min(entries * INDEX_COPIES_PER_ENTRY, INDEX_COPIES)
    return -(-exact // 65536) * 65536


def _slabs(slots: int, slot_bytes: int) -> int:
    extent_slots = _extent_slots(slots, slot_bytes)
    return slots * (slot_bytes + EXTENT_PER_SLOT) + -(-slots // extent_slots) * EXTENT_BASE


def _too_small(capacity: int, chunk_bytes: int, fixed: int, slot_bytes: int) -> str:
    slots = MIN_CHUNKS + 1
    needed = fixed + _index_bytes(slots, slot_bytes) + _slabs(slots, slot_bytes)
    return (
        f"capacity: {format_size(capacity)} ({capacity} bytes) is too small for chunks of "
        f"{format_size(chunk_bytes)}: "
        f"at least {format_size(needed)} ({needed} bytes) hold {MIN_CHUNKS} of them, index included; "
        f"raise `capacity` or make the chunks smaller"
    )
