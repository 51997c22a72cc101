"""How full a shared directory is, by what its engines tell each other: none of them could count it all the time.

    PATH/.kvcascade/writers/WRITER/grown   chunks and bytes by which one engine has made the directory grow
    PATH/.kvcascade/sweeper/total          what the engine that sweeps makes of that, and what it has counted in

Both are written about once a second, where there is news. What an engine has written since is in its own estimate
at once, and in those of the others as soon as both files have come around.
"""

import contextlib
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvcascade.tiers.files import read_json

from .layout import Access, listed, sweeper_folder, writers_folder
from .writers import Identity, Writer

__all__ = ["GROWN_NAME", "TOTAL_NAME", "Amount", "Fullness"]

GROWN_NAME = "grown"
TOTAL_NAME = "total"


class Amount(NamedTuple):
    """Files of chunks."""

    chunks: int = 0
    bytes: int = 0

    def plus(self, other: "Amount") -> "Amount":
        return Amount(self.chunks + other.chunks, self.bytes + other.bytes)

    def minus(self, other: "Amount") -> "Amount":
        return Amount(self.chunks - other.chunks, self.bytes - other.bytes)

    @classmethod
    def parse(cls, numbers: Any) -> "Amount | None":
        """From what was written down; None where that makes no sense."""
        if isinstance(numbers, list) and len(numbers) == 2 and all(isinstance(one, int) for one in numbers):
            return cls(*numbers)
        return None


class Fullness:
    """What is known of it. `estimate` and `grow` are thread-safe and do no I/O; all else is for one thread at a
    time."""

    def __init__(self, root: Path, writer: Writer, access: Access) -> None:
        self._root = root
        self._writer = writer
        self._access = access
        self._me = writer.identity.token
        self._lock = threading.Lock()
        self._mine = Amount()
        """By how much this engine has made the directory grow since it began."""
        self._others: dict[str, Amount] = {}
        """Likewise each of the others, as far as is known."""
        self._counted: Amount | None = None
        """What the directory held when it was last counted or told, None for not known; and by how much each
        engine, this one too, had made it grow then."""
        self._then: dict[str, Amount] = {}
        self._base: Amount | None = None
        """What it held without what this engine has ever put there."""
        self._there: set[str] = set()
        """Of the others those that were there when they were last gathered."""
        self._told = Amount()
        self._published: dict[str, Any] = {}

    # What this engine does

    def grow(self, more: Amount) -> None:
        """This engine has put so much there; less than nothing where it has taken something away."""
        with self._lock:
            self._mine = self._mine.plus(more)

    @property
    def estimate(self) -> Amount | None:
        """None where nothing is known yet."""
        with self._lock:
            if self._base is None:
                return None
            total = self._base.plus(self._mine)
            return Amount(max(0, total.chunks), max(0, total.bytes))

    def _rebase(self) -> None:
        if self._counted is not None:
            self._base = _sum([self._counted, *self._others.values()]).minus(_sum(self._then.values()))

    def tell(self) -> None:
        """Tells the others of this engine's own growth. Where that can't be written, for lack of space perhaps,
        they learn it later."""
        grown = self._mine
        if grown != self._told and self._write(self._writer.folder / GROWN_NAME, list(grown)):
            self._told = grown

    # An engine that does not sweep

    def read(self) -> None:
        """Believes what the engine that sweeps has told last.

        Raises:
            OSError: that can't be read.
        """
        told = read_json(sweeper_folder(self._root) / TOTAL_NAME) or {}
        total, counted = Amount.parse(told.get("total")), told.get("counted")
        if total is None or not isinstance(counted, dict):
            return
        then = {token: amount for token, numbers in counted.items() if (amount := Amount.parse(numbers))}
        with self._lock:
            self._counted, self._then = total, then
            self._others = {token: amount for token, amount in then.items() if token != self._me}
            self._rebase()

    # The one that sweeps

    def gather(self) -> None:
        """Reads by how much the others have made the directory grow. Those that have left count as before.

        Raises:
            OSError: the directory can't be read.
        """
        found = {}
        for folder in listed(writers_folder(self._root)):
            identity = Identity.parse(folder.name)
            if identity is not None and identity.token != self._me:
                with contextlib.suppress(OSError, ValueError):
                    amount = Amount.parse(json.loads((folder / GROWN_NAME).read_bytes()))
                    if amount is not None:
                        found[identity.token] = amount
        with self._lock:
            self._others.update(found)
            self._there = set(found)
            self._rebase()

    def publish(self) -> None:
        """Tells the others what the directory holds, as above."""
        with self._lock:
            total = None if self._base is None else self._base.plus(self._mine)
            news = {"total": total, "counted": {**self._others, self._me: self._mine}}
        if total is None or news == self._published:
            return
        if self._write(sweeper_folder(self._root) / TOTAL_NAME, news):
            self._published = news

    def growths(self) -> dict[str, Amount]:
        """Of each engine, at this moment."""
        with self._lock:
            return {**self._others, self._me: self._mine}

    def count(self, found: Amount, began: dict[str, Amount]) -> None:
        """Everything there was counted, which `began` with those growths. Of what came and went meanwhile half
        was met: keys are spread evenly, and so was the time. Engines that have left are forgotten."""
        with self._lock:
            self._counted = found
            self._others = {token: grown for token, grown in self._others.items() if token in self._there}
            ended = {**self._others, self._me: self._mine}
            self._then = {token: _halfway(began.get(token, Amount()), grown) for token, grown in ended.items()}
            self._rebase()

    def _write(self, path: Path, content: Any) -> bool:
        temporary = Path(self._writer.temporary())
        try:
            fd = self._access.create(temporary)
            try:
                os.write(fd, json.dumps(content).encode())
            finally:
                os.close(fd)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return False
        return True


def _sum(amounts: Iterable[Amount]) -> Amount:
    total = Amount()
    for amount in amounts:
        total = total.plus(amount)
    return total


def _halfway(one: Amount, other: Amount) -> Amount:
    return Amount((one.chunks + other.chunks) // 2, (one.bytes + other.bytes) // 2)
