"""Which epoch an engine is in, where the others that share the bucket may be in others.

The rules are those of a shared directory: an engine starts in the epoch of the weights that it names, "" where it
names none; a reset moves one engine, to the epoch of the new name, or to a private one that nobody ever joins; the
epoch that it leaves, and the unnamed one, are void from then on, which means that nobody enters them any more.

In the bucket, the epochs of one name are numbered, and only the last is entered: the object `epochs/NAME/N` says
that the generations before N are void. Two engines that leave the same generation at once write the same object,
and so agree on the next one. Each epoch has names of its own, so that a late write can only end up where it was
begun.
"""

import json
import secrets
import time
from dataclasses import dataclass

from .bucket import Bucket
from .layout import Home

__all__ = ["Epoch", "Epochs"]

KEPT = 8
"""Generations whose marks are kept: who lists them while one comes and another goes still meets a late one."""


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
    """The epochs of one namespace. Every call does I/O until `end`, and raises TierError where that fails."""

    def __init__(self, bucket: Bucket, home: Home) -> None:
        self._bucket = bucket
        self._home = home

    def enter(self, name: str, end: float) -> Epoch:
        """The epoch of weights `name` in which an engine may start now."""
        return Epoch(name, max(self._numbers(name, end), default=0))

    def move(self, old: Epoch, name: str, end: float) -> Epoch:
        """Makes `old` and the unnamed epoch void, durably; then enters the epoch of weights `name`, a private one
        for ""."""
        if old.name:
            self._void(old, end)
        self._void(self.enter("", end), end)
        return self.enter(name, end) if name else Epoch("", 0, secrets.token_hex(16))

    def _void(self, epoch: Epoch, end: float) -> None:
        """Makes sure that this generation, and all before it, are void."""
        marks = self._home.marks(epoch.name)
        mark = {"weights": epoch.name, "void_before": epoch.generation + 1, "since": time.time()}
        self._bucket.write(f"{marks}{epoch.generation + 1}", json.dumps(mark).encode(), end)
        old = [number for number in self._numbers(epoch.name, end) if number <= epoch.generation - KEPT]
        for _ in self._bucket.delete([f"{marks}{number}" for number in old], end):
            pass  # one that stays does no harm

    def _numbers(self, name: str, end: float) -> list[int]:
        marks = self._home.marks(name)
        following, numbers = "", []
        while True:
            page = self._bucket.page(marks, end, following)
            names = (one.name.removeprefix(marks) for one in page.objects)
            numbers += [int(number) for number in names if number.isdecimal()]
            following = page.following
            if not following:
                return numbers
