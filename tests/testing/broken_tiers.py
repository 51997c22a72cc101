"""Tiers with one fault each, and the test of the conformance class that must see it.

Not collected by itself: `test_conformance.py` runs it and expects the failures.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from kvcascade.testing import TierConformance
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.memory import MemoryTier
from kvcascade.types import Buffer, Capabilities, Entry, Key, Outcome


class Broken(TierConformance):
    """Opens the tier `Faulty`; `seen_by` names the test that must fail."""

    Faulty: ClassVar[type[MemoryTier]]
    seen_by: ClassVar[str]

    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        return self.Faulty(capacity)

    def raw_corrupt(self, tier: Any, key: Key) -> None:
        tier._chunks[key].payload = b"\0" + tier._chunks[key].payload[1:]


class TestShiftsNeighbours(Broken):
    seen_by = "test_missing_keys_shift_no_neighbour"

    class Faulty(MemoryTier):
        def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
            found = [key for key, there in zip(keys, self.exists(keys), strict=True) if there]
            super().read(found, buffers[: len(found)])
            return [Outcome.OK if key in found else Outcome.MISSING for key in keys]


class TestShowsHalfAChunk(Broken):
    seen_by = "test_a_reader_beside_a_writer_sees_whole_chunks"

    class Faulty(MemoryTier):
        def write(
            self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()
        ) -> list[Outcome]:
            halves = [memoryview(bytes(buffer[: len(buffer) // 2]).ljust(len(buffer))) for buffer in buffers]
            super().write(keys, halves, victims)
            time.sleep(0.002)
            self.delete(keys)
            return super().write(keys, buffers)


class TestRefusesWhatItHas(Broken):
    seen_by = "test_many_writers_of_the_same_keys"

    class Faulty(MemoryTier):
        def write(
            self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()
        ) -> list[Outcome]:
            known = self.exists(keys)
            outcomes = super().write(keys, buffers, victims)
            return [Outcome.REFUSED if there else one for there, one in zip(known, outcomes, strict=True)]


class TestOverwrites(Broken):
    seen_by = "test_a_written_key_keeps_its_bytes"

    class Faulty(MemoryTier):
        def write(
            self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()
        ) -> list[Outcome]:
            return super().write(keys, buffers, [*victims, *keys])


class TestIgnoresItsCapacity(Broken):
    seen_by = "test_the_capacity_is_hard"

    class Faulty(MemoryTier):
        def _put(self, key: Key, payload: bytes, epoch: int) -> Outcome:
            capacity, self._capacity = self._capacity, None
            outcome = super()._put(key, payload, epoch)
            self._capacity = capacity
            return outcome


class TestChecksItsCapacityTooEarly(Broken):
    seen_by = "test_the_capacity_holds_against_many_writers"

    class Faulty(MemoryTier):
        def _put(self, key: Key, payload: bytes, epoch: int) -> Outcome:
            if self._capacity is not None and self._bytes + len(payload) > self._capacity:
                return Outcome.REFUSED
            time.sleep(0.001)
            capacity, self._capacity = self._capacity, None
            outcome = super()._put(key, payload, epoch)
            self._capacity = capacity or 4 << 20
            return outcome


class TestRefusesBeforeItIsFull(Broken):
    seen_by = "test_the_capacity_is_hard"

    class Faulty(MemoryTier):
        def _put(self, key: Key, payload: bytes, epoch: int) -> Outcome:
            if self._capacity is not None and self._bytes + 2 * len(payload) > self._capacity:
                return Outcome.REFUSED
            return super()._put(key, payload, epoch)


class TestKeepsVictims(Broken):
    seen_by = "test_victims_make_room"

    class Faulty(MemoryTier):
        def write(
            self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()
        ) -> list[Outcome]:
            return super().write(keys, buffers)


class TestServesWrongBytes(Broken):
    seen_by = "test_a_corrupt_chunk_is_never_served"

    class Faulty(MemoryTier):
        def _copy(self, key: Key, chunk: Any, buffer: Buffer) -> Outcome:
            if chunk is None or len(buffer) != len(chunk.payload):
                return super()._copy(key, chunk, buffer)
            buffer[:] = chunk.payload
            return Outcome.OK


class TestKeepsWhatIsCorrupt(Broken):
    seen_by = "test_a_corrupt_chunk_is_never_served"

    class Faulty(MemoryTier):
        def _copy(self, key: Key, chunk: Any, buffer: Buffer) -> Outcome:
            outcome = super()._copy(key, chunk, buffer)
            if outcome == Outcome.CORRUPT:
                self._chunks[key] = chunk
            return outcome


class TestServesAnyLength(Broken):
    seen_by = "test_a_chunk_is_never_read_at_another_length"

    class Faulty(MemoryTier):
        def _copy(self, key: Key, chunk: Any, buffer: Buffer) -> Outcome:
            if chunk is not None and len(buffer) < len(chunk.payload):
                buffer[:] = chunk.payload[: len(buffer)]
                return Outcome.OK
            return super()._copy(key, chunk, buffer)


class TestWritesPastTheBuffer(Broken):
    seen_by = "test_any_length_from_and_to_any_address"

    class Faulty(MemoryTier):
        def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
            outcomes = super().read(keys, buffers)
            for buffer in buffers:
                whole = memoryview(buffer.obj)
                end = len(buffer) + 1
                if whole[: len(buffer)] == buffer and len(whole) > end:
                    whole[len(buffer) : end] = b"\0"
            return outcomes


class TestMiscounts(Broken):
    seen_by = "test_entries_and_usage_add_up"

    class Faulty(MemoryTier):
        def delete(self, keys: Sequence[Key]) -> list[Outcome]:
            before = self._bytes
            outcomes = super().delete(keys)
            self._bytes = before
            return outcomes


class TestListsWhatIsGone(Broken):
    seen_by = "test_entries_and_usage_add_up"

    class Faulty(MemoryTier):
        def entries(self) -> Iterator[Entry]:
            self._listed = getattr(self, "_listed", {}) | {entry.key: entry for entry in super().entries()}
            return iter(self._listed.values())


class TestFoldsKeys(Broken):
    seen_by = "test_any_key_of_1_to_255_bytes"

    class Faulty(MemoryTier):
        def write(
            self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()
        ) -> list[Outcome]:
            return super().write([key.lower() for key in keys], buffers, victims)

        def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
            return super().read([key.lower() for key in keys], buffers)

        def exists(self, keys: Sequence[Key]) -> list[bool]:
            return super().exists([key.lower() for key in keys])


class TestDeletesAlwaysOk(Broken):
    seen_by = "test_delete_says_what_was_there"

    class Faulty(MemoryTier):
        def delete(self, keys: Sequence[Key]) -> list[Outcome]:
            super().delete(keys)
            return [Outcome.OK] * len(keys)


class TestWorksWhenClosed(Broken):
    seen_by = "test_close_twice_and_use_after_close"

    class Faulty(MemoryTier):
        def _check_open(self) -> None:
            return


class TestMovesNothing(Broken):
    seen_by = "test_what_was_stored_before_a_move_is_void"

    class Faulty(MemoryTier):
        def move_to(self, epoch: str) -> None:
            return


class TestLetsLateWritesIn(Broken):
    seen_by = "test_a_write_that_a_move_overtakes_stays_invisible"

    class Faulty(MemoryTier):
        def move_to(self, epoch: str) -> None:
            super().move_to(epoch)
            self._epoch -= 1


class KeptTier(MemoryTier):
    """Keeps its chunks over a restart, rightly; the ones below do one thing wrong."""

    stores: ClassVar[dict[Any, Any]] = {}

    def __init__(self, path: Path, context: OpenContext) -> None:
        super().__init__()
        self.capabilities = Capabilities(persistent=True)
        self._place = self.place(path, context)
        mark, self._chunks, self._bytes = self.stores.get(self._place, (context.epoch, {}, 0))
        self._mark = context.epoch
        if mark != self._mark:
            self.move_to(self._mark)

    def place(self, path: Path, context: OpenContext) -> Any:
        return type(self), path, context.namespace

    def move_to(self, epoch: str) -> None:
        super().move_to(epoch)
        self._mark = epoch

    def close(self) -> None:
        if not self._closed:
            self.stores[self._place] = self._mark, dict(self._chunks), self._bytes
        super().close()


class TestKept(TierConformance):
    Faulty: ClassVar[type[KeptTier]] = KeptTier
    seen_by: ClassVar[str] = ""

    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        return self.Faulty(path, context)


class TestForgetsWhoseChunksTheyAre(TestKept):
    seen_by = "test_another_identity_sees_nothing"

    class Faulty(KeptTier):
        def place(self, path: Path, context: OpenContext) -> Any:
            return type(self), path


class TestConfusesTwoFieldsOfTheIdentity(TestKept):
    seen_by = "test_another_identity_sees_nothing"

    class Faulty(KeptTier):
        def place(self, path: Path, context: OpenContext) -> Any:
            fields = dict(context.namespace.fields)
            fields.pop("tp")
            return type(self), path, hashlib.sha256(repr(fields).encode()).digest()


class TestBringsVoidChunksBack(TestKept):
    seen_by = "test_what_is_void_stays_so_over_a_restart"

    class Faulty(KeptTier):
        def move_to(self, epoch: str) -> None:
            kept = dict(self._chunks), self._bytes
            super().move_to(epoch)
            self._revived = kept

        def close(self) -> None:
            if not self._closed and hasattr(self, "_revived"):
                self._chunks, self._bytes = self._revived
            super().close()


class TestForgetsTheEpoch(TestKept):
    seen_by = "test_who_names_the_same_weights_finds_their_chunks_again"

    class Faulty(KeptTier):
        def __init__(self, path: Path, context: OpenContext) -> None:
            super().__init__(path, replace(context, epoch=""))

        def move_to(self, epoch: str) -> None:
            super().move_to("")


class TestForgetsRecency(TestKept):
    seen_by = "test_recency_outlives_a_close"

    class Faulty(KeptTier):
        def close(self) -> None:
            for chunk in self._chunks.values():
                chunk.used = chunk.written
            super().close()


class TestForgetsEverything(TestKept):
    seen_by = "test_chunks_outlive_a_close"

    class Faulty(KeptTier):
        def place(self, path: Path, context: OpenContext) -> Any:
            return object()
