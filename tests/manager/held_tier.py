"""A tier in memory whose reads, writes and probes are held as long as a file is there: a gate that also works from
another process. Beside it, a file "held-..." stands for each thread that was held. Imported by its bare name, so
that the I/O process finds it too."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvcascade.errors import TierRefused
from kvcascade.tiers import OpenContext, Probe, Tier, TierSettings
from kvcascade.tiers.memory import MemoryTier
from kvcascade.types import Buffer, Key, Outcome


class HeldTier(MemoryTier):
    def __init__(self, gate: Path) -> None:
        super().__init__()
        self._gate = gate

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        self._wait()
        return super().exists(keys)

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        self._wait()
        return super().read(keys, buffers)

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        """A key that begins with "bad" is failed."""
        self._wait()
        outcomes = super().write(keys, buffers, victims)
        failed = Outcome.failed(TierRefused("bad"))
        return [failed if key[:3] == b"bad" else outcome for key, outcome in zip(keys, outcomes, strict=True)]

    def _wait(self) -> None:
        if self._gate.exists():
            self._gate.with_name(f"held-{threading.get_ident()}").touch()
        while self._gate.exists():
            time.sleep(0.001)


class HeldSettings(TierSettings):
    type: str = "held"
    gate: str

    def open(self, context: OpenContext) -> Tier:
        return HeldTier(Path(self.gate))

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        return Probe()
