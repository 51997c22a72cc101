"""A directory for engines, and what tests do with it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing.epochs import SharedPlace
from kvcascade.tiers.fs import FsSettings
from kvcascade.tiers.fs.fullness import GROWN_NAME
from kvcascade.tiers.fs.layout import OWN_NAME, chunks, fans, homes, place
from kvcascade.tiers.fs.tier import FsTier
from kvcascade.tiers.fs.writers import IN
from kvcascade.types import Key

SCRIPT = Path(__file__).with_name("engine_process.py")


class Directory(SharedPlace):
    """A directory that engines share; `process` is an engine in a process of its own."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def settings(self, **given: Any) -> FsSettings:
        return FsSettings(path=str(self.path), **given)

    def process(self, **given: Any) -> "subprocess.Popen[str]":
        given = {"path": str(self.path), "chunk": self.chunk, "namespace": dict(self.namespace.fields), **given}
        command = [sys.executable, str(SCRIPT), json.dumps(given)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def file(self, tier: FsTier, key: Key) -> Path:
        assert tier._era is not None
        return Path(place(tier._era.folder, key))

    @property
    def files(self) -> list[Path]:
        """Of all chunks, of all namespaces and epochs."""
        epochs = [epoch for home in homes(self.path) for epoch in home.epochs()]
        return [Path(path) for epoch in epochs for fan in fans(epoch) for path, _ in chunks(fan)]

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def writers(self) -> list[Path]:
        return list((self.path / OWN_NAME / "writers").glob("*"))

    @property
    def temporaries(self) -> list[Path]:
        left = (self.path / OWN_NAME / "writers").glob("*/*")
        return [path for path in left if not path.name.startswith(IN) and path.name != GROWN_NAME]


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Directory]:
    directory = Directory(tmp_path / "kv")
    yield directory
    directory.close()
