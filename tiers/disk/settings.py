"""The settings of the disk tier."""

import os
from pathlib import Path
from typing import Literal

from kvcascade.configs.schema import BoundedSettings
from kvcascade.tiers.base import OpenContext, Probe, StoredNamespace, Tier, TierSettings
from kvcascade.tiers.paths import FolderPath

__all__ = ["DiskSettings"]


class DiskSettings(BoundedSettings, TierSettings):
    """A folder on a local disk. Several engines may name the same one: each takes a folder of its own in it."""

    type: Literal["disk"] = "disk"
    path: FolderPath
    durability: Literal["none", "flush", "fsync"] = "none"
    """What survives a power cut: `none`: what can be found again; `flush`: all but perhaps the last job; `fsync`:
    all that was reported stored."""
    on_corrupt: Literal["remove", "quarantine"] = "remove"
    """What happens to a chunk whose checksum is wrong; `quarantine` keeps a few copies for inspection."""

    def claims(self) -> frozenset[str]:
        return frozenset({f"the folder {os.path.realpath(self.path)}"})

    def open(self, context: OpenContext) -> Tier:
        from .tier import DiskTier

        return DiskTier.open(self, context)

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        from .inventory import probe

        return probe(self, chunk_bytes)

    def stored(self, engine_id: str | None = None) -> list[StoredNamespace]:
        from .inventory import stored

        return stored(self, engine_id)

    def clear(self, tenant: str | None) -> list[str]:
        from .inventory import clear

        return clear(Path(self.path), tenant)
