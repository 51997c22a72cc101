"""How a capacity is divided: nothing is forgotten, nothing wasted."""

import pytest

from kvcascade.errors import ConfigError
from kvcascade.tiers.disk.plan import SMALL_FILES, extent_cost, footprint, plan

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

SIZES = [
    (2 * MIB, 64 * KIB),
    (5_000_001, 64 * KIB),
    (64 * MIB, 4 * KIB),
    (64 * MIB, 1),
    (1 * GIB, 64 * KIB),
    (100 * GIB, 64 * KIB),
    (100 * GIB, 2 * MIB + 1),
    (100 * GIB, 256 * MIB),
    (4 * TIB, 1 * MIB),
    (4 * TIB, 600 * MIB),
]


@pytest.mark.parametrize("block", [512, 4096])
@pytest.mark.parametrize(("capacity", "chunk"), SIZES)
def test_all_parts_together_fill_the_capacity_and_no_more(capacity: int, chunk: int, block: int) -> None:
    made = plan(capacity, chunk, block)
    extents = [made.extent_slots] * (made.slots // made.extent_slots)
    if rest := made.slots % made.extent_slots:
        extents.append(rest)
    slabs = sum(extent_cost(slots, made.slot_bytes) for slots in extents)
    assert slabs <= made.slabs
    assert SMALL_FILES + made.index_bytes + made.slabs <= capacity
    assert capacity - (SMALL_FILES + made.index_bytes + slabs) < 3 * made.slot_bytes + capacity // 100
    assert 4 <= made.chunks < made.slots
    assert len(extents) <= 512
    assert made.index_bytes % 65536 == 0


@pytest.mark.parametrize("capacity", [1 * GIB, 100 * GIB, 4 * TIB])
def test_large_disks_lose_little(capacity: int) -> None:
    assert plan(capacity, MIB, 4096).capacity > 0.94 * capacity


def test_extents_are_of_256_mib_on_usual_disks() -> None:
    assert plan(100 * GIB, 64 * KIB, 4096).extent_bytes <= 256 * MIB
    assert plan(100 * GIB, 64 * KIB, 4096).extent_bytes > 255 * MIB


@pytest.mark.parametrize(
    ("nbytes", "block", "expected"), [(0, 512, 512), (1, 512, 1024), (512, 512, 1024), (4097, 4096, 12288)]
)
def test_a_slot_holds_a_header_and_whole_blocks(nbytes: int, block: int, expected: int) -> None:
    assert footprint(nbytes, block) == expected


@pytest.mark.parametrize("chunk", [64 * KIB, 1 * MIB, 64 * MIB])
def test_the_smallest_capacity_that_the_message_names_is_enough(chunk: int) -> None:
    with pytest.raises(ConfigError, match="capacity: ") as caught:
        plan(chunk, chunk, 4096)
    needed = int(str(caught.value).split("at least ")[1].split("(")[1].split(" ")[0])
    assert plan(needed, chunk, 4096).chunks == 4
    with pytest.raises(ConfigError):
        plan(needed - 4096 - chunk, chunk, 4096)


def test_a_quarantine_takes_its_share() -> None:
    assert plan(64 * MIB, MIB, 4096, quarantine=True).chunks < plan(64 * MIB, MIB, 4096).chunks
