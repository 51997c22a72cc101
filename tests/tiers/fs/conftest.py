"""A directory for engines, and what tests do with it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import buffer, bytes_for, holds, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers.fs import FsSettings
from kvcascade.tiers.fs.fullness import GROWN_NAME
from kvcascade.tiers.fs.layout import OWN_NAME, chunks, fans, homes, place
from kvcascade.tiers.fs.tier import FsTier
from kvcascade.tiers.fs.writers import IN
from kvcascade.types import Key, Namespace, Outcome

CHUNK = 64 << 10
NAMESPACE = Namespace.of(model="m", tenant="")
SCRIPT = Path(__file__).with_name("engine_process.py")


class Directory:
    """A directory that engines share: each `engine` is one more tier on it, `process` one in a process of its
    own."""

    chunk = CHUNK
    namespace = NAMESPACE

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: list[FsTier] = []

    def settings(self, **given: Any) -> FsSettings:
        return FsSettings(path=str(self.path), **given)

    def engine(self, epoch: str = "", namespace: Namespace = NAMESPACE, **settings: Any) -> FsTier:
        tier = self.settings(**settings).open(OpenContext(namespace, CHUNK, epoch=epoch))
        assert isinstance(tier, FsTier)
        self._opened.append(tier)
        return tier

    def process(self, **given: Any) -> "subprocess.Popen[str]":
        given = {"path": str(self.path), "chunk": CHUNK, "namespace": dict(NAMESPACE.fields), **given}
        command = [sys.executable, str(SCRIPT), json.dumps(given)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        for tier in self._opened:
            tier.close()

    def keys(self, *numbers: int) -> list[Key]:
        return [key_for(number) for number in numbers]

    def store(self, tier: FsTier, keys: Sequence[Key], nbytes: int = CHUNK, epoch: str = "") -> list[Outcome]:
        return tier.write(keys, [memoryview(bytes_for(key, nbytes, epoch)) for key in keys])

    def load(self, tier: FsTier, keys: Sequence[Key], nbytes: int = CHUNK, epoch: str = "") -> list[Outcome]:
        """Outcomes; where one is OK, the bytes are right."""
        targets = [buffer(nbytes) for _ in keys]
        outcomes = tier.read(keys, targets)
        for key, target, outcome in zip(keys, targets, outcomes, strict=True):
            assert not outcome.ok or holds(target, key, epoch), f"wrong bytes of {key.hex()}"
        return outcomes

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
