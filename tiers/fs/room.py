"""How full a directory is: roughly where it is shared, exactly where one engine has it to itself. Bytes are those
of files, whole."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvcascade.types import Key, Usage

from .fullness import Amount, Fullness
from .layout import GONE, place

__all__ = ["HardRoom", "Leftover", "SoftRoom"]


class SoftRoom:
    """A directory that others write to as well: a chunk is admitted as long as the capacity seems not to be
    reached. Without one all are, and what is counted is what this engine has put there and taken away.
    Thread-safe."""

    def __init__(self, fullness: Fullness, capacity: int | None) -> None:
        self._fullness = fullness
        self._capacity = capacity
        self._lock = threading.Lock()
        self._mine = Amount()
        self._reserved = 0

    @property
    def usage(self) -> Usage:
        return Usage(*self._amount, self._capacity)

    @property
    def _amount(self) -> Amount:
        """What this engine has put there, where nobody has counted yet."""
        amount = self._fullness.estimate if self._capacity is not None else None
        return amount or self._mine

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change of the medium and the call that says so."""
        yield

    def admit(self, nbytes: int) -> bool:
        """Reserves room for a chunk; False where there is none."""
        amount = self._amount
        with self._lock:
            if self._capacity is not None and amount.bytes + self._reserved + nbytes > self._capacity:
                return False
            self._reserved += nbytes
            return True

    def cancel(self, nbytes: int) -> None:
        """An admitted chunk does not come."""
        with self._lock:
            self._reserved -= nbytes

    def put(self, key: Key, nbytes: int) -> None:
        """An admitted chunk is there now."""
        with self._lock:
            self._reserved -= nbytes
        self._change(Amount(1, nbytes))

    def gone(self, key: Key, nbytes: int) -> None:
        """The chunk was removed."""
        self._change(Amount(-1, -nbytes))

    def _change(self, more: Amount) -> None:
        self._fullness.grow(more)
        with self._lock:
            mine = self._mine.plus(more)
            self._mine = Amount(mine.chunks, max(0, mine.bytes)) if mine.chunks > 0 else Amount()

    def missed(self, key: Key, path: str) -> None:
        """The chunk was not where it should be, at `path`."""

    def leave(self, folder: str) -> None:
        """What was put so far, into `folder`, is void."""
        with self._lock:
            self._mine = Amount()


class Leftover(NamedTuple):
    """A chunk of another epoch or namespace: it goes first when room is needed."""

    used: float
    path: str
    nbytes: int


class HardRoom:
    """A directory that one engine has to itself: what is there is known, and never more than `capacity` bytes.

    Thread-safe. `changing` makes a change of the medium and its booking one step; it covers that I/O, of one file.
    """

    def __init__(
        self, capacity: int, held: dict[Key, int], leftovers: list[Leftover], useless: list[Leftover]
    ) -> None:
        """`held`: key -> bytes; `leftovers`: what else is there, the last to be deleted first; `useless`: files of
        this epoch that can't stay."""
        self._capacity = capacity
        self._held = held
        self._bytes = sum(held.values())
        self._leftovers = leftovers
        self._left = sum(leftover.nbytes for leftover in leftovers)
        self._stuck = 0
        """Bytes of files that can't be deleted."""
        self._reserved = 0
        self._changing = threading.Lock()
        self._lock = threading.Lock()
        for file in useless:
            self._delete(file)
        self._make_room(self._bytes)

    @property
    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._held), self._bytes, max(0, self._capacity - self._stuck))

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        with self._changing:
            yield

    def admit(self, nbytes: int) -> bool:
        with self._lock:
            wanted = self._bytes + self._reserved + nbytes
            if wanted > self._capacity - self._stuck or not self._make_room(wanted):
                return False
            self._reserved += nbytes
            return True

    def _make_room(self, wanted: int) -> bool:
        """Deletes leftovers, the oldest first, until `wanted` bytes fit in beside them; False where they can't."""
        while self._leftovers and wanted + self._left > self._capacity - self._stuck:
            leftover = self._leftovers.pop()
            self._left -= leftover.nbytes
            self._delete(leftover)
        return wanted <= self._capacity - self._stuck

    def _delete(self, leftover: Leftover) -> None:
        try:
            Path(leftover.path).unlink()
        except OSError as error:
            if error.errno not in GONE:
                self._stuck += leftover.nbytes

    def cancel(self, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes

    def put(self, key: Key, nbytes: int) -> None:
        with self._lock:
            self._reserved -= nbytes
            before = self._held.get(key)
            self._held[key] = nbytes
            self._bytes += nbytes - (before or 0)

    def gone(self, key: Key, nbytes: int) -> None:
        with self._lock:
            before = self._held.pop(key, None)
            self._bytes -= before or 0

    def missed(self, key: Key, path: str) -> None:
        with self._changing:
            if key in self._held and not Path(path).exists():
                self.gone(key, 0)

    def leave(self, folder: str) -> None:
        with self._lock:
            void = [Leftover(0.0, place(folder, key), nbytes) for key, nbytes in self._held.items()]
            self._leftovers += void
            self._left += self._bytes
            self._held.clear()
            self._bytes = 0
