"""The primary tier: its slots, and what is told and counted of them."""

from collections.abc import Mapping, Sequence

from kvcascade.types import Key, MissReason

from .events import EventLog
from .ghosts import Ghosts
from .slots import SlotTable
from .stats import TierStats

__all__ = ["Primary"]


class Primary:
    """The slots of the host pool, with their ghosts, events and counters. Used by the scheduler thread only."""

    def __init__(self, slots: SlotTable, stats: TierStats, chunk_bytes: int, events: EventLog) -> None:
        self.slots = slots
        self.stats = stats
        self.chunk_bytes = chunk_bytes
        self._ghosts = Ghosts()
        self._events = events

    def why(self, key: Key) -> MissReason:
        """Why the key is not here."""
        return self._ghosts.why(key)

    def evict(self, victims: Sequence[int]) -> list[Key]:
        """Frees these slots; returns their keys."""
        evicted = self.slots.evict(victims)
        self._ghosts.add_all(evicted, MissReason.EVICTED)
        self.stats.evictions += len(evicted)
        self._events.removed(self.stats.name, evicted)
        return evicted

    def refuse(self, keys: Sequence[Key]) -> None:
        """The engine offered these, and there is no room for them."""
        self.stats.refused += len(keys)
        self._ghosts.add_all(keys, MissReason.REFUSED)

    def stored(self, keys: Sequence[Key]) -> None:
        """The engine has written these: they are readable."""
        self.stats.written += len(keys)
        self.stats.written_bytes += len(keys) * self.chunk_bytes
        self.arrived(keys)

    def arrived(self, keys: Sequence[Key]) -> None:
        """These have become readable."""
        self._events.stored(self.stats.name, keys)

    def loaded(self, keys: Sequence[Key]) -> None:
        """The engine has read these."""
        self.stats.read += len(keys)
        self.stats.read_bytes += len(keys) * self.chunk_bytes

    def clear(self, copies: Mapping[Key, list[str]]) -> None:
        """Voids every chunk. `copies`: the requests whose copies use a key's slot, once for each."""
        self._events.removed(self.stats.name, self.slots.clear(copies))

    def snapshot(self) -> TierStats:
        """The counters, brought up to date."""
        self.stats.chunks = self.slots.resident
        self.stats.bytes = self.slots.resident * self.chunk_bytes
        return self.stats.copy()
