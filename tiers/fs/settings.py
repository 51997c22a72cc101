"""The settings of the fs tier."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from kvcascade.configs.schema import CONTRADICTION, NonZeroSize, SharedSettings, Watermarks
from kvcascade.tiers.base import OpenContext, Probe, StoredNamespace, Tier, TierSettings
from kvcascade.tiers.paths import FolderPath
from kvcascade.tiers.stored import Removed

__all__ = ["FsSettings"]

_MODE = r"0?[0-7]{3}"


def _mode(mode: Any) -> Any:
    if not isinstance(mode, str) or not re.fullmatch(_MODE, mode) or not int(mode, 8) & 0o600 == 0o600:
        raise ValueError("expected the permission bits of files, in quotes and octal, such as '0600' or '0660'")
    if int(mode, 8) & 0o111:
        raise ValueError(f"{mode} makes chunks executable; folders get their x from r")
    return mode


Mode = Annotated[str, BeforeValidator(_mode), WithJsonSchema({"type": "string", "pattern": f"^{_MODE}$"})]


class FsSettings(SharedSettings, TierSettings):
    """A directory that engines share. What one of them has stored, the others find."""

    type: Literal["fs"] = "fs"
    path: FolderPath
    capacity: NonZeroSize | None = None
    """Bytes of chunks in the directory, of all namespaces together. Soft: what lies above it is evicted in the
    background, by one engine at a time. None: the directory grows until the file system refuses."""
    exclusive: bool = False
    """No other engine uses the directory: the capacity is hard, and nothing needs to be asked."""
    watermarks: Watermarks = Watermarks()
    """Above `high` of a soft capacity, the least recently used chunks go until `low` is reached."""
    mode: Mode = "0600"
    """Permission bits of files; folders have x where these have r. KV reveals prompts."""
    group: Annotated[str, Field(min_length=1)] | None = None
    """Name or number of the group that owns files and folders."""
    durability: Literal["none", "flush", "fsync"] = "none"
    """What a power cut of the server leaves: `none`: what it happened to have written; `flush`: no damaged chunks;
    `fsync`: all that was reported stored."""
    on_corrupt: Literal["remove", "quarantine"] = "remove"
    """What happens to a chunk whose checksum is wrong; `quarantine` keeps a few for inspection."""

    @model_validator(mode="after")
    def _exclusive_needs_capacity(self) -> Self:
        if self.exclusive and self.capacity is None:
            text = "makes the capacity hard; give a capacity, or leave it out"
            raise PydanticCustomError(
                CONTRADICTION, "exclusive without capacity", {"found": [(("exclusive",), text)]}
            )
        return self

    @property
    def evicted_by_us(self) -> bool:
        return self.exclusive

    def claims(self) -> frozenset[str]:
        return frozenset({f"the folder {os.path.realpath(self.path)}"})

    def open(self, context: OpenContext) -> Tier:
        from .tier import FsTier

        return FsTier.open(self, context)

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        from .inventory import probe

        return probe(self, chunk_bytes)

    def stored(self, engine_id: str | None = None) -> list[StoredNamespace]:
        from .inventory import stored

        return stored(self)

    def sweep(self, dry_run: bool) -> Removed:
        from .trim import sweep

        return sweep(self, dry_run)

    def clear(self, tenant: str | None) -> list[str]:
        from .inventory import clear

        return clear(Path(self.path), tenant)
