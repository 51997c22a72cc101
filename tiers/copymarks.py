"""What workers tell of their copies in memory that they share with the scheduler."""

from collections.abc import Collection, Iterable

from kvcascade.types import Buffer

__all__ = ["CopyMarks"]

_PAGE = 4096
_WORD = 4
_MASK = 0xFFFFFFFF
_HALF = 1 << 31


class CopyMarks:
    """For each rank and slot, how many copies to or from the slot the rank has ended, and the number of the last
    that failed. Numbers begin with 1, one series for each slot, the same for all ranks.

    It says what an engine's own reports do not: that a copy has failed, and that copies which the engine has
    forgotten, since it was reset, have ended.

    Each rank writes its own words only, from one thread; any process that has the memory reads them. A mark is
    made after the copy has ended.
    """

    def __init__(self, memory: Buffer, ranks: int, slots: int) -> None:
        """`memory`: `nbytes` bytes, zeros before the first copy."""
        self._words = memory.cast("I")
        self._ranks = ranks
        self._slots = slots

    def close(self) -> None:
        """Lets go of the memory: neither reads nor writes it any more."""
        self._words.release()

    @staticmethod
    def nbytes(ranks: int, slots: int) -> int:
        """Bytes that it takes, in whole pages."""
        return -(-ranks * slots * 2 * _WORD // _PAGE) * _PAGE

    def end(self, rank: int, slots: Iterable[int], failed: Collection[int] = ()) -> None:
        """This rank has ended a copy of each of these slots, of `failed` without success."""
        for slot in slots:
            at = self._at(rank, slot)
            number = self._words[at] + 1 & _MASK
            if slot in failed:
                self._words[at + 1] = number
            self._words[at] = number

    def ended(self, slot: int, number: int) -> bool:
        """Whether every rank has ended this copy of the slot."""
        return all(self._words[self._at(rank, slot)] - number & _MASK < _HALF for rank in range(self._ranks))

    def failed(self, slot: int, number: int) -> bool:
        """Whether this copy of the slot has failed on any rank."""
        return any(self._words[self._at(rank, slot) + 1] == number & _MASK for rank in range(self._ranks))

    def _at(self, rank: int, slot: int) -> int:
        return 2 * (rank * self._slots + slot)
