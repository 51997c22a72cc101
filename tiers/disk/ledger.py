"""What the chunks of a tier take of its capacity, and which of them are on their way out."""

from collections.abc import Iterable

from kvcascade.types import Key

from .index import Location
from .plan import footprint

__all__ = ["Ledger"]


class Ledger:
    """Sums over chunks, in bytes of their slots. Not thread-safe: its owner's lock covers it.

    A chunk is admitted before it is written and settled when its entry is committed, or not. One that is removed
    is doomed first: its room is given away at once, its entry goes with the next commit.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self.chunks = 0
        self.bytes = 0
        self.doomed: dict[Key, Location] = {}
        self._doomed_bytes = 0
        self._admitted_bytes = 0

    @property
    def charged(self) -> int:
        return self.bytes + self._admitted_bytes - self._doomed_bytes

    def footprint(self, nbytes: int) -> int:
        return footprint(nbytes, self._block)

    def admit(self, nbytes: int, capacity: int) -> bool:
        """Charges a chunk of `nbytes` payload bytes, where it fits."""
        cost = self.footprint(nbytes)
        if self.charged + cost > capacity:
            return False
        self._admitted_bytes += cost
        return True

    def settle(self, nbytes: int, there: bool) -> None:
        """Ends an admission: the chunk is there now, or not."""
        cost = self.footprint(nbytes)
        self._admitted_bytes -= cost
        if there:
            self.chunks += 1
            self.bytes += cost

    def doom(self, key: Key, location: Location) -> None:
        self.doomed[key] = location
        self._doomed_bytes += self.footprint(location.nbytes)

    def removed(self, keys: Iterable[Key]) -> list[Location]:
        """The entries of these doomed keys are gone; returns where they lay."""
        locations = [self.doomed.pop(key) for key in keys]
        nbytes = sum(self.footprint(location.nbytes) for location in locations)
        self.chunks -= len(locations)
        self.bytes -= nbytes
        self._doomed_bytes -= nbytes
        return locations

    def clear(self) -> None:
        """Nothing is there any more; what is admitted stays so until its writer settles it."""
        self.chunks = self.bytes = self._doomed_bytes = 0
        self.doomed.clear()
