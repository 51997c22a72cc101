"""Copies that happen when the simulation says so."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcascade.connector import Direction
from kvcascade.connector.copies import HostCopier, Piece, Slots, rows

if TYPE_CHECKING:
    import torch

__all__ = ["ManualCopier"]


class _Ticket:
    """One transfer, chunk by chunk."""

    def __init__(self, copier: "ManualCopier", chunks: Sequence[Sequence[Piece]], direction: Direction) -> None:
        self.chunks = chunks
        self.direction = direction
        self.copied = 0
        self._copier = copier
        self._failed: set[int] = set()

    def done(self) -> bool:
        return self.copied == len(self.chunks)

    def wait(self) -> None:
        while not self.done():
            self._copier.advance(self.direction)

    def failed(self) -> set[int]:
        return self._failed

    def copy_next(self) -> None:
        place = self.copied
        self.copied += 1
        if self._copier.fails(self.direction):
            self._failed.add(place)
            self._copier.spoil(self.chunks[place], self.direction)
        for piece in self.chunks[place]:
            if place not in self._failed:
                self._copier.copy(piece, self.direction)


class ManualCopier(HostCopier):
    """Copies one chunk in each `advance`, in the order in which they were started, as a stream does; a copy that
    is waited for happens at once.

    Attributes:
        fails: is asked before each chunk whether its copy fails; what it was to fill holds nothing then.
    """

    def __init__(self, tensors: "Sequence[torch.Tensor]", pool: Slots) -> None:
        memory = [rows(tensor) for tensor in tensors]
        super().__init__(memory, pool)
        self._rows = [tensor.numpy() for tensor in memory]
        self._pool = pool
        self.fails: Callable[[Direction], bool] = lambda direction: False
        self._waiting: dict[Direction, list[_Ticket]] = {direction: [] for direction in Direction}

    def start(self, chunks: Sequence[Sequence[Piece]], direction: Direction, after: None) -> _Ticket:  # type: ignore[override]
        ticket = _Ticket(self, chunks, direction)
        self._waiting[direction].append(ticket)
        return ticket

    def advance(self, direction: Direction) -> bool:
        """The next chunk of this direction is copied. False where there is none."""
        waiting = self._waiting[direction]
        while waiting and waiting[0].done():
            waiting.pop(0)
        if not waiting:
            return False
        waiting[0].copy_next()
        return True

    def run_all(self) -> None:
        """Everything that was started is copied."""
        for direction in Direction:
            while self.advance(direction):
                pass

    def spoil(self, pieces: Sequence[Piece], direction: Direction) -> None:
        """What these were to fill holds nothing of worth."""
        for piece in pieces:
            blocks = self._rows[piece.tensor][piece.block : piece.block + piece.number]
            if direction is Direction.LOAD:
                blocks[:] = 0xEE
            else:
                slot = np.frombuffer(self._pool.slot(piece.slot), np.uint8)
                slot[piece.start : piece.start + blocks.size] = 0xEE
