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
"""

import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvcascade.tiers.files import sync_folder

from .layout import GONE, Access

__all__ = ["Epoch", "Epochs"]

KEPT = 8
"""Generations whose files are kept. Who lists them while one comes and another goes still meets a late one."""


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


class Epochs:
    """The epochs of one namespace, in a folder. Every call does I/O and raises OSError where that fails."""

    def __init__(self, folder: Path, access: Access) -> None:
        self._folder = folder
        self._access = access

    def enter(self, name: str) -> Epoch:
        """The epoch of weights `name` in which an engine may start now."""
        return Epoch(name, self._generation(name))

    def move(self, old: Epoch, name: str) -> Epoch:
        """Makes `old` and the unnamed epoch void, durably; then enters the epoch of weights `name`, a private one
        for ""."""
        if old.name:
            self._void(old.name, old.generation)
        self._void("", self._generation(""))
        return self.enter(name) if name else Epoch("", 0, secrets.token_hex(16))

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

    def _of(self, name: str) -> Path:
        return self._folder / hashlib.sha256(name.encode()).hexdigest()[:32]

    @staticmethod
    def _numbers(folder: Path) -> list[int]:
        try:
            names = [path.name for path in folder.iterdir()]
        except OSError as error:
            if error.errno in GONE:
                return []
            raise
        return [int(name) for name in names if name.isdecimal()]
