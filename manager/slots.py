"""Primary's bookkeeping: which chunk is in which slot of the pool, and who uses it."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
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


# Plain ints: looking up a member takes longer than most of what is done to a slot.
_FREE, _READY, _QUARANTINED = int(SlotState.FREE), int(SlotState.READY), int(SlotState.QUARANTINED)


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
        self._passed: set[int] = set()
        """Slots that the policy may have passed over as busy."""
        self._protected: list[int] = []
        """Those of them that only this step protects."""

    # What is where

    def find(self, key: Key) -> int:
        """The slot of a key, ready or not; -1 for none."""
        slot = self._slots.get(key)
        return -1 if slot is None else slot

    def find_all(self, keys: Iterable[Key]) -> list[int]:
        """As `find`, for each of the keys."""
        return self._slots.get_all(keys, -1)

    def readable(self, keys: Iterable[Key]) -> list[int]:
        """The slots of these keys; -1 for one that is not readable."""
        states = self._states
        return [slot if slot >= 0 and states[slot] == _READY else -1 for slot in self._slots.each(keys, -1)]

    def absent(self, keys: Iterable[Key]) -> list[Key]:
        """Those of the keys that have no slot."""
        return self._slots.absent(keys)

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
        slot = self.find(key)
        return slot >= 0 and self.protect(slot)

    def protect(self, slot: int) -> bool:
        """As `hit`, by the slot."""
        if self._states[slot] != _READY:
            return False
        self._hit_step[slot] = self._step
        return True

    def hit_prefix(self, keys: Sequence[Key]) -> int:
        """How many leading keys are readable; those stay so to the end of the step."""
        states, steps, step = self._states, self._hit_step, self._step
        for place, slot in enumerate(self._slots.each(keys, -1)):
            if slot < 0 or states[slot] != _READY:
                return place
            steps[slot] = step
        return len(keys)

    def end_step(self) -> None:
        """Ends the protection of this step's hits."""
        self._step += 1
        for slot in self._protected:
            if not self._pins[slot] and slot in self._passed:
                self._release(slot)
        self._protected.clear()

    def touch(self, keys: Sequence[Key], request: int = 0) -> None:
        """These were used by the request of this number, as one prompt, head first."""
        slots = self._slots.get_all(reversed(keys), -1)
        self._policy.touch([slot for slot in slots if slot >= 0], request)

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
        keys, pins, steps, step = self._keys, self._pins, self._hit_step, self._step

        def busy(slot: int) -> bool:
            if pins[slot] or steps[slot] == step:
                return self._busy(slot)
            if spare and keys[slot] in spare:
                spared.append(slot)
                return True
            return False

        found = self._policy.victims(count, busy)
        if spared:
            self._policy.touch(spared)
        return found

    def is_clean(self, key: Key) -> bool:
        """Whether the key's chunk is held below too."""
        slot = self._slots.get(key)
        return slot is not None and bool(self._clean[slot])

    def dirty(self, slots: Iterable[int]) -> list[Key]:
        """The keys of those of these slots that are not known to be held below too."""
        return [self._keys[slot] for slot in slots if not self._clean[slot]]

    def mark_clean(self, key: Key) -> None:
        """The key's chunk is held below too."""
        slot = self._slots.get(key)
        if slot is not None and self._states[slot] == _READY and not self._clean[slot]:
            self._clean[slot] = 1
            self.clean += 1

    def mark_dirty(self, key: Key) -> None:
        """The tier below has lost the key's chunk."""
        slot = self._slots.get(key)
        if slot is not None:
            self._soil(slot)

    def evict(self, victims: Sequence[int]) -> list[Key]:
        """Frees these slots, which are readable and not in use; returns their keys."""
        names, states = self._keys, self._states
        keys = [names[slot] for slot in victims]
        self._slots.remove_all(keys)
        self._policy.evict(victims)
        if self.clean:
            for slot in victims:
                self._soil(slot)
        for slot in victims:
            states[slot] = _FREE
            names[slot] = b""
        self._free += victims
        self.resident -= len(keys)
        return keys

    def allocate(self, keys: Sequence[Key], state: SlotState) -> list[int]:
        """A free slot for each key, pinned once by the transfer that will fill it. There must be enough."""
        first = len(self._free) - len(keys)
        slots = self._free[first:]
        del self._free[first:]
        self._slots.set_all(keys, slots)
        self._policy.insert(slots[::-1], keys[::-1])
        names, states, pins, flag = self._keys, self._states, self._pins, int(state)
        for key, slot in zip(keys, slots, strict=True):
            names[slot] = key
            states[slot] = flag
            pins[slot] = 1
        self.pinned += len(slots)
        return slots

    def publish(self, slot: int) -> None:
        """The chunk is complete: findable means readable, from here on."""
        self.publish_all((slot,))

    def publish_all(self, slots: Sequence[int]) -> None:
        """As `publish`, of several slots."""
        states = self._states
        for slot in slots:
            states[slot] = _READY
        self.resident += len(slots)

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
        self._states[slot] = _QUARANTINED
        return key

    def pin(self, slot: int) -> None:
        self.pin_all((slot,))

    def pin_all(self, slots: Iterable[int]) -> None:
        """As `pin`, of several slots, or of one several times."""
        pins, fresh = self._pins, 0
        for slot in slots:
            fresh += not pins[slot]
            pins[slot] += 1
        self.pinned += fresh

    def unpin(self, slot: int) -> None:
        """Releases one pin.

        Raises:
            ValueError: there is none; its owner has released it before.
        """
        self.unpin_all((slot,))

    def unpin_all(self, slots: Iterable[int]) -> None:
        """As `unpin`, of several slots, or of one several times."""
        pins, states, passed = self._pins, self._states, self._passed
        for slot in slots:
            left = pins[slot] - 1
            if left < 0:
                raise ValueError(f"slot {slot} has no pin to release")
            pins[slot] = left
            if left:
                continue
            self.pinned -= 1
            if states[slot] == _QUARANTINED:
                self._leave_quarantine(slot)
            elif slot in passed:
                if self._hit_step[slot] == self._step:
                    self._protected.append(slot)
                else:
                    self._release(slot)

    def clear(self, copies: Mapping[Key, list[str]]) -> list[Key]:
        """Voids every chunk. Slots that something still uses are quarantined until their last pin is released,
        and their keys with them: they can't be stored again before. `copies`: the requests whose copies use
        a key's slot, once for each. Returns the keys that were readable."""
        void = [(key, slot) for key in self._slots if (slot := self._slots.get(key)) is not None]
        readable = [key for key, slot in void if self._states[slot] == _READY]
        for key, slot in void:
            if not self._pins[slot]:
                self._remove(slot)
                continue
            if self._states[slot] == _READY:
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
        return (key for key in self._slots if self._states[self.find(key)] == _READY)

    def _busy(self, slot: int) -> bool:
        """Asked by the policy, which passes over those that are."""
        if not self._pins[slot]:
            if self._hit_step[slot] != self._step:
                return False
            self._protected.append(slot)
        self._passed.add(slot)
        return True

    def _release(self, slot: int) -> None:
        """The slot is not busy any more."""
        self._passed.remove(slot)
        self._policy.release(slot)

    def _remove(self, slot: int) -> None:
        self._slots.pop(self._keys[slot])
        self._policy.remove(slot)
        if self._states[slot] == _READY:
            self.resident -= 1
        self._set_free(slot)

    def _soil(self, slot: int) -> None:
        self.clean -= self._clean[slot]
        self._clean[slot] = 0

    def _set_free(self, slot: int) -> None:
        self._soil(slot)
        self._states[slot] = _FREE
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
