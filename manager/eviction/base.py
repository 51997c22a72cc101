"""What an eviction policy is."""

from collections.abc import Callable, Iterable
from typing import Protocol

from kvcascade.types import Key

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """Orders the entries of one tier. An entry is a small int that its tier gives to a chunk while it holds it.

    A policy does no I/O and is used by one thread. Each call is O(1) per entry, amortised: a busy entry (one that
    may not be evicted now) is passed over once, not at every search.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: about how many entries the tier holds when it is full; a hint, not a limit."""

    def insert(self, entry: int, key: Key) -> None:
        """A new entry, the most recent one."""

    def touch(self, entries: Iterable[int]) -> None:
        """These were used; the last one is the most recent. A prompt is touched tail first, so that its head is
        the last to go."""

    def remove(self, entry: int) -> None:
        """The entry is gone."""

    def victims(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        """The up to `count` entries that should go next, the first one first, none of them busy. Removes none.

        Whoever is busy and was passed over must be given to `release` when it no longer is.
        """

    def release(self, entry: int) -> None:
        """The entry is no longer busy. Does nothing for one that was not passed over, or is gone."""
