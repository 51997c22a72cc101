"""What a private tier holds, known in memory, so that a lookup is answered at once."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from kvcascade.types import Entry, Key, MissReason

from .eviction import EvictionPolicy
from .eviction.once import OncePerRequest
from .ghosts import Ghosts
from .keymap import KeyMap

__all__ = ["Admission", "Residency", "Touched"]

_EARLIER = 1
"""The number of the request that stands for all before this process began."""
_MOST_USES = 255
_WRITING, _READY, _LEAVING = 1, 2, 3
"""States of an entry. One that leaves was chosen as a victim; the job that deletes it has not ended."""
_LAST_USE = attrgetter("used")


class Admission(NamedTuple):
    """What a write may do: the leading `admitted` keys of the offer, after these victims are deleted."""

    admitted: int
    victims: list[Key]


class Touched(NamedTuple):
    """What a touch has met."""

    here: list[Key]
    """Keys that the tier holds or is just being written, tail first."""
    uses: Mapping[Key, int]
    """Of those that this was a further use of: how many there are now."""


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
        ttl: float | None = None,
    ) -> None:
        """`footprint`: payload bytes to occupied bytes; `capacity`: occupied bytes in all, None for no bound;
        `ttl`: seconds that a chunk is readable, None for no end."""
        self.capacity = capacity
        self.now = 0.0
        """The time of the step, set by the level."""
        self.bytes = 0
        self.chunks = 0
        """READY ones."""
        self.evictions = 0
        self.ghosts = Ghosts()
        self._footprint = footprint
        self._policy = policy
        self._ttl = ttl
        self._entries: KeyMap[int] = KeyMap()
        self._keys: list[Key] = []
        self._sizes: list[int] = []
        self._born: list[float] = []
        self._uses = bytearray()
        self._once = OncePerRequest(0)
        self._clean = bytearray()
        self.clean = 0
        """READY ones that are marked as held below too."""
        self._states = bytearray()
        self._readers: list[int] = []
        self._free: list[int] = []

    def load(self, entries: Iterable[Entry]) -> list[Key]:
        """Takes in what a tier found, the least recently used first. Known keys are left as they are; returns the
        others."""
        known = self._entries
        new: dict[Key, Entry] = {}
        for entry in sorted(entries, key=_LAST_USE):
            if entry.key not in known:
                new.setdefault(entry.key, entry)
        keys, found = list(new), new.values()
        sizes = {nbytes: self._footprint(nbytes) for nbytes in {entry.nbytes for entry in found}}
        unix = time.time()
        numbers = self._add(
            keys,
            _READY,
            [sizes[entry.nbytes] for entry in found],
            [self.now - max(0.0, unix - entry.written) for entry in found],
            [min(max(1, entry.uses), _MOST_USES) for entry in found],
        )
        self.chunks += len(keys)
        for number in numbers:
            self._once.again(number, _EARLIER)
        self._policy.touch(numbers, _EARLIER)
        return keys

    def __contains__(self, key: Key) -> bool:
        """Whether the key is readable on the tier."""
        entry = self._entries.get(key)
        return entry is not None and self._states[entry] == _READY and not self._expired(entry)

    def __iter__(self) -> Iterator[Key]:
        """The readable keys."""
        return (key for key in self._entries if key in self)

    def why(self, key: Key) -> MissReason:
        """Why the key is not readable."""
        entry = self._entries.get(key)
        return MissReason.EXPIRED if entry is not None and self._expired(entry) else self.ghosts.why(key)

    def size_of(self, nbytes: int) -> int:
        """Bytes that a chunk of `nbytes` payload bytes occupies."""
        return self._footprint(nbytes)

    def coldest_dirty(self, count: int) -> list[Key]:
        """Those that are not clean of the up to `count` keys that would go first."""
        return [self._keys[entry] for entry in self._policy.victims(count, self._busy) if not self._clean[entry]]

    def is_clean(self, key: Key) -> bool:
        """Whether the chunk is held by the tier below too."""
        entry = self._entries.get(key)
        return entry is not None and bool(self._clean[entry])

    def mark_clean(self, key: Key) -> None:
        """The chunk is held by the tier below too."""
        entry = self._entries.get(key)
        if entry is not None and self._states[entry] == _READY and not self._clean[entry]:
            self._clean[entry] = 1
            self.clean += 1

    def mark_dirty(self, key: Key) -> None:
        """The tier below has lost the chunk."""
        entry = self._entries.get(key)
        if entry is not None:
            self._soil(entry)

    def expire(self, keys: Iterable[Key]) -> list[Key]:
        """Forgets those of the keys that have outlived their time, if nothing uses them; the caller has them
        deleted."""
        old = [key for key in keys if self._outlived(key)]
        for key in old:
            self.lost(key, MissReason.EXPIRED)
        return old

    def squeeze(self) -> None:
        """The tier has refused what should have fitted: it has less room than it said. Until `capacity` is set
        again, victims make room for what comes."""
        if self.capacity is not None:
            self.capacity = min(self.capacity, self.bytes)

    def touch(self, keys: Sequence[Key], request: int = 0) -> Touched:
        """These were used by the request of this number (0: by nobody), as one prompt, head first."""
        here, uses = [], {}
        order = []
        for key in reversed(keys):
            entry = self._entries.get(key)
            if entry is not None and self._states[entry] != _LEAVING:
                here.append(key)
                order.append(entry)
                if self._once.again(entry, request) and self._uses[entry] < _MOST_USES:
                    self._uses[entry] += 1
                    uses[key] = self._uses[entry]
        self._policy.touch(order, request)
        return Touched(here, uses)

    # Writes

    def absent(self, keys: Sequence[Key]) -> list[int]:
        """The places of those keys that a write could bring: neither here nor on their way here or away."""
        return [place for place, key in enumerate(keys) if key not in self._entries]

    def leaving(self, keys: Sequence[Key]) -> list[Key]:
        """Those of the keys that are on their way out, so that no write can bring them now."""
        return [key for key in keys if self._state(key) == _LEAVING]

    def admit(
        self, keys: Sequence[Key], nbytes: int, hold: Callable[[Sequence[Key]], bool] = lambda victims: False
    ) -> Admission:
        """Reserves room for these absent keys, as many leading ones as there can be room for, and chooses the
        victims that this takes, unless `hold` says that they should not go yet. Each chunk has `nbytes` payload
        bytes."""
        size = self._footprint(nbytes)
        count, victims = len(keys), []
        if self.capacity is not None:
            free = self.capacity - self.bytes
            if count * size > free:
                victims = self._policy.victims(-(-(count * size - free) // size), self._busy)
                if victims and hold([self._keys[victim] for victim in victims]):
                    victims = []
                free += sum(self._sizes[victim] for victim in victims)
                count = min(count, max(0, free // size))
                victims = self._fewest(victims, self.bytes + count * size - self.capacity) if count else []
        gone = self._evict(victims)
        self._add(
            keys[count - 1 :: -1] if count else [], _WRITING, [size] * count, [self.now] * count, [1] * count
        )
        return Admission(count, gone)

    def written(self, key: Key) -> bool:
        """The write has ended well: the key is readable. False where that was not awaited."""
        entry = self._entries.get(key)
        if entry is None or self._states[entry] != _WRITING:
            return False
        self._states[entry] = _READY
        self.chunks += 1
        self._policy.release(entry)
        return True

    def not_written(self, key: Key, reason: MissReason) -> None:
        """The write has ended without the chunk being there."""
        entry = self._entries.get(key)
        if entry is not None and self._states[entry] == _WRITING:
            self._drop(entry, reason)

    def deleted(self, victims: Iterable[Key]) -> list[Key]:
        """The job that deletes these victims has ended. Returns those that are gone by that."""
        gone = []
        for key in victims:
            entry = self._entries.get(key)
            if entry is not None and self._states[entry] == _LEAVING:
                self._entries.pop(key)
                self._give_back(entry)
                gone.append(key)
        self.evictions += len(gone)
        return gone

    def spared(self, victims: Iterable[Key]) -> None:
        """The job that was to delete these victims never ran: they are still there."""
        for key in victims:
            entry = self._entries.get(key)
            if entry is not None and self._states[entry] == _LEAVING:
                self._states[entry] = _READY
                self.chunks += 1
                self.bytes += self._sizes[entry]
                self._policy.insert((entry,), (key,), (self._uses[entry],))

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
            if not self._readers[entry] and self._states[entry] == _READY:
                self._policy.release(entry)

    def lost(self, key: Key, reason: MissReason) -> bool:
        """The tier does not have this key after all, or not any more. False where that was known."""
        entry = self._entries.get(key)
        if entry is None or self._states[entry] != _READY:
            return False
        self.chunks -= 1
        self._drop(entry, reason)
        return True

    def clear(self) -> list[Key]:
        """Forgets everything, for the tier was emptied. Returns the keys that were there."""
        there = [key for key in self._entries if self._state(key) != _WRITING]
        self._entries.clear()
        for entry, state in enumerate(self._states):
            if state in (_WRITING, _READY):
                self._policy.remove(entry)
        self._keys.clear()
        self._sizes.clear()
        self._born.clear()
        self._uses.clear()
        self._clean.clear()
        self.clean = 0
        self._states.clear()
        self._readers.clear()
        self._free.clear()
        self.bytes = self.chunks = 0
        return there

    def _state(self, key: Key) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else self._states[entry]

    def _expired(self, entry: int) -> bool:
        return self._ttl is not None and self.now - self._born[entry] > self._ttl

    def _outlived(self, key: Key) -> bool:
        entry = self._entries.get(key)
        return entry is not None and self._expired(entry) and not self._busy(entry)

    def _add(
        self, keys: Sequence[Key], state: int, sizes: Sequence[int], born: Sequence[float], uses: Sequence[int]
    ) -> list[int]:
        """Entries for these new keys, the least recent one first."""
        self._make_entries(len(keys) - len(self._free))
        entries = [self._free.pop() for _ in keys]
        self._entries.set_all(keys, entries)
        self.bytes += sum(sizes)
        use_first = self._once.insert
        for entry, key, size, since, count in zip(entries, keys, sizes, born, uses, strict=True):
            self._keys[entry], self._sizes[entry], self._readers[entry] = key, size, 0
            self._states[entry], self._born[entry], self._uses[entry] = state, since, count
            use_first(entry)
        self._policy.insert(entries, keys, uses)
        return entries

    def _make_entries(self, more: int) -> None:
        """Gives room for so many more entries."""
        if more <= 0:
            return
        first = len(self._keys)
        self._keys += [b""] * more
        self._sizes += [0] * more
        self._born += [0.0] * more
        self._readers += [0] * more
        self._uses += bytes(more)
        self._clean += bytes(more)
        self._states += bytes(more)
        self._free += range(first + more - 1, first - 1, -1)

    def _soil(self, entry: int) -> None:
        self.clean -= self._clean[entry]
        self._clean[entry] = 0

    def _evict(self, victims: Sequence[int]) -> list[Key]:
        keys = [self._keys[entry] for entry in victims]
        self._policy.evict(victims)
        for entry in victims:
            self._soil(entry)
            self._states[entry] = _LEAVING
            self.bytes -= self._sizes[entry]
        self.chunks -= len(keys)
        self.ghosts.add_all(keys, MissReason.EVICTED)
        return keys

    def _drop(self, entry: int, reason: MissReason) -> None:
        key = self._keys[entry]
        self._policy.remove(entry)
        self._entries.pop(key)
        self.bytes -= self._sizes[entry]
        self.ghosts.add(key, reason)
        self._give_back(entry)

    def _give_back(self, entry: int) -> None:
        self._soil(entry)
        self._states[entry] = 0
        self._keys[entry] = b""
        self._free.append(entry)

    def _busy(self, entry: int) -> bool:
        return self._states[entry] != _READY or self._readers[entry] > 0

    def _fewest(self, victims: list[int], short: int) -> list[int]:
        """The leading victims whose sizes cover `short`."""
        for number, victim in enumerate(victims):
            if short <= 0:
                return victims[:number]
            short -= self._sizes[victim]
        return victims
