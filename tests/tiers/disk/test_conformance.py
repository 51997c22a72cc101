"""The disk tier does what every tier must."""

from pathlib import Path

from kvcascade.testing import TierConformance
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.disk import DiskSettings
from kvcascade.tiers.disk.tier import DiskTier
from kvcascade.types import Key


class TestDisk(TierConformance):
    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        return DiskSettings(path=str(path / "kv"), capacity=capacity or 128 << 20).open(context)

    def raw_corrupt(self, tier: Tier, key: Key) -> None:
        path, start, nbytes = place_of(tier, key)
        with path.open("r+b") as file:
            file.seek(start + nbytes // 2)
            (byte,) = file.read(1)
            file.seek(start + nbytes // 2)
            file.write(bytes([byte ^ 1]))

    def raw_truncate(self, tier: Tier, key: Key) -> None:
        # The file goes on, with other chunks: the end of this one is lost.
        path, start, nbytes = place_of(tier, key)
        with path.open("r+b") as file:
            file.seek(start + nbytes // 2)
            file.write(bytes(nbytes - nbytes // 2))

    def raw_remove(self, tier: Tier, key: Key) -> None:
        path, start, nbytes = place_of(tier, key)
        with path.open("r+b") as file:
            file.seek(start - tier.footprint(0))
            file.write(bytes(tier.footprint(nbytes)))


def place_of(tier: Tier, key: Key) -> tuple[Path, int, int]:
    """The file in which the chunk's payload lies, from which byte on, and how many."""
    assert isinstance(tier, DiskTier)
    (location,) = tier._index.lookup([key])
    assert location is not None
    extent = tier._slabs._extents[location.slot.extent]
    return extent.path, location.slot.place * extent.slot_bytes + tier.footprint(0), location.nbytes
