"""Which epoch an engine is in, where the others that share the bucket may be in others.

The rules are those of a shared directory: an engine starts in the epoch of the weights that it names, "" where it
names none; a reset moves one engine, to the epoch of the new name, or to a private one that nobody ever joins; the
epoch that it leaves, and the unnamed one, are void from then on, which means that nobody enters them any more.

In the bucket, the epochs of one name are numbered, and only the last is entered: the mark `epochs/NAME/N` holds
the value that is stamped on its chunks. Each epoch has names of its own, so that a late write can only end up
where it was begun. The first value is random; the next one is computed from it, so that two engines that leave the
same generation at once meet in the next. A mark that was left says so.

A bucket can lose marks: a rule expires them, somebody tidies up. A value that is lost never comes back, though
engines that run still know it, for it might have been void: another random one is begun, and the chunks of before
are out of reach.

What an epoch's stamp stands for, `epochs/STAMP.json` says, for those who clean up. Where that could not be written
nobody can say that the epoch is over, and it stays.
"""

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from kvcascade.errors import TierError, TierUnavailable
from kvcascade.types import Namespace

from .bucket import Bucket
from .layout import Home
from .messages import parsed

__all__ = ["Epoch", "Epochs"]

KEPT = 8
"""Generations whose marks are kept: who lists them while one comes and another goes still meets a late one."""

_NOTE = re.compile(r"([0-9a-f]{32})\.json")
_MARK = re.compile(r"[0-9a-f]{32}/[0-9]+")
_NUMBER = re.compile(r"[0-9]{1,18}")
_CLAIM = re.compile(r"([0-9]{1,18})-([0-9a-f]{32})")
_VALUE = re.compile(r"[0-9a-f]{32}")
_LOOKS = 4
_PAUSE = 0.05  # seconds


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of one namespace."""

    name: str
    """Of the weights, "" for none."""
    generation: int
    value: str
    """32 hexadecimal digits that no other epoch has."""
    private: bool = False
    """No other engine ever joins it; then `generation` has no meaning."""

    @property
    def mark(self) -> str:
        """Stamped on every chunk: chunks of another mark are of another epoch."""
        return f"{self.value} {self.name}"

    @property
    def in_words(self) -> str:
        return "private" if self.private else f"weights {self.name}" if self.name else "unnamed"

    @property
    def following(self) -> "Epoch":
        """The epoch that is entered once this one is void."""
        value = hashlib.sha256(f"{self.value} {self.generation + 1}".encode()).hexdigest()[:32]
        return Epoch(self.name, self.generation + 1, value)

    @classmethod
    def parse(cls, said: Mapping[str, object]) -> "Epoch | None":
        """From what was written down; None where that makes no sense."""
        name, generation, value, private = (
            said.get(field) for field in ("name", "generation", "value", "private")
        )
        if not (isinstance(name, str) and isinstance(generation, int) and isinstance(private, bool)):
            return None
        return (
            cls(name, generation, value, private) if isinstance(value, str) and _VALUE.fullmatch(value) else None
        )


class Epochs:
    """The epochs of one namespace. Every call does I/O until `end`, and raises TierError where that fails."""

    def __init__(self, bucket: Bucket, home: Home, namespace: Namespace) -> None:
        self._bucket = bucket
        self._home = home
        self._namespace = namespace

    def current(self, name: str, end: float) -> Epoch | None:
        """The epoch of weights `name` in which an engine may start now; None where nobody has begun one."""
        return self._current(name, end)[0]

    def enter(self, name: str, end: float) -> Epoch:
        """The epoch of weights `name`, begun where there is none."""
        epoch, last = self._current(name, end)
        return epoch or self._begin(name, last + 1, end)

    def move(self, old: Epoch | None, name: str, end: float) -> Epoch:
        """Makes `old` and the unnamed epoch void, durably; then enters the epoch of weights `name`, a private one
        for ""."""
        if old is not None and old.name and self.current(old.name, end) == old:
            self._void(old, end)
        unnamed = self.current("", end)
        if unnamed is not None:
            self._void(unnamed, end)
        return self.enter(name, end) if name else Epoch("", 0, secrets.token_hex(16), private=True)

    def is_over(self, epoch: Epoch, end: float) -> bool:
        """Whether no engine that starts, or is reset, can enter it."""
        return epoch.private or self.current(epoch.name, end) != epoch

    def note(self, epoch: Epoch, end: float) -> None:
        """Writes down what the epoch's stamp stands for, if that works."""
        name = self._home.note(self._namespace.stamp(epoch.mark))
        with suppress(TierError):
            if self._bucket.read(name, end) is None:
                self._bucket.write(name, _json(asdict(epoch)), end)

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

    # -- marks

    def _current(self, name: str, end: float) -> tuple[Epoch | None, int]:
        """The epoch that may be entered, and the last generation that has a mark; -1 for none. A mark that seems
        void is looked at again: its follower comes first, but may have come after the list."""
        for look in range(_LOOKS):
            last = max(self._generations(name, end), default=-1)
            if last < 0:
                break
            if (epoch := self._marked(name, last, end)) is not None:
                return epoch, last
            time.sleep(_PAUSE * look)
        return None, last

    def _marked(self, name: str, generation: int, end: float) -> Epoch | None:
        """The epoch that a mark says; None where it is void, lost, or says nothing."""
        said = parsed(self._bucket.read(self._mark(name, generation), end)) or {}
        value = said.get("value")
        return Epoch(name, generation, value) if isinstance(value, str) and _VALUE.fullmatch(value) else None

    def _begin(self, name: str, generation: int, end: float) -> Epoch:
        """The first epoch of a name, or the first after a loss. Of engines that begin it at once one decides: the
        first to lay claim to it, and, where the store keeps what it has, the first to write the mark."""
        value = secrets.token_hex(16)
        marks = self._home.marks(name)
        claim = f"{marks}{generation}-{value}"
        self._bucket.write(claim, b"{}", end)
        found = self._names(marks, end)
        claims = [(modified, laid[2]) for one, modified in found if (laid := _claim(one, generation))]
        value = min(claims, default=(0.0, value))[1]
        if not any(one == f"{generation}" for one, _ in found):
            self._write(Epoch(name, generation, value), end, only_new=True)
        epoch = self._marked(name, generation, end) or self.current(name, end)
        for _ in self._bucket.delete([claim], end):
            pass  # one that stays does no harm
        if epoch is None:
            raise TierUnavailable("the mark of the epoch was lost as soon as it was written")
        return epoch

    def _void(self, epoch: Epoch, end: float) -> None:
        """Makes sure that nobody enters this epoch, which was the current one, nor any before it, again. The
        follower comes first, then the mark tells that it was left: should the follower be lost, nobody goes
        back."""
        marks = self._home.marks(epoch.name)
        claims = [one for one, _ in self._names(marks, end) if _CLAIM.fullmatch(one)]
        for failure in self._bucket.delete([marks + one for one in claims], end):
            if failure is not None:
                raise failure  # whoever begins anew could take its value
        self._write(epoch.following, end)
        self._write(epoch, end, void=True)
        old = [number for number in self._generations(epoch.name, end) if number <= epoch.generation - KEPT]
        for _ in self._bucket.delete([f"{marks}{number}" for number in old], end):
            pass  # one that stays does no harm

    def _write(self, epoch: Epoch, end: float, void: bool = False, only_new: bool = False) -> None:
        said = {"weights": epoch.name, "value": "" if void else epoch.value, "void": void}
        self._bucket.write(self._mark(epoch.name, epoch.generation), _json(said), end, only_new)

    def _mark(self, name: str, generation: int) -> str:
        return f"{self._home.marks(name)}{generation}"

    def _generations(self, name: str, end: float) -> list[int]:
        return [int(mark) for mark, _ in self._names(self._home.marks(name), end) if _NUMBER.fullmatch(mark)]

    def _names(self, prefix: str, end: float) -> list[tuple[str, float]]:
        """What objects are called behind this prefix, and when they were written."""
        found = self._bucket.list(prefix, lambda: end)
        return [(one.name.removeprefix(prefix), one.modified) for one in found]


def _claim(name: str, generation: int) -> re.Match[str] | None:
    """A claim to this generation."""
    laid = _CLAIM.fullmatch(name)
    return laid if laid is not None and int(laid[1]) == generation else None


def _json(said: Mapping[str, object]) -> bytes:
    return json.dumps(said, ensure_ascii=False).encode()
