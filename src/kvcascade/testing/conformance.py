"""What every tier must do: a pytest class that the tests of each tier derive from."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvcascade.errors import ClosedError
from kvcascade.tiers import OpenContext, Tier
from kvcascade.types import Buffer, Changes, Entry, Key, Namespace, Outcome, OutcomeKind

from .bytes import UNWRITTEN, buffer, bytes_for, holds, key_for

__all__ = ["NAMESPACE", "TierConformance"]

KIB = 1 << 10
MIB = 1 << 20
HANG = 60.0  # seconds after which a thread counts as hung; no test waits for it to pass

NAMESPACE = Namespace.of(
    model="m", revision="r1", dtype="bfloat16", tokens_per_block=16, layout="NHD", tp=1, hash="sha256", tenant=""
)
"""Whose chunks the tests write, where they don't ask for another."""

Opener = Callable[..., Tier]


class TierConformance:
    """The tests of the contract of `kvcascade.tiers.Tier`. A subclass, named `Test...`, opens the tier:

        class TestMine(TierConformance):
            def open(self, path, context, capacity):
                return MineSettings(path=path, capacity=capacity or 64 << 20).open(context)

    What a tier does not claim in its `capabilities` is not asked of it; those tests are skipped. So are the tests
    of damage, unless the subclass overrides `raw_corrupt`, `raw_truncate` and `raw_remove`, which reach around the
    tier.
    """

    small_capacity: ClassVar[int] = 4 * MIB
    """Bytes of a tier that the tests of a bounded tier fill up: at least four chunks of 64 KiB."""

    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        """Opens the tier in the empty folder `path`, or again where a persistent tier has been closed.

        A `capacity` of None: as much as the tests need, 64 MiB at least. Tests that speak of another identity or
        epoch say so in `context`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define open(self, path, context, capacity)")

    def raw_corrupt(self, tier: Tier, key: Key) -> None:
        """Changes one byte in the middle of the payload stored under `key`."""
        pytest.skip("no raw access to damage a chunk")

    def raw_truncate(self, tier: Tier, key: Key) -> None:
        """Cuts off the end of what is stored under `key`, as a crash or a full medium would."""
        pytest.skip("no raw access to truncate a chunk")

    def raw_remove(self, tier: Tier, key: Key) -> None:
        """Removes what is stored under `key`, as an operator or another process would."""
        pytest.skip("no raw access to remove a chunk")

    @pytest.fixture
    def opener(self, tmp_path: Path) -> Iterator[Opener]:
        """Opens the tier, any number of times, and closes what the test left open."""
        with ExitStack() as stack:

            def opened(
                namespace: Namespace = NAMESPACE, capacity: int | None = None, epoch: str = "", chunk: int = MIB
            ) -> Tier:
                context = OpenContext(namespace, chunk, epoch=epoch)
                return stack.enter_context(self.open(tmp_path, context, capacity))

            yield opened

    @pytest.fixture
    def tier(self, opener: Opener) -> Tier:
        return opener()

    # Batches of keys and buffers

    @pytest.mark.parametrize("offset", [0, 1, 8, 512])
    @pytest.mark.parametrize("nbytes", [1, 511, 512, 4096, 4097, 64 * KIB + 1, MIB])
    def test_any_length_from_and_to_any_address(self, tier: Tier, nbytes: int, offset: int) -> None:
        """Sizes and addresses that direct I/O would not take, too (vllm-project/vllm#44016)."""
        key = key_for(nbytes)
        source, target = buffer(nbytes + 512)[offset : offset + nbytes], buffer(nbytes + 1024)
        source[:] = bytes_for(key, nbytes)
        assert tier.write([key], [source]) == [Outcome.OK]
        assert tier.read([key], [target[offset : offset + nbytes]]) == [Outcome.OK]
        assert holds(target[offset : offset + nbytes], key)
        assert set(target[:offset]) | set(target[offset + nbytes :]) == {UNWRITTEN}

    def test_bytes_that_must_not_be_changed_can_be_written(self, tier: Tier) -> None:
        key = key_for(1)
        assert tier.write([key], [memoryview(bytes_for(key, 4096))]) == [Outcome.OK]
        assert _holds_all(tier, [key])

    def test_zeros_and_text_like_bytes_come_back_as_they_were(self, tier: Tier) -> None:
        """redis/redis-py#1254: bytes that are no text, and ones that look empty."""
        payloads = [bytes(4096), b"\xff\xfe\x00" * 1000, b"\r\n" * 2048, b"null"]
        keys = [key_for(number) for number in range(len(payloads))]
        assert _all_ok(tier.write(keys, [memoryview(payload) for payload in payloads]))
        for key, payload in zip(keys, payloads, strict=True):
            target = buffer(len(payload))
            assert tier.read([key], [target]) == [Outcome.OK]
            assert bytes(target) == payload

    def test_empty_batches(self, tier: Tier) -> None:
        assert tier.exists([]) == []
        assert tier.write([], []) == []
        assert tier.read([], []) == []
        assert tier.delete([]) == []
        tier.touch([])
        assert list(tier.entries()) == []

    def test_a_fresh_tier_holds_nothing(self, tier: Tier) -> None:
        key = key_for(1)
        assert tier.exists([key]) == [False]
        assert tier.read([key], [buffer(4096)]) == [Outcome.MISSING]
        assert tier.delete([key]) == [Outcome.MISSING]
        assert tier.maintain(1.0) == Changes()
        tier.move_to("")
        assert list(tier.entries()) == []

    def test_missing_keys_shift_no_neighbour(self, tier: Tier) -> None:
        """LMCache/LMCache#5153: a later chunk came back in the place of a missing one."""
        keys = [key_for(number) for number in range(7)]
        absent = {2, 3, 6}
        _write(tier, [key for place, key in enumerate(keys) if place not in absent])
        arena = buffer(len(keys) * 2 * 4096)
        targets = [arena[place * 8192 : place * 8192 + 4096] for place in range(len(keys))]
        outcomes = tier.read(keys, targets)
        assert [outcome.kind for outcome in outcomes] == [
            OutcomeKind.MISSING if place in absent else OutcomeKind.OK for place in range(len(keys))
        ]
        assert tier.exists(keys) == [place not in absent for place in range(len(keys))]
        for place, key in enumerate(keys):
            assert [place == at for at, other in enumerate(keys) if holds(targets[place], other)] == (
                [] if place in absent else [True]
            ), f"the buffer of key {place} ({key.hex()}) does not hold what belongs there"
            assert set(arena[place * 8192 + 4096 : (place + 1) * 8192]) == {UNWRITTEN}

    def test_a_key_may_stand_in_a_batch_twice(self, tier: Tier) -> None:
        """kvcache-ai/Mooncake#2827: a duplicate failed its whole batch."""
        one, two = key_for(1), key_for(2)
        assert _all_ok(_write(tier, [one, two, one]))
        targets = [buffer(4096) for _ in range(3)]
        assert _all_ok(tier.read([one, one, two], targets))
        assert holds(targets[0], one)
        assert holds(targets[1], one)
        assert holds(targets[2], two)
        assert sorted(entry.key for entry in tier.entries()) == sorted([one, two])
        assert Counter(outcome.kind for outcome in tier.delete([one, one])) == {
            OutcomeKind.OK: 1,
            OutcomeKind.MISSING: 1,
        }

    def test_a_written_key_keeps_its_bytes(self, tier: Tier) -> None:
        """Content-addressed: the second writer is told OK and changes nothing (kvcache-ai/Mooncake#727)."""
        key = key_for(1)
        _write(tier, [key])
        assert tier.write([key], [buffer(4096, filler=0)]) == [Outcome.OK]
        assert _holds_all(tier, [key])
        assert len(list(tier.entries())) == 1

    def test_any_key_of_1_to_255_bytes(self, tier: Tier) -> None:
        """Keys that a file system, an index or a text protocol would take for something else."""
        lengths = [bytes([length]) * length for length in (1, 2, 36, 254, 255)]
        texts = [
            b"\0",
            b"/",
            b".",
            b"..",
            b"../x",
            b"\n",
            b" ",
            b"*",
            b"%",
            b":",
            b"a",
            b"A",
            b"ab",
            b"\xff" * 255,
        ]
        keys = list(dict.fromkeys(lengths + texts + [bytes([value]) * 3 for value in range(256)]))
        assert _all_ok(_write(tier, keys, 512))
        assert _holds_all(tier, keys, 512)
        assert {entry.key for entry in tier.entries()} == set(keys)
        assert _all_ok(tier.delete(keys[::2]))
        assert tier.exists(keys) == [place % 2 == 1 for place in range(len(keys))]
        assert _holds_all(tier, keys[1::2], 512)

    def test_delete_says_what_was_there(self, tier: Tier) -> None:
        keys = [key_for(number) for number in range(3)]
        _write(tier, keys)
        assert tier.delete([keys[0], key_for(9), keys[2]]) == [Outcome.OK, Outcome.MISSING, Outcome.OK]
        assert tier.exists(keys) == [False, True, False]
        assert tier.read(keys[:1], [buffer(4096)]) == [Outcome.MISSING]
        assert _holds_all(tier, keys[1:2])
        assert _all_ok(_write(tier, keys))
        assert _holds_all(tier, keys)

    def test_a_chunk_is_never_read_at_another_length(self, tier: Tier) -> None:
        """A length other than the stored one is no hit, and heals by the next store (LMCache/LMCache#3388)."""
        key, neighbour = key_for(1), key_for(2)
        for nbytes in (4095, 4097, 1, 8192):
            _write(tier, [key, neighbour])
            outcomes = tier.read([key, neighbour], [buffer(nbytes), buffer(4096)])
            assert outcomes[0].kind in (OutcomeKind.CORRUPT, OutcomeKind.MISSING)
            assert outcomes[1] == Outcome.OK
            assert _all_ok(_write(tier, [key]))
            assert _holds_all(tier, [key, neighbour])

    # What is there, and how full it is

    def test_entries_and_usage_add_up(self, tier: Tier) -> None:
        sizes = {key_for(number): nbytes for number, nbytes in enumerate([1, 512, 4096, 4097, 64 * KIB, MIB])}
        for key, nbytes in sizes.items():
            _write(tier, [key], nbytes)
            assert tier.footprint(nbytes) >= nbytes
        _check_usage(tier)
        assert {entry.key: entry.nbytes for entry in tier.entries()} == sizes
        tier.delete(list(sizes)[:3])
        _check_usage(tier)
        assert {entry.key for entry in tier.entries()} == set(list(sizes)[3:])
        tier.delete(list(sizes))
        _check_usage(tier)
        assert list(tier.entries()) == []

    def test_entries_beside_writes(self, tier: Tier) -> None:
        """A list that is read slowly names what stood throughout, and nothing twice."""
        kept = [key_for(number) for number in range(50)]
        _write(tier, kept, 512)
        listed = []
        for number, entry in enumerate(tier.entries(), start=100):
            listed.append(entry.key)
            _write(tier, [key_for(number)], 512)
            tier.delete([key_for(number)])
        assert len(listed) == len(set(listed))
        assert set(kept) <= set(listed)

    def test_the_capacity_is_hard(self, opener: Opener) -> None:
        """What does not fit is refused; deleting makes room (LMCache/LMCache#4725)."""
        tier, keys = self._filled(opener)
        extra = key_for(10_000)
        assert _write(tier, [extra], 64 * KIB) == [Outcome.REFUSED]
        assert tier.exists([extra]) == [False]
        assert tier.read([extra], [buffer(64 * KIB)]) == [Outcome.MISSING]
        assert _holds_all(tier, keys, 64 * KIB)
        assert _write(tier, keys, 64 * KIB) == [Outcome.OK] * len(keys)
        assert _all_ok(tier.delete(keys[:1]))
        assert _write(tier, [extra], 64 * KIB) == [Outcome.OK]
        assert _holds_all(tier, [*keys[1:], extra], 64 * KIB)
        _check_usage(tier)

    def test_victims_make_room(self, opener: Opener) -> None:
        tier, keys = self._filled(opener)
        fresh = [key_for(10_000 + number) for number in range(3)]
        assert _write(tier, fresh, 64 * KIB, victims=keys[:2]) == [Outcome.OK, Outcome.OK, Outcome.REFUSED]
        assert tier.exists([*keys[:2], *fresh]) == [False, False, True, True, False]
        assert _holds_all(tier, [*keys[2:], *fresh[:2]], 64 * KIB)
        _check_usage(tier)

    def test_victims_need_not_be_there(self, tier: Tier) -> None:
        _write(tier, [key_for(1), key_for(2)])
        assert _all_ok(_write(tier, [key_for(3)], victims=[key_for(1), key_for(9), key_for(1)]))
        assert tier.exists([key_for(1), key_for(2), key_for(3)]) == [False, True, True]
        assert _all_ok(_write(tier, [key_for(2)], victims=[key_for(2)]))
        assert _holds_all(tier, [key_for(2), key_for(3)])
        assert _write(tier, [], victims=[key_for(2)]) == []
        assert tier.exists([key_for(2), key_for(3)]) == [False, True]

    def test_the_capacity_holds_against_many_writers(self, opener: Opener) -> None:
        """Eight writers at a time, ten times what fits: never above the capacity (vllm-project/vllm#52784)."""
        tier = self._bounded(opener)
        room = self._room(tier)
        failures: list[str] = []

        def writer(thread: int) -> None:
            for number in range(-(-room * 10 // 8)):
                key = key_for(thread * 100_000 + number)
                (outcome,) = _write(tier, [key], 64 * KIB)
                usage = tier.usage()
                if outcome not in (Outcome.OK, Outcome.REFUSED) or usage.bytes > (usage.capacity or 0):
                    failures.append(f"{outcome} at {usage}")

        _in_threads(writer, 8)
        assert failures == []
        assert tier.usage().chunks == room
        assert _holds_all(tier, [entry.key for entry in tier.entries()], 64 * KIB)
        _check_usage(tier)

    # Damage

    def test_a_corrupt_chunk_is_never_served(self, tier: Tier) -> None:
        """Right length, wrong bytes: found, removed, healed by the next store (vllm-project/vllm#54363)."""
        self._damaged(tier, self.raw_corrupt, {OutcomeKind.CORRUPT})

    def test_a_truncated_chunk_is_never_served(self, tier: Tier) -> None:
        """vllm-project/vllm#57912: a short file ended the worker that read it."""
        self._damaged(tier, self.raw_truncate, {OutcomeKind.CORRUPT, OutcomeKind.MISSING})

    def test_a_chunk_removed_by_others_is_missing(self, tier: Tier) -> None:
        """LMCache/LMCache#4745: it stayed a hit that could not be loaded."""
        self._damaged(tier, self.raw_remove, {OutcomeKind.CORRUPT, OutcomeKind.MISSING})

    # Closing, and what outlives it

    def test_close_twice_and_use_after_close(self, tier: Tier) -> None:
        key = key_for(1)
        _write(tier, [key])
        tier.close()
        tier.close()
        with pytest.raises(ClosedError):
            tier.exists([key])
        with pytest.raises(ClosedError):
            tier.write([key], [buffer(4096)])
        with pytest.raises(ClosedError):
            tier.read([key], [buffer(4096)])
        with pytest.raises(ClosedError):
            tier.delete([key])

    def test_close_beside_readers(self, tier: Tier) -> None:
        """Reads end with right bytes or with ClosedError, never with a crash (jnwatson/py-lmdb#180)."""
        keys = [key_for(number) for number in range(8)]
        _write(tier, keys, 64 * KIB)
        reading = threading.Semaphore(0)
        wrong: list[str] = []

        def reader(_: int) -> None:
            targets = [buffer(64 * KIB) for _ in keys]
            try:
                while True:
                    outcomes = tier.read(keys, targets)
                    reading.release()
                    wrong.extend(_wrong(keys, outcomes, targets, (OutcomeKind.OK,)))
            except ClosedError:
                return

        def closer() -> None:
            for _ in range(32):
                reading.acquire(timeout=HANG)
            tier.close()

        _in_threads(reader, 8, meanwhile=closer)
        assert wrong == []

    def test_chunks_outlive_a_close(self, opener: Opener) -> None:
        """A restart is warm, and knows what it holds (LMCache/LMCache#1454)."""
        tier = self._persistent(opener)
        sizes = {key_for(number): nbytes for number, nbytes in enumerate([1, 4096, 4097, MIB])}
        for key, nbytes in sizes.items():
            _write(tier, [key], nbytes)
        tier.delete([key_for(1)])
        del sizes[key_for(1)]
        before = {entry.key: entry.written for entry in tier.entries()}
        tier.close()
        again = opener()
        assert {entry.key: entry.nbytes for entry in again.entries()} == sizes
        assert {entry.key: entry.written for entry in again.entries()} == pytest.approx(before, abs=0.01)
        for key, nbytes in sizes.items():
            assert _holds_all(again, [key], nbytes)
        assert again.exists([key_for(1)]) == [False]
        _check_usage(again)
        assert _all_ok(_write(again, [key_for(1)]))
        assert _holds_all(again, [key_for(1)])

    def test_recency_outlives_a_close(self, opener: Opener) -> None:
        tier = self._persistent(opener)
        keys = [key_for(number) for number in range(6)]
        _write(tier, keys)
        order = [keys[place] for place in (3, 0, 5, 1, 4, 2)]
        tier.touch(order[:4])
        tier.touch(order[4:])
        tier.maintain(60.0)
        tier.close()
        assert _by_recency(opener().entries()) == order

    @pytest.mark.parametrize("field", [name for name, _ in NAMESPACE.fields] + ["a new field"])
    def test_another_identity_sees_nothing(self, opener: Opener, field: str) -> None:
        """vllm-project/vllm#49261: chunks of another model, type or layout were loaded without an error."""
        tier = self._persistent(opener)
        key, other_key = key_for(1), key_for(2)
        _write(tier, [key])
        tier.close()
        other = opener(Namespace.of(**{**dict(NAMESPACE.fields), field: "another"}))
        assert other.exists([key]) == [False]
        assert other.read([key], [buffer(4096)]) == [Outcome.MISSING]
        assert list(other.entries()) == []
        _write(other, [other_key])
        other.close()
        again = opener()
        assert _holds_all(again, [key])
        assert again.exists([other_key]) == [False]

    # Moving to another epoch

    def test_what_was_stored_before_a_move_is_void(self, tier: Tier) -> None:
        """vllm-project/vllm#57727: after a reset for new weights, old chunks were served from a lower tier."""
        old, new = key_for(1), key_for(2)
        _write(tier, [old])
        tier.move_to("v2")
        assert tier.exists([old]) == [False]
        assert tier.read([old], [buffer(4096)]) == [Outcome.MISSING]
        assert list(tier.entries()) == []
        _check_usage(tier)
        assert _all_ok(_write(tier, [new, old], epoch="v2"))
        assert _holds_all(tier, [new, old], epoch="v2")
        assert {entry.key for entry in tier.entries()} == {new, old}
        _check_usage(tier)

    @pytest.mark.parametrize("epoch", ["", "v2"])
    def test_what_is_void_stays_so_over_a_restart(self, opener: Opener, epoch: str) -> None:
        tier = self._persistent(opener)
        old = [key_for(number) for number in range(4)]
        _write(tier, old)
        tier.move_to(epoch)
        tier.close()
        again = opener(epoch=epoch)
        assert again.exists(old) == [False] * 4
        assert [outcome.kind for outcome in again.read(old, [buffer(4096) for _ in old])] == [
            OutcomeKind.MISSING
        ] * 4
        assert list(again.entries()) == []

    def test_who_names_the_same_weights_finds_their_chunks_again(self, opener: Opener) -> None:
        tier = self._persistent(opener, epoch="v1")
        key = key_for(1)
        _write(tier, [key], epoch="v1")
        tier.move_to("v2")
        _write(tier, [key], epoch="v2")
        tier.close()
        again = opener(epoch="v2")
        assert _holds_all(again, [key], epoch="v2")
        again.close()
        assert opener(epoch="v3").exists([key]) == [False]

    def test_a_write_that_a_move_overtakes_stays_invisible(self, tier: Tier) -> None:
        """A store of old weights that was under way must not come out after the reset."""
        keys = [key_for(number) for number in range(3)]
        batch = _HeldBatch([memoryview(bytes_for(key, 4096)) for key in keys])
        writer = _Background(lambda: tier.write(keys, batch))
        batch.reached.wait(HANG)
        mover = _Background(lambda: tier.move_to("v2"))
        mover.join(0.1)  # it may wait for the write, or overtake it: both are right
        batch.released.set()
        outcomes = writer.result()
        mover.result()
        assert len(outcomes) == 3
        assert tier.exists(keys) == [False] * 3
        assert list(tier.entries()) == []
        assert _all_ok(_write(tier, keys))
        assert _holds_all(tier, keys)

    # Many threads

    def test_many_writers_of_the_same_keys(self, tier: Tier) -> None:
        """kvcache-ai/Mooncake#1374: normal for shared prefixes; all succeed and one chunk remains."""
        keys = [key_for(number) for number in range(8)]
        start = threading.Barrier(16)
        outcomes: list[Outcome] = []

        def writer(thread: int) -> None:
            order = random.Random(thread).sample(keys, len(keys))
            start.wait(HANG)
            outcomes.extend(_write(tier, order, 16 * KIB))

        _in_threads(writer, 16)
        assert outcomes == [Outcome.OK] * (16 * 8)
        assert sorted(entry.key for entry in tier.entries()) == sorted(keys)
        assert _holds_all(tier, keys, 16 * KIB)
        _check_usage(tier)

    def test_a_reader_beside_a_writer_sees_whole_chunks(self, tier: Tier) -> None:
        """Findable means readable: nothing of a chunk that is being written shows."""
        key = key_for(1)
        done = threading.Event()
        wrong: list[str] = []

        def reader(_: int) -> None:
            target = buffer(MIB)
            while not done.is_set():
                outcomes = tier.read([key], [target])
                wrong.extend(_wrong([key], outcomes, [target], (OutcomeKind.OK, OutcomeKind.MISSING)))

        def writer() -> None:
            for _ in range(20):
                wrong.extend(str(outcome) for outcome in _write(tier, [key], MIB) if not outcome.ok)
                tier.delete([key])
            done.set()

        _in_threads(reader, 2, meanwhile=writer)
        assert wrong == []

    def test_reads_writes_and_deletes_at_once(self, tier: Tier) -> None:
        """Chunks come, go and change places under readers: each read that is OK is right, none is CORRUPT."""
        keys = [key_for(number) for number in range(24)]
        sizes = {key: (512, 4096, 4097, 64 * KIB)[place % 4] for place, key in enumerate(keys)}
        wrong: list[str] = []

        def worker(thread: int) -> None:
            choose = random.Random(thread)
            for _ in range(60):
                batch = choose.sample(keys, 4)
                targets = [buffer(sizes[key]) for key in batch]
                verb = choose.choice(["read", "read", "write", "delete", "entries"])
                if verb == "read":
                    kinds = (OutcomeKind.OK, OutcomeKind.MISSING)
                    wrong.extend(_wrong(batch, tier.read(batch, targets), targets, kinds))
                elif verb == "write":
                    sources = [memoryview(bytes_for(key, sizes[key])) for key in batch]
                    wrong.extend(f"write {one}" for one in tier.write(batch, sources) if not one.ok)
                elif verb == "delete":
                    kinds = (OutcomeKind.OK, OutcomeKind.MISSING)
                    wrong.extend(f"delete {one}" for one in tier.delete(batch) if one.kind not in kinds)
                else:
                    wrong.extend(f"{one}" for one in tier.entries() if sizes[one.key] != one.nbytes)

        _in_threads(worker, 6)
        assert wrong == []
        left = [key for key, there in zip(keys, tier.exists(keys), strict=True) if there]
        assert sorted(left) == sorted(entry.key for entry in tier.entries())
        for key in left:
            assert _holds_all(tier, [key], sizes[key])
        _check_usage(tier)

    # What the tests above are made of

    def _damaged(self, tier: Tier, damage: Callable[[Tier, Key], None], found: set[OutcomeKind]) -> None:
        keys = [key_for(number) for number in range(3)]
        _write(tier, keys)
        damage(tier, keys[1])
        targets = [buffer(4096) for _ in keys]
        outcomes = tier.read(keys, targets)
        assert outcomes[1].kind in found
        assert [outcomes[0], outcomes[2]] == [Outcome.OK, Outcome.OK]
        assert holds(targets[0], keys[0])
        assert holds(targets[2], keys[2])
        assert tier.exists(keys) == [True, False, True]
        assert tier.read(keys[1:2], targets[1:2]) == [Outcome.MISSING]
        assert {entry.key for entry in tier.entries()} == {keys[0], keys[2]}
        assert _all_ok(_write(tier, keys))
        assert _holds_all(tier, keys)
        _check_usage(tier)

    def _persistent(self, opener: Opener, **context: Any) -> Tier:
        tier = opener(**context)
        if not tier.capabilities.persistent:
            pytest.skip("the tier is not persistent")
        return tier

    def _bounded(self, opener: Opener) -> Tier:
        tier = opener(capacity=self.small_capacity, chunk=64 * KIB)
        if not tier.capabilities.bounded:
            pytest.skip("the tier is not bounded")
        return tier

    def _room(self, tier: Tier) -> int:
        capacity = tier.usage().capacity
        assert capacity is not None, "a bounded tier says its capacity"
        assert capacity <= self.small_capacity
        room = capacity // tier.footprint(64 * KIB)
        assert room >= 4, "small_capacity is too small for the tests"
        return room

    def _filled(self, opener: Opener) -> tuple[Tier, list[Key]]:
        """A bounded tier with as many chunks of 64 KiB as usage and footprint promise."""
        tier = self._bounded(opener)
        keys = [key_for(number) for number in range(self._room(tier))]
        for key in keys:
            assert _write(tier, [key], 64 * KIB) == [Outcome.OK]
            _check_usage(tier)
        return tier, keys


class _HeldBatch(Sequence[Buffer]):
    """Buffers of a batch, of which the second is only handed over when it is released."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self._buffers = buffers
        self.reached = threading.Event()
        self.released = threading.Event()

    def __len__(self) -> int:
        return len(self._buffers)

    def __getitem__(self, place: Any) -> Any:
        if place == 1:
            self.reached.set()
            self.released.wait(HANG)
        return self._buffers[place]


class _Background:
    """One call on a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:  # handed to the test by result()
            self._error = error

    def join(self, timeout: float) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def result(self) -> Any:
        assert self.join(HANG), "a call to the tier hangs"
        if self._error is not None:
            raise self._error
        return self._result


def _in_threads(work: Callable[[int], None], count: int, meanwhile: Callable[[], None] | None = None) -> None:
    threads = [_Background(lambda number=number: work(number)) for number in range(count)]  # type: ignore[misc]
    if meanwhile is not None:
        threads.append(_Background(meanwhile))
    for thread in reversed(threads):
        thread.result()


def _write(
    tier: Tier, keys: Sequence[Key], nbytes: int = 4096, victims: Sequence[Key] = (), epoch: str = ""
) -> list[Outcome]:
    return tier.write(keys, [memoryview(bytes_for(key, nbytes, epoch)) for key in keys], victims)


def _holds_all(tier: Tier, keys: Sequence[Key], nbytes: int = 4096, epoch: str = "") -> bool:
    """Whether the tier says that all are there, reads them all, and each has its own bytes."""
    targets = [buffer(nbytes) for _ in keys]
    return (
        all(tier.exists(keys))
        and _all_ok(tier.read(keys, targets))
        and all(holds(target, key, epoch) for key, target in zip(keys, targets, strict=True))
    )


def _all_ok(outcomes: Sequence[Outcome]) -> bool:
    return all(outcome.ok for outcome in outcomes)


def _wrong(
    keys: Sequence[Key], outcomes: Sequence[Outcome], targets: Sequence[Buffer], kinds: tuple[OutcomeKind, ...]
) -> list[str]:
    """What of a read is neither one of `kinds` nor, where it is OK, the bytes of its key."""
    wrong = []
    for key, outcome, target in zip(keys, outcomes, targets, strict=True):
        if outcome.kind not in kinds:
            wrong.append(f"read {outcome}")
        elif outcome.ok and not holds(target, key):
            wrong.append(f"wrong bytes of {key.hex()}")
    return wrong


def _by_recency(entries: Iterator[Entry]) -> list[Key]:
    return [entry.key for entry in sorted(entries, key=lambda entry: entry.used)]


def _check_usage(tier: Tier) -> None:
    """How full a tier says it is follows from its entries; a shared one can't know."""
    if tier.capabilities.shared:
        return
    entries = list(tier.entries())
    usage = tier.usage()
    assert usage.chunks == len(entries)
    assert usage.bytes == sum(tier.footprint(entry.nbytes) for entry in entries)
    assert usage.capacity is None or usage.bytes <= usage.capacity
