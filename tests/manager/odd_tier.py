"""A third party's tier in memory that misbehaves as long as a file in its folder says so. Imported by its bare
name, so that the I/O process finds it too.

- `found`: it holds the chunks whose keys stand there, of before it was opened;
- `slow`: who asks first for a footprint, as it is opened, waits; `waits` then tells that somebody does;
- `raises`: what the manager asks of it, outside jobs, raises;
- `dies`: its process is killed as it closes.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvcascade.tiers import OpenContext, Probe, Tier, TierSettings
from kvcascade.tiers.memory import MemoryTier
from kvcascade.types import Entry, Key, Usage


class OddTier(MemoryTier):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._asked = False
        found = folder / "found"
        self._found: list[Key] = (
            [bytes.fromhex(line) for line in found.read_text().split()] if found.exists() else []
        )

    def entries(self) -> Iterator[Entry]:
        yield from super().entries()
        for key in self._found:
            yield Entry(key, 4096, 1.0, 1.0)

    def footprint(self, nbytes: int) -> int:
        self._raise()
        first, self._asked = not self._asked, True
        while first and (self._folder / "slow").exists():
            (self._folder / "waits").touch()
            time.sleep(0.001)
        return super().footprint(nbytes)

    def usage(self) -> Usage:
        self._raise()
        return super().usage()

    def touch(self, keys: Sequence[Key]) -> None:
        self._raise()

    def note_uses(self, uses: Mapping[Key, int]) -> None:
        self._raise()

    def move_to(self, epoch: str) -> None:
        self._found.clear()
        super().move_to(epoch)

    def close(self) -> None:
        if (self._folder / "dies").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        super().close()

    def _raise(self) -> None:
        if (self._folder / "raises").exists():
            raise OSError("odd")


class OddSettings(TierSettings):
    type: str = "odd"
    path: str

    def open(self, context: OpenContext) -> Tier:
        return OddTier(Path(self.path))

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        return Probe()
