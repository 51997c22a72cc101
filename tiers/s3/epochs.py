"""Which epoch an engine is in, where the others that share the bucket may be in others.

The rules are those of a shared directory: an engine starts in the epoch of the weights that it names, "" where it
names none; a reset moves one engine, to the epoch of the new name, or to a private one that nobody ever joins; the
epoch that it leaves, and the unnamed one, are void from then on, which means that nobody enters them any more.

In the bucket, the epochs of one name are numbered, and only the last is entered: the object `epochs/NAME/N` says
that the generations before N are void. Two engines that leave the same generation at once write the same object,
and so agree on the next one. Each epoch has names of its own, so that a late write can only end up where it was
begun.

What an epoch's stamp stands for, `epochs/STAMP.json` says, for those who clean up. Where that could not be written
nobody can say that the epoch is over, and it stays.
"""

import json
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from kvcascade.errors import TierError
from kvcascade.types import Namespace

from .bucket import Bucket
from .layout import Home
from .messages import parsed

__all__ = ["Epoch", "Epochs"]

KEPT = 8
"""Generations whose marks are kept: who lists them while one comes and another goes still meets a late one."""

_NOTE = re.compile(r"([0-9a-f]{32})\.json")
_MARK = re.compile(r"[0-9a-f]{32}/[0-9]+")


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of one namespace."""

    name: str
    """Of the weights, "" for none."""
    generation: int
    private: str = ""
    """Random, in an epoch that no other engine joins; then `generation` has no meaning."""

    @property
    def mark(self) -> str:
        """Stamped on every chunk: chunks of another mark are of another epoch."""
        return f"private {self.private}" if self.private else f"{self.generation} {self.name}"

    @property
    def in_words(self) -> str:
        return "private" if self.private else f"weights {self.name}" if self.name else "unnamed"

    @classmethod
    def parse(cls, said: Mapping[str, object]) -> "Epoch | None":
        """From what was written down; None where that makes no sense."""
        name, generation, private = (said.get(field) for field in ("name", "generation", "private"))
        if isinstance(name, str) and isinstance(generation, int) and isinstance(private, str):
            return cls(name, generation, private)
        return None


class Epochs:
    """The epochs of one namespace. Every call does I/O until `end`, and raises TierError where that fails."""

    def __init__(self, bucket: Bucket, home: Home, namespace: Namespace) -> None:
        self._bucket = bucket
        self._home = home
        self._namespace = namespace

    def enter(self, name: str, end: float) -> Epoch:
        """The epoch of weights `name` in which an engine may start now."""
        return Epoch(name, max(self._generations(name, end), default=0))

    def move(self, old: Epoch, name: str, end: float) -> Epoch:
        """Makes `old` and the unnamed epoch void, durably; then enters the epoch of weights `name`, a private one
        for ""."""
        if old.name:
            self._void(old, end)
        self._void(self.enter("", end), end)
        return self.enter(name, end) if name else Epoch("", 0, secrets.token_hex(16))

    def is_over(self, epoch: Epoch, end: float) -> bool:
        """Whether no engine that starts, or is reset, can enter it."""
        return bool(epoch.private) or epoch.generation < self.enter(epoch.name, end).generation

    def note(self, epoch: Epoch, end: float) -> None:
        """Writes down what the epoch's stamp stands for, if that works."""
        name = self._home.note(self._namespace.stamp(epoch.mark))
        with suppress(TierError):
            if self._bucket.read(name, end) is None:
                self._bucket.write(name, json.dumps(asdict(epoch), ensure_ascii=False).encode(), end)

    def notes(self, end: float) -> dict[str, Epoch]:
        """The epochs that were noted, by their stamps in hexadecimal."""
        found = {}
        for name, _ in self._names(self._home.epochs, end):
            if note := _NOTE.fullmatch(name):
                said = parsed(self._bucket.read(self._home.epochs + name, end))
                epoch = Epoch.parse(said or {})
                if epoch is not None:
                    found[note[1]] = epoch
        return found

    def old(self, epoch: Epoch, before: float, end: float) -> list[str]:
        """Of all marks, and the note of this epoch, the names of those that were written before that Unix time."""
        note = f"{self._namespace.stamp(epoch.mark).hex()}.json"
        names = self._names(self._home.epochs, end)
        return [
            self._home.epochs + name
            for name, modified in names
            if modified < before and (name == note or _MARK.fullmatch(name))
        ]

    def _void(self, epoch: Epoch, end: float) -> None:
        """Makes sure that this generation, and all before it, are void."""
        marks = self._home.marks(epoch.name)
        said = {"weights": epoch.name, "void": f"all generations before {epoch.generation + 1}"}
        self._bucket.write(f"{marks}{epoch.generation + 1}", json.dumps(said, ensure_ascii=False).encode(), end)
        old = [number for number in self._generations(epoch.name, end) if number <= epoch.generation - KEPT]
        for _ in self._bucket.delete([f"{marks}{number}" for number in old], end):
            pass  # one that stays does no harm

    def _generations(self, name: str, end: float) -> list[int]:
        return [int(mark) for mark, _ in self._names(self._home.marks(name), end) if mark.isdecimal()]

    def _names(self, prefix: str, end: float) -> list[tuple[str, float]]:
        """What objects are called behind this prefix, and when they were written."""
        found = self._bucket.list(prefix, lambda: end)
        return [(one.name.removeprefix(prefix), one.modified) for one in found]
