"""Which epoch an engine is in, where the others that share the directory may be in others.

An engine starts in the epoch of the weights that it names, "" where it names none. Engines that start with the
same name share that epoch, and whatever they store there. A reset moves one engine and leaves the others where
they are:

- to weights with a name: into the epoch of that name, together with every engine that names the same;
- to weights without a name: into a private epoch, which no engine ever joins, not even this one after a restart.

In both cases the epoch that the engine leaves is void from then on: nobody who starts, or is reset, enters it any
more. So is the unnamed epoch, whichever the engine leaves: with it gone, the engine that restarts without a name
(in a stack file that has never heard of the reset) can't find what others, of whose weights it knows nothing, have
stored there meanwhile. Engines that run in a void epoch go on to share it until they are reset or end.

To be void, on the medium: the epochs of one name are numbered, and only the last is entered. `epochs/NAME/N` is an
empty file that says that the generations before N are void. It is created exclusively, so that two engines that
leave the same generation at once agree on the next one, and synced before anything else happens. The first
generation needs no file. Each epoch has a folder of its own, so that a late write can only end up in the one that
it was begun in.

What an epoch's folder is called does not tell which epoch it is; `epochs/STAMP.json` does, for those who clean up.
Where that could not be written nobody can say that the epoch is over, and it stays.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcascade.tiers.files import read_json, sync_folder
from kvcascade.types import Namespace

from .layout import Access, listed

__all__ = ["Epoch", "Epochs"]

KEPT = 8
"""Generations whose files are kept. Who lists them while one comes and another goes still meets a late one."""
KEPT_NOTES = 64
"""Epochs without a chunk of which it is still said which they are: an engine may just be about to store there."""

_NOTE = re.compile(r"([0-9a-f]{32})\.json")


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

    @classmethod
    def parse(cls, content: dict[str, Any]) -> "Epoch | None":
        """From what was written down; None where that makes no sense."""
        name, generation, private = (content.get(field) for field in ("name", "generation", "private"))
        if isinstance(name, str) and isinstance(generation, int) and isinstance(private, str):
            return cls(name, generation, private)
        return None


class Epochs:
    """The epochs of one namespace, in a folder. Every call does I/O and raises OSError where that fails."""

    def __init__(self, folder: Path, namespace: Namespace, access: Access) -> None:
        self._folder = folder
        self._namespace = namespace
        self._access = access

    def enter(self, name: str) -> Epoch:
        """The epoch of weights `name` in which an engine may start now."""
        return self._noted(Epoch(name, self._generation(name)))

    def is_over(self, epoch: Epoch) -> bool:
        """Whether no engine that starts, or is reset, can enter it."""
        return bool(epoch.private) or epoch.generation < self._generation(epoch.name)

    def move(self, old: Epoch, name: str) -> Epoch:
        """Makes `old` and the unnamed epoch void, durably; then enters the epoch of weights `name`, a private one
        for ""."""
        if old.name:
            self._void(old.name, old.generation)
        self._void("", self._generation(""))
        return self.enter(name) if name else self._noted(Epoch("", 0, secrets.token_hex(16)))

    def _generation(self, name: str) -> int:
        return max(self._numbers(self._of(name)), default=0)

    def _void(self, name: str, generation: int) -> None:
        """Makes sure that all generations up to this one are void, also after a power cut."""
        folder = self._of(name)
        self._access.make_folder(folder)
        try:
            fd = self._access.create(folder / str(generation + 1))
        except FileExistsError:
            pass  # another engine has left it, too
        else:
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        for path in (folder, self._folder, self._folder.parent):
            sync_folder(path)
        for number in self._numbers(folder):
            if number <= generation - KEPT:
                (folder / str(number)).unlink(missing_ok=True)

    def notes(self) -> dict[Path, Epoch | None]:
        """The files that say what a stamp stands for; None in one that is damaged."""
        found = {}
        for path in listed(self._folder):
            if _NOTE.fullmatch(path.name):
                found[path] = Epoch.parse(read_json(path) or {})
        return found

    def _noted(self, epoch: Epoch) -> Epoch:
        """Writes down what the epoch's stamp stands for, if that works."""
        note = self._folder / f"{self._namespace.stamp(epoch.mark).hex()}.json"
        with contextlib.suppress(OSError):
            if not note.exists():
                self._access.make_folder(self._folder)
                fd = self._access.create(note)
                try:
                    os.write(fd, json.dumps(asdict(epoch)).encode())
                finally:
                    os.close(fd)
                self._forget_notes()
        return epoch

    def _forget_notes(self) -> None:
        """Removes the oldest notes of epochs in which nothing lies."""
        empty = [path for path in self.notes() if not (self._folder.parent / path.stem).exists()]
        for path in sorted(empty, key=lambda path: path.stat().st_mtime)[:-KEPT_NOTES]:
            path.unlink(missing_ok=True)

    def _of(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    @staticmethod
    def _numbers(folder: Path) -> list[int]:
        return [int(path.name) for path in listed(folder) if path.name.isdecimal()]
