"""Primary's bookkeeping: which chunk is in which slot of the pool, and who uses it."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum

from kvcascade.types import Key

from .eviction import EvictionPolicy
from .keymap import KeyMap

__all__ = ["SlotState", "SlotTable"]


class SlotState(IntEnum):
    FREE = 0
    STORING = 1
    """The engine is writing it."""
    PROMOTING = 2
    """A tier is reading into it."""
    READY = 3
    """Readable: its key is HIT."""
    QUARANTINED = 4
    """Its chunk is void, but a copy of the engine or a late read may still use its bytes."""


class SlotTable:
    """Slots, keys and pins of the primary tier. No I/O; used by the scheduler thread only.

    A slot is pinned by each transfer that reads or writes it and by each request that its chunk was promoted for;
    every pin has one owner, who releases it once. A slot whose key was HIT in this step is protected to the step's
    end. Pinned and protected slots are never victims.

    At rest: pins are 0 and free + resident = capacity.
    """

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.pinned = 0
        """Slots with at least one pin."""
        self.resident = 0
        """Slots that are READY."""
        self._policy = policy
        self._slots: KeyMap[int] = KeyMap()
        self._quarantine: dict[Key, int] = {}
        self._copies: dict[Key, list[str]] = {}
        """Key in quarantine -> the requests whose copies use its slot, once for each."""
        self._keys: list[Key] = [b""] * capacity
        self._states = bytearray(capacity)
        self._pins = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self.clean = 0
        """Readable slots that are marked as held below too."""
        self._clean = bytearray(capacity)
        self._step = 1
        self._hit_step = [0] * capacity
        self._hits: list[int] = []

    # What is where

    def find(self, key: Key) -> int:
        """The slot of a key, ready or not; -1 for none."""
        slot = self._slots.get(key)
        return -1 if slot is None else slot

    def state(self, slot: int) -> int:
        return self._states[slot]

    def key(self, slot: int) -> Key:
        return self._keys[slot]

    def pins(self, slot: int) -> int:
        return self._pins[slot]

    @property
    def free(self) -> int:
        return len(self._free)

    def quarantined(self, key: Key) -> bool:
        """Whether something begun before a reset still uses the slot that this key had."""
        return key in self._quarantine

    @property
    def quarantine_size(self) -> int:
        return len(self._quarantine)

    # Hits

    def hit(self, key: Key) -> bool:
        """Whether the key is readable; if so it stays so to the end of the step."""
        slot = self._slots.get(key)
        if slot is None or self._states[slot] != SlotState.READY:
            return False
        if self._hit_step[slot] != self._step:
            self._hit_step[slot] = self._step
            self._hits.append(slot)
        return True

    def hit_prefix(self, keys: Sequence[Key]) -> int:
        """How many leading keys are readable; those stay so to the end of the step."""
        find, states, steps, step, hits = self._slots.get, self._states, self._hit_step, self._step, self._hits
        for place, key in enumerate(keys):
            slot = find(key)
            if slot is None or states[slot] != SlotState.READY:
                return place
            if steps[slot] != step:
                steps[slot] = step
                hits.append(slot)
        return len(keys)

    def end_step(self) -> None:
        """Ends the protection of this step's hits."""
        self._step += 1
        for slot in self._hits:
            if not self._pins[slot]:
                self._policy.release(slot)
        self._hits.clear()

    def touch(self, keys: Sequence[Key], request: int = 0) -> None:
        """These were used by the request of this number, as one prompt, head first."""
        slots = (self._slots.get(key) for key in reversed(keys))
        self._policy.touch([slot for slot in slots if slot is not None], request)

    # Coming and going

    def victims(self, room: int, spare: Container[Key] = ()) -> list[int] | None:
        """The slots that would have to go for `room` free ones; None where there is no such room. Chunks of
        `spare` stay; those that would have gone count as used."""
        short = room - len(self._free)
        found = self.coldest(short, spare)
        return found if len(found) >= short else None

    def coldest(self, count: int, spare: Container[Key] = ()) -> list[int]:
        """The up to `count` slots that would go first; of `spare` as in `victims`."""
        if count <= 0:
            return []
        spared: list[int] = []

        def busy(slot: int) -> bool:
            if self._busy(slot):
                return True
            if self._keys[slot] in spare:
                spared.append(slot)
                return True
            return False

        found = self._policy.victims(count, busy if spare else self._busy)
        self._policy.touch(spared)
        return found

    def is_clean(self, key: Key) -> bool:
        """Whether the key's chunk is held below too."""
        slot = self._slots.get(key)
        return slot is not None and bool(self._clean[slot])

    def mark_clean(self, key: Key) -> None:
        """The key's chunk is held below too."""
        slot = self._slots.get(key)
        if slot is not None and self._states[slot] == SlotState.READY and not self._clean[slot]:
            self._clean[slot] = 1
            self.clean += 1

    def mark_dirty(self, key: Key) -> None:
        """The tier below has lost the key's chunk."""
        slot = self._slots.get(key)
        if slot is not None:
            self._soil(slot)

    def evict(self, victims: Iterable[int]) -> list[Key]:
        """Frees these slots; returns their keys."""
        return [self._remove(slot, self._policy.evict) for slot in victims]

    def allocate(self, keys: Sequence[Key], state: SlotState) -> list[int]:
        """A free slot for each key, pinned once by the transfer that will fill it. There must be enough."""
        slots = [self._free.pop() for _ in keys]
        for key, slot in zip(reversed(keys), reversed(slots), strict=True):
            self._slots[key] = slot
            self._keys[slot] = key
            self._states[slot] = state
            self._pins[slot] = 1
            self._policy.insert(slot, key)
        self.pinned += len(slots)
        return slots

    def publish(self, slot: int) -> None:
        """The chunk is complete: findable means readable, from here on."""
        self._states[slot] = SlotState.READY
        self.resident += 1

    def discard(self, slot: int) -> None:
        """The transfer that should have filled the slot has failed and ended: it is free again."""
        self._unpin_all(slot)
        self._remove(slot)

    def abandon(self, slot: int) -> Key:
        """The chunk is void, but its transfer may still write: the slot keeps its one pin and loses its key."""
        key = self._keys[slot]
        self._slots.pop(key)
        self._policy.remove(slot)
        self._soil(slot)
        self._states[slot] = SlotState.QUARANTINED
        return key

    def pin(self, slot: int) -> None:
        if not self._pins[slot]:
            self.pinned += 1
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Releases one pin.

        Raises:
            ValueError: there is none; its owner has released it before.
        """
        if not self._pins[slot]:
            raise ValueError(f"slot {slot} has no pin to release")
        self._pins[slot] -= 1
        if self._pins[slot]:
            return
        self.pinned -= 1
        if self._states[slot] == SlotState.QUARANTINED:
            self._leave_quarantine(slot)
        elif self._hit_step[slot] != self._step:
            self._policy.release(slot)

    def clear(self, copies: Mapping[Key, list[str]]) -> list[Key]:
        """Voids every chunk. Slots that something still uses are quarantined until their last pin is released,
        and their keys with them: they can't be stored again before. `copies`: the requests whose copies use
        a key's slot, once for each. Returns the keys that were readable."""
        void = [(key, slot) for key in self._slots if (slot := self._slots.get(key)) is not None]
        readable = [key for key, slot in void if self._states[slot] == SlotState.READY]
        for key, slot in void:
            if not self._pins[slot]:
                self._remove(slot)
                continue
            if self._states[slot] == SlotState.READY:
                self.resident -= 1
            self.abandon(slot)
            self._quarantine[key] = slot
            if key in copies:
                self._copies[key] = copies[key]
        return readable

    def release_quarantined(self, key: Key, req_id: str) -> None:
        """A copy of this request, begun before a reset, has ended: releases its pin, where there is such."""
        copies = self._copies.get(key, [])
        if req_id not in copies:
            return
        copies.remove(req_id)
        if not copies:
            del self._copies[key]
        self.unpin(self._quarantine[key])

    def __iter__(self) -> Iterator[Key]:
        """The readable keys."""
        return (key for key in self._slots if self._states[self.find(key)] == SlotState.READY)

    def _busy(self, slot: int) -> bool:
        return bool(self._pins[slot]) or self._hit_step[slot] == self._step

    def _remove(self, slot: int, forget: Callable[[int], None] | None = None) -> Key:
        key = self._keys[slot]
        self._slots.pop(key)
        (forget or self._policy.remove)(slot)
        if self._states[slot] == SlotState.READY:
            self.resident -= 1
        self._set_free(slot)
        return key

    def _soil(self, slot: int) -> None:
        self.clean -= self._clean[slot]
        self._clean[slot] = 0

    def _set_free(self, slot: int) -> None:
        self._soil(slot)
        self._states[slot] = SlotState.FREE
        self._keys[slot] = b""
        self._free.append(slot)

    def _unpin_all(self, slot: int) -> None:
        if self._pins[slot]:
            self._pins[slot] = 0
            self.pinned -= 1

    def _leave_quarantine(self, slot: int) -> None:
        key = self._keys[slot]
        if self._quarantine.get(key) == slot:
            del self._quarantine[key]
        self._set_free(slot)
