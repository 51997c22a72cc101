"""What an eviction policy is."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvcascade.types import Key

__all__ = ["EvictionPolicy"]


class EvictionPolicy(Protocol):
    """Orders the entries of one tier. An entry is a small int that its tier gives to a chunk while it holds it.

    A policy does no I/O and is used by one thread. Each call is O(1) per entry, amortised: a busy entry (one that
    may not be evicted now) is passed over once, not at every search. What it remembers of chunks that are gone is
    bounded by its capacity.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: about how many entries the tier holds when it is full; a hint, not a limit. 0 where it has
        no bound, or where that is not known."""

    def insert(self, entries: Sequence[int], keys: Sequence[Key], uses: Sequence[int] = ()) -> None:
        """New entries for these keys, the last one the most recent. They come with their first use: the first
        request that touches one is the one it was inserted for. `uses`: how often each was used, that one
        included; more than 1 where an earlier process has left it. Without: once each."""

    def touch(self, entries: Iterable[int], request: int = 0) -> None:
        """These were used; the last one is the most recent. A prompt is touched tail first, so that its head is
        the last to go. One that was passed over as busy is back in the order.

        `request` numbers who uses them; a later request has a higher number. However often a request touches an
        entry, it is one use. 0: nobody's use; the order changes, and nothing is counted.
        """

    def evict(self, entries: Sequence[int]) -> None:
        """These are gone, to make room; their keys are worth remembering."""

    def remove(self, entry: int) -> None:
        """The entry is gone for another reason."""

    def victims(self, count: int, busy: Callable[[int], bool]) -> list[int]:
        """The up to `count` entries that should go next, the first one first, none of them busy. Removes none.

        As many as asked for, where there are so many that are not busy. Whoever is busy and was passed over must
        be given to `release` when it no longer is.
        """

    def release(self, entry: int) -> None:
        """The entry is no longer busy. Does nothing for one that was not passed over, or is gone."""
