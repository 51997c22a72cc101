"""What must be known before anything of a namespace may be served: the epoch's mark, and how the last opening
ended."""

import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from kvcascade.tiers.boot import boot_id
from kvcascade.tiers.files import read_json, write_durably

__all__ = ["EPOCH_NAME", "SESSION_NAME", "Epoch", "Session"]

EPOCH_NAME = "epoch.json"
SESSION_NAME = "session.json"


@dataclass(frozen=True, slots=True)
class Epoch:
    """The epoch that a namespace is in. Written durably in every mode: what it makes void stays void."""

    epoch: str
    """The name of the weights, "" for none."""
    mark: str
    """Random: stamped on every chunk. Chunks of another mark are void."""
    origin: Literal["start", "reset"]

    @classmethod
    def begin(cls, folder: Path, epoch: str, origin: Literal["start", "reset"]) -> "Epoch":
        """A new one, from now on.

        Raises:
            OSError: it can't be written durably; the old one may come back.
        """
        begun = cls(epoch, secrets.token_hex(16), origin)
        write_durably(folder / EPOCH_NAME, asdict(begun))
        return begun

    @classmethod
    def resume(cls, folder: Path, epoch: str) -> "Epoch":
        """The one that an engine starts in, which names its weights `epoch`: the last one where that was for the
        same weights, else a new one. After a reset to weights without a name, nobody can say that an engine which
        starts has the same ones.

        Raises:
            OSError: it can't be read, or a new one can't be written.
        """
        last = cls.read(folder)
        if last and last.epoch == epoch and (epoch or last.origin == "start"):
            return last
        return cls.begin(folder, epoch, "start")

    @classmethod
    def read(cls, folder: Path) -> "Epoch | None":
        """The last one; None where there is none, or none that makes sense."""
        content = read_json(folder / EPOCH_NAME) or {}
        epoch, mark, origin = (content.get(name) for name in ("epoch", "mark", "origin"))
        if isinstance(epoch, str) and isinstance(mark, str) and mark and origin in ("start", "reset"):
            return cls(epoch, mark, origin)
        return None


@dataclass(frozen=True, slots=True)
class Session:
    """Under what the index was last written, and whether that came to a good end."""

    boot: str
    """Names the boot of the machine; "" where that is not known."""
    clean: bool
    """Everything was synced at the end."""
    durability: str

    def write(self, folder: Path) -> None:
        """
        Raises:
            OSError: it can't be written durably.
        """
        write_durably(folder / SESSION_NAME, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Session | None":
        content = read_json(folder / SESSION_NAME) or {}
        boot, clean, durability = (content.get(name) for name in ("boot", "clean", "durability"))
        if isinstance(boot, str) and isinstance(clean, bool) and isinstance(durability, str):
            return cls(boot, clean, durability)
        return None

    @property
    def index_is_whole(self) -> bool:
        """Whether the index can be trusted: it was synced, or the machine has not stopped since."""
        return self.clean or self.durability != "none" or (bool(self.boot) and self.boot == boot_id())
