"""What a private tier holds, known in memory, so that a lookup is answered at once."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from kvcascade.types import Entry, Key, MissReason

from .eviction import EvictionPolicy
from .ghosts import Ghosts
from .keymap import KeyMap

__all__ = ["Admission", "Residency"]


class _State(IntEnum):
    WRITING = 1
    READY = 2
    LEAVING = 3
    """Chosen as a victim; the job that deletes it has not ended."""


class Admission(NamedTuple):
    """What a write may do: the leading `admitted` keys of the offer, after these victims are deleted."""

    admitted: int
    victims: list[Key]


class Residency:
    """Keys, bytes and eviction order of one private tier. No I/O; used by the scheduler thread only.

    Capacity is reserved when a write is admitted, so that what is in flight counts. A key that is being written,
    read or deleted keeps its entry until that job has ended: nothing is written twice at once, and a chunk being
    read is no victim.
    """

    def __init__(
        self,
        footprint: Callable[[int], int],
        capacity: int | None,
        policy: EvictionPolicy,
    ) -> None:
        """`footprint`: payload bytes to occupied bytes; `capacity`: occupied bytes in all, None for no bound."""
        self.capacity = capacity
        self.bytes = 0
        self.chunks = 0
        """READY ones."""
        self.evictions = 0
        self.ghosts = Ghosts()
        self._footprint = footprint
        self._policy = policy
        self._entries: KeyMap[int] = KeyMap()
        self._keys: list[Key] = []
        self._sizes: list[int] = []
        self._states = bytearray()
        self._readers: list[int] = []
        self._free: list[int] = []

    def load(self, entries: Iterable[Entry]) -> list[Key]:
        """Takes in what a tier found, the least recently used first. Known keys are left as they are; returns the
        others."""
        new = []
        for entry in sorted(entries, key=lambda entry: entry.used):
            if entry.key not in self._entries:
                self._add(entry.key, self._footprint(entry.nbytes), _State.READY)
                self.chunks += 1
                new.append(entry.key)
        return new

    def __contains__(self, key: Key) -> bool:
        """Whether the key is readable on the tier."""
        return self._state(key) == _State.READY

    def __iter__(self) -> Iterator[Key]:
        """The readable keys."""
        return (key for key in self._entries if key in self)

    def why(self, key: Key) -> MissReason:
        """Why the key is not readable."""
        return self.ghosts.why(key)

    def touch(self, keys: Sequence[Key]) -> list[Key]:
        """These were used, as one prompt, head first. Returns those that are here, tail first."""
        here = []
        order = []
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None and self._states[entry] != _State.LEAVING:
                here.append(key)
                order.append(entry)
        self._policy.touch(order)
        return here

    # Writes

    def absent(self, keys: Sequence[Key]) -> list[int]:
        """The places of those keys that a write could bring: neither here nor on their way here or away."""
        return [place for place, key in enumerate(keys) if key not in self._entries]

    def admit(self, keys: Sequence[Key], nbytes: int) -> Admission:
        """Reserves room for these absent keys, as many leading ones as there can be room for, and chooses the
        victims that this takes. Each chunk has `nbytes` payload bytes."""
        size = self._footprint(nbytes)
        count, victims = len(keys), []
        if self.capacity is not None:
            free = self.capacity - self.bytes
            if count * size > free:
                victims = self._policy.victims(-(-(count * size - free) // size), self._busy)
                free += sum(self._sizes[victim] for victim in victims)
                count = min(count, max(0, free // size))
                victims = self._fewest(victims, self.bytes + count * size - self.capacity)
        gone = [self._evict(victim) for victim in victims]
        for key in reversed(keys[:count]):
            self._add(key, size, _State.WRITING)
        return Admission(count, gone)

    def written(self, key: Key) -> bool:
        """The write has ended well: the key is readable. False where that was not awaited."""
        entry = self._entries.get(key)
        if entry is None or self._states[entry] != _State.WRITING:
            return False
        self._states[entry] = _State.READY
        self.chunks += 1
        self._policy.release(entry)
        return True

    def not_written(self, key: Key, reason: MissReason) -> None:
        """The write has ended without the chunk being there."""
        entry = self._entries.get(key)
        if entry is not None and self._states[entry] == _State.WRITING:
            self._drop(entry, reason)

    def deleted(self, victims: Iterable[Key]) -> list[Key]:
        """The job that deletes these victims has ended. Returns those that are gone by that."""
        gone = []
        for key in victims:
            entry = self._entries.get(key)
            if entry is not None and self._states[entry] == _State.LEAVING:
                self._entries.pop(key)
                self._give_back(entry)
                gone.append(key)
        self.evictions += len(gone)
        return gone

    def spared(self, victims: Iterable[Key]) -> None:
        """The job that was to delete these victims never ran: they are still there."""
        for key in victims:
            entry = self._entries.get(key)
            if entry is not None and self._states[entry] == _State.LEAVING:
                self._states[entry] = _State.READY
                self.chunks += 1
                self.bytes += self._sizes[entry]
                self._policy.insert(entry, key)

    # Reads

    def begin_read(self, key: Key) -> None:
        """A job will read this key, which is here; it is no victim until `end_read`."""
        entry = self._entries.get(key)
        if entry is not None:
            self._readers[entry] += 1

    def end_read(self, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is not None and self._readers[entry]:
            self._readers[entry] -= 1
            if not self._readers[entry] and self._states[entry] == _State.READY:
                self._policy.release(entry)

    def lost(self, key: Key, reason: MissReason) -> bool:
        """The tier does not have this key after all, or not any more. False where that was known."""
        entry = self._entries.get(key)
        if entry is None or self._states[entry] != _State.READY:
            return False
        self.chunks -= 1
        self._drop(entry, reason)
        return True

    def clear(self) -> list[Key]:
        """Forgets everything, for the tier was emptied. Returns the keys that were there."""
        there = [key for key in self._entries if self._state(key) != _State.WRITING]
        self._entries.clear()
        for entry, state in enumerate(self._states):
            if state in (_State.WRITING, _State.READY):
                self._policy.remove(entry)
        self._keys.clear()
        self._sizes.clear()
        self._states.clear()
        self._readers.clear()
        self._free.clear()
        self.bytes = self.chunks = 0
        return there

    def _state(self, key: Key) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else self._states[entry]

    def _add(self, key: Key, size: int, state: _State) -> None:
        if self._free:
            entry = self._free.pop()
            self._keys[entry], self._sizes[entry], self._readers[entry] = key, size, 0
            self._states[entry] = state
        else:
            entry = len(self._keys)
            self._keys.append(key)
            self._sizes.append(size)
            self._readers.append(0)
            self._states.append(state)
        self._entries[key] = entry
        self.bytes += size
        self._policy.insert(entry, key)

    def _evict(self, entry: int) -> Key:
        key = self._keys[entry]
        self._policy.remove(entry)
        self._states[entry] = _State.LEAVING
        self.bytes -= self._sizes[entry]
        self.chunks -= 1
        self.ghosts.add(key, MissReason.EVICTED)
        return key

    def _drop(self, entry: int, reason: MissReason) -> None:
        key = self._keys[entry]
        self._policy.remove(entry)
        self._entries.pop(key)
        self.bytes -= self._sizes[entry]
        self.ghosts.add(key, reason)
        self._give_back(entry)

    def _give_back(self, entry: int) -> None:
        self._states[entry] = 0
        self._keys[entry] = b""
        self._free.append(entry)

    def _busy(self, entry: int) -> bool:
        return self._states[entry] != _State.READY or self._readers[entry] > 0

    def _fewest(self, victims: list[int], short: int) -> list[int]:
        """The leading victims whose sizes cover `short`."""
        for number, victim in enumerate(victims):
            if short <= 0:
                return victims[:number]
            short -= self._sizes[victim]
        return victims
