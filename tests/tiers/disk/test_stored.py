"""What `kvcascade inspect`, `verify`, `gc`, `export` and `warm` see of a disk and do to it."""

from pathlib import Path

from kvcascade.testing import StoredConformance
from kvcascade.tiers import StoredChunk
from kvcascade.tiers.disk import DiskSettings

CAPACITY = 80 << 20


class TestDiskStored(StoredConformance):
    def settings(self, path: Path) -> DiskSettings:
        return DiskSettings(path=str(path / "kv"), capacity=CAPACITY)

    def raw_corrupt(self, chunk: StoredChunk) -> None:
        path = Path(chunk.place.partition(" slot ")[0])
        slot_bytes = int(path.stem.rpartition("-")[2])
        start = chunk.token.slot.place * slot_bytes + slot_bytes // 2
        with path.open("r+b", buffering=0) as file:
            file.seek(start)
            byte = file.read(1)[0]
            file.seek(start)
            file.write(bytes([byte ^ 1]))
