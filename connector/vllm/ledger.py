"""Which copies the workers have been given and the manager has not seen the end of."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcascade.tiers.copymarks import CopyMarks
from kvcascade.types import Key

__all__ = ["Copy", "CopyLedger"]


class Copy(NamedTuple):
    """One chunk between a slot and the device."""

    req_id: str
    key: Key
    store: bool
    slot: int
    number: int
    """How manieth copy of the slot it is."""


class CopyLedger:
    """Counts the copies of each slot as the workers do in their marks, so that it can be known of each copy
    whether it has ended and whether it has failed. Used by the scheduler thread only."""

    def __init__(self, marks: CopyMarks, slots: int) -> None:
        self._marks = marks
        self._granted = [0] * slots
        self._open: dict[tuple[str, Key, bool], Copy] = {}
        self._void: list[Copy] = []

    def grant(self, req_id: str, keys: Sequence[Key], slots: Sequence[int], store: bool) -> None:
        """Workers are given a copy of each of these."""
        for key, slot in zip(keys, slots, strict=True):
            self._granted[slot] += 1
            self._open[req_id, key, store] = Copy(req_id, key, store, slot, self._granted[slot])

    def close(self, req_id: str, keys: Iterable[Key], store: bool) -> list[Key]:
        """The engine has said that these have ended; returns those that have failed. What is not open is none of
        them: a reset has voided it."""
        copies = [self._open.pop((req_id, key, store), None) for key in keys]
        return [copy.key for copy in copies if copy and self._marks.failed(copy.slot, copy.number)]

    def void(self) -> None:
        """A reset: the engine will say nothing of the copies that are open."""
        self._void += self._open.values()
        self._open.clear()

    @property
    def awaited(self) -> bool:
        """Whether copies that a reset has voided have not ended."""
        return bool(self._void)

    def take_ended(self) -> list[Copy]:
        """Those of the voided copies that have ended, each once."""
        ended = [copy for copy in self._void if self._marks.ended(copy.slot, copy.number)]
        if ended:
            self._void = [copy for copy in self._void if not self._marks.ended(copy.slot, copy.number)]
        return ended
