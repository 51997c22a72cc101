"""What `kvcascade inspect`, `verify`, `gc`, `export` and `warm` see of a shared directory and do to it."""

from pathlib import Path

from kvcascade.testing import StoredConformance
from kvcascade.tiers import StoredChunk
from kvcascade.tiers.fs import FsSettings


class TestFsStored(StoredConformance):
    def settings(self, path: Path) -> FsSettings:
        return FsSettings(path=str(path / "kv"))

    def raw_corrupt(self, chunk: StoredChunk) -> None:
        path = Path(chunk.place)
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


class TestExclusiveFsStored(TestFsStored):
    def settings(self, path: Path) -> FsSettings:
        return FsSettings(path=str(path / "kv"), capacity=80 << 20, exclusive=True)
