"""The disk tier: room, faults, epochs, and what lies on the disk."""

import errno
import logging
import os
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import ClosedError, ConfigError, ProtocolError, TierUnavailable
from kvcascade.testing import buffer, bytes_for, holds, key_for
from kvcascade.testing.servers import wait_until
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers import blocks as blocks_module
from kvcascade.tiers.disk import DiskSettings
from kvcascade.tiers.disk import marks as marks_module
from kvcascade.tiers.disk.tier import DiskTier
from kvcascade.types import Key, Namespace, Outcome, OutcomeKind, Usage

KIB = 1 << 10
CHUNK = 64 * KIB
NAMESPACE = Namespace.of(model="m", tenant="")
Opener = Callable[..., DiskTier]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    opened: list[DiskTier] = []

    def open_it(capacity: int = 4 << 20, chunk: int = CHUNK, **settings: Any) -> DiskTier:
        context = {name: settings.pop(name) for name in ("epoch", "engine_id", "place") if name in settings}
        namespace = settings.pop("namespace", NAMESPACE)
        tier = DiskSettings(path=str(tmp_path / "kv"), capacity=capacity, **settings).open(
            OpenContext(namespace, chunk, **context)
        )
        assert isinstance(tier, DiskTier)
        opened.append(tier)
        return tier

    yield open_it
    for tier in opened:
        tier.close()


def keys_of(*numbers: int) -> list[Key]:
    return [key_for(number) for number in numbers]


def store(tier: DiskTier, keys: list[Key], nbytes: int = CHUNK, victims: list[Key] | None = None) -> list[Outcome]:
    return tier.write(keys, [memoryview(bytes_for(key, nbytes)) for key in keys], victims or [])


def load(tier: DiskTier, keys: list[Key], nbytes: int = CHUNK) -> list[Outcome]:
    """Outcomes; where one is OK the bytes are right."""
    targets = [buffer(nbytes) for _ in keys]
    outcomes = tier.read(keys, targets)
    for key, target, outcome in zip(keys, targets, outcomes, strict=True):
        assert not outcome.ok or holds(target, key)
    return outcomes


def room(tier: DiskTier) -> int:
    """Chunks that the tier takes."""
    return (tier.usage().capacity or 0) // tier.footprint(CHUNK)


def fill(tier: DiskTier) -> list[Key]:
    keys = keys_of(*range(room(tier)))
    assert store(tier, keys) == [Outcome.OK] * len(keys)
    return keys


def on_disk(path: Path) -> int:
    """Bytes in use below the path, as `du` counts them."""
    return int(
        subprocess.run(["du", "-sB1", str(path)], check=True, capture_output=True, text=True).stdout.split()[0]
    )


class HeldReader(threading.Thread):
    """Reads, and stands still in the middle of it until `let_go`."""

    def __init__(self, tier: DiskTier, keys: list[Key], monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.tier = tier
        self.keys = keys
        self.outcomes: list[Outcome] = []
        self.reading, self.go_on = threading.Event(), threading.Event()
        self.preadv = os.preadv
        monkeypatch.setattr(os, "preadv", self.slow)
        self.start()
        assert self.reading.wait(60)
        monkeypatch.setattr(os, "preadv", self.preadv)

    def slow(self, fd: int, views: Any, offset: int) -> int:
        self.reading.set()
        assert self.go_on.wait(60)
        return self.preadv(fd, views, offset)

    def run(self) -> None:
        self.outcomes += load(self.tier, self.keys)

    def let_go(self) -> list[Outcome]:
        self.go_on.set()
        self.join(60)
        return self.outcomes


# Room


@pytest.mark.parametrize("capacity", [2 << 20, 5_000_000, 16 << 20])
def test_all_that_lies_on_the_disk_stays_within_the_capacity(
    opener: Opener, tmp_path: Path, capacity: int
) -> None:
    """Index, marks and locks included, whatever comes and goes (vllm-project/vllm#52784)."""
    tier = opener(capacity)
    fits = room(tier)
    kept: list[Key] = []
    for start in range(0, 6 * fits, 3):
        fresh = keys_of(*range(start, start + 3))
        victims = kept[: max(0, len(kept) + 3 - fits)]
        assert store(tier, fresh, victims=victims) == [Outcome.OK] * 3
        kept = kept[len(victims) :] + fresh
        assert on_disk(tmp_path / "kv" / "engine-0") <= capacity
    tier.touch(kept)
    tier.close()
    assert on_disk(tmp_path / "kv" / "engine-0") <= capacity
    again = opener(capacity)
    assert load(again, kept) == [Outcome.OK] * fits


def test_most_of_the_capacity_is_for_chunks(opener: Opener) -> None:
    capacity = 256 << 20
    assert (opener(capacity).usage().capacity or 0) > 0.9 * capacity


def test_a_full_tier_takes_as_many_chunks_as_it_gives_up(opener: Opener) -> None:
    tier = opener()
    old = fill(tier)
    new = keys_of(*range(1000, 1000 + len(old)))
    assert store(tier, new, victims=old) == [Outcome.OK] * len(new)
    assert load(tier, new) == [Outcome.OK] * len(new)
    assert load(tier, old) == [Outcome.MISSING] * len(old)
    assert tier.usage().chunks == len(new)


def test_a_full_tier_takes_nothing_without_victims(opener: Opener) -> None:
    tier = opener()
    old = fill(tier)
    assert store(tier, keys_of(1000)) == [Outcome.REFUSED]
    assert tier.usage().bytes == tier.usage().capacity
    assert load(tier, old) == [Outcome.OK] * len(old)


def test_victims_go_although_nothing_is_written(opener: Opener) -> None:
    tier = opener()
    store(tier, keys_of(1, 2))
    assert store(tier, keys_of(2), victims=keys_of(1)) == [Outcome.OK]
    assert tier.exists(keys_of(1, 2)) == [False, True]
    assert tier.write([], [], victims=keys_of(2)) == []
    assert tier.usage().chunks == 0


def test_a_slot_that_is_read_is_not_written_again(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader gets the right bytes, whatever is evicted and written meanwhile (kvcache-ai/Mooncake#3076)."""
    tier = opener()
    old = fill(tier)
    reader = HeldReader(tier, old[:4], monkeypatch)
    for start in (1000, 2000, 3000):  # every other slot is given away several times
        new = keys_of(*range(start, start + len(old) - 4))
        assert store(tier, new, victims=old[4:]) == [Outcome.OK] * len(new)
        assert all(outcome.ok for outcome in tier.delete(new))
    assert tier.delete(old[:4]) == [Outcome.OK] * 4
    assert store(tier, keys_of(*range(4000, 4000 + len(old) - 4))) == [Outcome.OK] * (len(old) - 4)
    assert reader.let_go() == [Outcome.OK] * 4  # what it was reading is still there
    assert store(tier, keys_of(1, 2, 3, 4)) == [Outcome.OK] * 4
    assert load(tier, keys_of(1, 2, 3, 4)) == [Outcome.OK] * 4


def test_a_store_waits_for_readers_that_hold_its_slots(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener()
    old = fill(tier)
    held = old[:16]  # more than the reserve
    reader = HeldReader(tier, held, monkeypatch)
    waiting = tier._slabs.wait_for_readers

    def let_go(timeout: float) -> bool:
        reader.go_on.set()
        return waiting(60)

    monkeypatch.setattr(tier._slabs, "wait_for_readers", let_go)
    new = keys_of(*range(1000, 1016))
    assert store(tier, new, victims=held) == [Outcome.OK] * 16
    assert reader.let_go() == [Outcome.OK] * 16
    assert load(tier, new + old[16:]) == [Outcome.OK] * len(old)


def test_a_store_does_not_wait_for_ever(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMCache/LMCache#2942: nothing came free, and the allocator spun."""
    tier = opener()
    old = fill(tier)
    reader = HeldReader(tier, old[:16], monkeypatch)
    monkeypatch.setattr(DiskTier, "patience", 0.0)
    outcomes = store(tier, keys_of(*range(1000, 1016)), victims=old[:16])
    assert Outcome.REFUSED in outcomes
    assert set(outcomes) <= {Outcome.OK, Outcome.REFUSED}
    assert reader.let_go() == [Outcome.OK] * 16
    assert store(tier, keys_of(*range(1000, 1016))) == [Outcome.OK] * 16
    assert tier.usage().chunks == len(old)


def test_chunks_of_several_sizes_share_the_disk(opener: Opener, tmp_path: Path) -> None:
    """Groups of an engine differ in size; an extent that became empty takes another one."""
    tier = opener(8 << 20)
    small = keys_of(*range(5000, 5500))
    outcomes = store(tier, small, 4 * KIB)
    stored = [key for key, outcome in zip(small, outcomes, strict=True) if outcome.ok]
    assert len(stored) > 300
    assert tier.delete(stored) == [Outcome.OK] * len(stored)
    large = fill(tier)
    assert tier.delete(large[: len(large) // 2]) == [Outcome.OK] * (len(large) // 2)
    assert store(tier, small[:50], 4 * KIB) == [Outcome.OK] * 50
    assert load(tier, small[:50], 4 * KIB) == [Outcome.OK] * 50
    assert load(tier, large[len(large) // 2 :]) == [Outcome.OK] * (len(large) - len(large) // 2)
    assert on_disk(tmp_path / "kv" / "engine-0") <= 8 << 20


def test_a_chunk_larger_than_any_slot_is_refused_alone(opener: Opener) -> None:
    tier = opener()
    keys = keys_of(1, 2, 3)
    sizes = [CHUNK, 3 << 20, CHUNK]
    payloads = [memoryview(bytes_for(key, nbytes)) for key, nbytes in zip(keys, sizes, strict=True)]
    assert tier.write(keys, payloads) == [Outcome.OK, Outcome.REFUSED, Outcome.OK]
    assert tier.exists(keys) == [True, False, True]


def test_a_capacity_for_less_than_a_few_chunks_is_refused(opener: Opener, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity: 256 KiB \(262144 bytes\) is too small .* at least .* raise"):
        opener(256 * KIB)
    assert not (tmp_path / "kv").exists()


def test_a_capacity_beyond_the_file_system_is_refused(opener: Opener, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity: 1 PiB .* is more than the file system .* are free"):
        opener(1 << 50)


def test_no_space_left_is_a_refusal(opener: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tier = opener()
    assert store(tier, keys_of(1)) == [Outcome.OK]

    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    outcomes = store(tier, keys_of(*range(2, 40)))
    refused = outcomes.count(Outcome.REFUSED)
    assert refused
    assert outcomes.count(Outcome.OK) + refused == len(outcomes)
    assert load(tier, keys_of(1)) == [Outcome.OK]
    monkeypatch.undo()
    assert store(tier, keys_of(*range(2, 40))) == [Outcome.OK] * 38
    assert all(path.stat().st_size for path in tmp_path.rglob("*.slab"))


# Faults of the medium


class Broken:
    """Stands in for os.preadv or os.pwritev; fails with EIO on calls that touch a place of a file."""

    def __init__(self, call: Callable[..., int], place: tuple[int, int], times: int) -> None:
        self.call = call
        self.inode, self.offset = place
        self.times = times

    def __call__(self, fd: int, views: Any, offset: int) -> int:
        end = offset + sum(len(view) for view in views)
        if self.times and os.fstat(fd).st_ino == self.inode and offset <= self.offset < end:
            self.times -= 1
            raise OSError(errno.EIO, "Input/output error")
        return self.call(fd, views, offset)


def place_of(tier: DiskTier, key: Key) -> tuple[int, int]:
    (location,) = tier._index.lookup([key])
    assert location is not None
    extent = tier._slabs._extents[location.slot.extent]
    return os.fstat(extent.fd).st_ino, location.slot.place * extent.slot_bytes


def test_a_read_error_keeps_the_chunk_and_its_neighbours(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transient fault is no loss (vllm-project/vllm#57912). The batch is tried once as one and once apart."""
    tier = opener()
    keys = keys_of(1, 2, 3, 4)
    store(tier, keys)
    monkeypatch.setattr(os, "preadv", Broken(os.preadv, place_of(tier, keys[2]), times=2))
    outcomes = load(tier, keys)
    assert [outcome.kind.name for outcome in outcomes] == ["OK", "OK", "FAILED", "OK"]
    assert isinstance(outcomes[2].cause, TierUnavailable)
    assert isinstance(outcomes[2].cause.__cause__, OSError)
    assert load(tier, keys) == [Outcome.OK] * 4


def test_a_second_read_error_retires_the_slot(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener()
    key = key_for(1)
    store(tier, [key])
    place = place_of(tier, key)
    before = tier.usage().capacity or 0
    monkeypatch.setattr(os, "preadv", Broken(os.preadv, place, times=2))
    assert [load(tier, [key])[0].kind for _ in range(3)] == [
        OutcomeKind.FAILED,
        OutcomeKind.FAILED,
        OutcomeKind.MISSING,
    ]
    assert tier.maintain(1.0).vanished == (key,)
    assert tier.maintain(1.0).vanished == ()
    assert tier.usage().capacity == before - tier.footprint(CHUNK)
    keys = fill(tier)
    assert place not in [place_of(tier, key) for key in keys]
    assert load(tier, keys) == [Outcome.OK] * len(keys)


def test_a_write_error_harms_no_neighbour(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener()
    keys = keys_of(1, 2, 3, 4)
    store(tier, keys)
    place = place_of(tier, keys[1])
    tier.delete(keys)
    monkeypatch.setattr(os, "pwritev", Broken(os.pwritev, place, times=2))
    outcomes = store(tier, keys)
    assert sorted(outcome.kind.name for outcome in outcomes) == ["FAILED", "OK", "OK", "OK"]
    assert tier.exists(keys) == [outcome.ok for outcome in outcomes]
    assert store(tier, keys) == [Outcome.OK] * 4
    assert load(tier, keys) == [Outcome.OK] * 4


def test_short_transfers_are_gone_on_with(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener()
    preadv, pwritev = os.preadv, os.pwritev

    def short(call: Callable[..., int], fd: int, views: Any, offset: int) -> int:
        return call(fd, [views[0][: max(4096, len(views[0]) // 2 // 4096 * 4096)]], offset)

    monkeypatch.setattr(os, "preadv", lambda *given: short(preadv, *given))
    monkeypatch.setattr(os, "pwritev", lambda *given: short(pwritev, *given))
    keys = keys_of(1, 2, 3)
    assert store(tier, keys, CHUNK - 100) == [Outcome.OK] * 3
    assert load(tier, keys, CHUNK - 100) == [Outcome.OK] * 3


def test_a_file_cut_short_loses_its_end_and_no_more(opener: Opener) -> None:
    """vllm-project/vllm#57912: a truncated file ended the worker."""
    tier = opener()
    keys = keys_of(1, 2, 3)
    store(tier, keys)
    order = sorted(keys, key=lambda key: place_of(tier, key))
    extent = tier._slabs._extents[tier._index.lookup(order)[1].slot.extent]  # type: ignore[union-attr]
    os.truncate(extent.path, place_of(tier, order[1])[1] + 100)
    assert load(tier, order)[0] == Outcome.OK
    assert all(outcome.kind in (OutcomeKind.CORRUPT, OutcomeKind.MISSING) for outcome in load(tier, order[1:]))
    assert store(tier, keys) == [Outcome.OK] * 3
    assert load(tier, keys) == [Outcome.OK] * 3


def damage(tier: DiskTier, key: Key) -> None:
    (location,) = tier._index.lookup([key])
    assert location is not None
    extent = tier._slabs._extents[location.slot.extent]
    with extent.path.open("r+b") as file:
        file.seek(location.slot.place * extent.slot_bytes + 3 * 4096)
        file.write(b"not what was there")


def test_corrupt_chunks_can_be_kept_for_inspection(opener: Opener, tmp_path: Path) -> None:
    capacity = 4 << 20
    tier = opener(capacity, on_corrupt="quarantine")
    keys = fill(tier)
    for key in keys[:8]:
        damage(tier, key)
    assert load(tier, keys) == [Outcome.CORRUPT] * 8 + [Outcome.OK] * (len(keys) - 8)
    kept = list(tmp_path.rglob("quarantine/*.chunk"))
    assert 1 <= len(kept) <= 4
    assert all(b"not what was there" in path.read_bytes() for path in kept)
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    assert on_disk(tmp_path / "kv" / "engine-0") <= capacity
    assert store(tier, keys[:8]) == [Outcome.OK] * 8
    assert load(tier, keys) == [Outcome.OK] * len(keys)


def test_corrupt_chunks_are_removed_without_a_trace(opener: Opener, tmp_path: Path) -> None:
    tier = opener()
    store(tier, keys_of(1))
    damage(tier, key_for(1))
    assert load(tier, keys_of(1, 1)) in ([Outcome.CORRUPT, Outcome.MISSING], [Outcome.CORRUPT] * 2)
    assert load(tier, keys_of(1)) == [Outcome.MISSING]
    assert list(tmp_path.rglob("*.chunk")) == []


def test_an_index_without_room_refuses_the_job_and_keeps_the_rest(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is one transaction: all of it is visible or nothing (jnwatson/py-lmdb#269)."""
    tier = opener(64 << 20, 4 * KIB)
    monkeypatch.setattr(tier._index, "_limit_bytes", 1 << 40)
    tier._index._env.set_mapsize(80 * KIB)
    long_keys = [key_for(number).ljust(255, b"x") for number in range(3000)]
    stored = []
    for start in range(0, 3000, 50):
        batch = long_keys[start : start + 50]
        outcomes = store(tier, batch, 512)
        assert len({outcome.kind for outcome in outcomes}) == 1
        assert tier.exists(batch) == [outcomes[0].ok] * 50
        if outcomes[0] == Outcome.REFUSED:
            break
        stored += batch
    assert stored
    assert len(stored) < 3000
    assert load(tier, stored, 512) == [Outcome.OK] * len(stored)
    assert tier.usage().chunks == len(stored)


def test_keys_longer_than_planned_for_leave_room_to_delete(opener: Opener) -> None:
    tier = opener(16 << 20, 512)
    refused = False
    number = 0
    stored: list[Key] = []
    while not refused:
        batch = [key_for(number + i).ljust(255, b"x") for i in range(64)]
        number += 64
        outcomes = store(tier, batch, 512)
        stored += [key for key, outcome in zip(batch, outcomes, strict=True) if outcome.ok]
        refused = Outcome.REFUSED in outcomes
    for start in range(0, len(stored), 64):
        assert set(tier.delete(stored[start : start + 64])) == {Outcome.OK}
    assert tier.usage().chunks == 0
    assert store(tier, keys_of(1), 512) == [Outcome.OK]


# Direct I/O


def test_without_direct_io_the_page_cache_is_used(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file system that does not know the flag (vllm-project/vllm#44016); said once."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    with caplog.at_level(logging.INFO, "kvcascade.tiers.disk"):
        tier = opener()
        keys = keys_of(*range(8))
        assert store(tier, keys, 4097) == [Outcome.OK] * 8
        assert load(tier, keys, 4097) == [Outcome.OK] * 8
    assert [record.message for record in caplog.records if "direct I/O" in record.message] != []
    assert len(caplog.records) == 1


def test_the_bytes_are_the_same_with_and_without_direct_io(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {key_for(number): nbytes for number, nbytes in enumerate([1, 511, 4096, 4097, CHUNK - 1, CHUNK])}
    tier = opener()
    for key, nbytes in sizes.items():
        assert store(tier, [key], nbytes) == [Outcome.OK]
    tier.close()
    monkeypatch.setattr(blocks_module, "DIRECT", 0)
    again = opener()
    for key, nbytes in sizes.items():
        assert load(again, [key], nbytes) == [Outcome.OK]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no memory file system")
def test_a_memory_file_system_works() -> None:
    """vllm-project/vllm#44016: every write failed on tmpfs."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        tier = DiskSettings(path=folder, capacity=4 << 20).open(OpenContext(NAMESPACE, CHUNK))
        assert isinstance(tier, DiskTier)
        with tier:
            keys = keys_of(*range(8))
            assert store(tier, keys, 4097) == [Outcome.OK] * 8
            assert load(tier, keys, 4097) == [Outcome.OK] * 8


# Folders, permissions, locks


def test_files_are_private(opener: Opener, tmp_path: Path) -> None:
    """KV reveals prompts."""
    mask = os.umask(0)
    try:
        store(opener(), keys_of(1))
    finally:
        os.umask(mask)
    below = list((tmp_path / "kv").rglob("*"))
    assert {stat.S_IMODE(path.stat().st_mode) for path in below if path.is_file()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "kv", *below] if path.is_dir()} == {0o700}


def test_each_engine_takes_a_folder_of_its_own(opener: Opener, tmp_path: Path) -> None:
    one, two = opener(), opener()
    store(one, keys_of(1))
    assert two.exists(keys_of(1)) == [False]
    assert {path.name for path in (tmp_path / "kv").iterdir()} == {"engine-0", "engine-1"}
    one.close()
    store(two, keys_of(2))
    three = opener()
    assert three.exists(keys_of(1, 2)) == [True, False]
    assert load(two, keys_of(2)) == [Outcome.OK]


def test_a_place_that_is_in_use_is_not_waited_for(opener: Opener, tmp_path: Path) -> None:
    for place in (0, 1):
        tier = opener(place=place)
        store(tier, keys_of(place))
    for tier in (opener(place=5), opener(place=1)):  # its place is in use: one of the others, not a refusal
        assert tier.exists(keys_of(0, 1)) == [False, False]
    assert {path.name for path in (tmp_path / "kv").iterdir()} == {f"engine-{n}" for n in (0, 1, 2, 5)}


def test_places_do_not_depend_on_who_starts_first(opener: Opener) -> None:
    for place in (0, 1):
        with opener(place=place) as tier:
            store(tier, keys_of(place))
    one, zero = opener(place=1), opener(place=0)
    assert one.exists(keys_of(0, 1)) == [False, True]
    assert zero.exists(keys_of(0, 1)) == [True, False]


def test_an_engine_id_in_use_is_refused_by_name(opener: Opener, tmp_path: Path) -> None:
    """Through another name of the same folder, too (jnwatson/py-lmdb#129)."""
    one = opener(engine_id="7")
    store(one, keys_of(1))
    (tmp_path / "alias").symlink_to(tmp_path / "kv")
    settings = DiskSettings(path=str(tmp_path / "alias"), capacity=4 << 20)
    with pytest.raises(ConfigError, match=rf"engine-7 is in use by process {os.getpid()} on "):
        settings.open(OpenContext(NAMESPACE, CHUNK, engine_id="7"))
    assert load(one, keys_of(1)) == [Outcome.OK]
    one.close()
    with settings.open(OpenContext(NAMESPACE, CHUNK, engine_id="7")) as again:
        assert again.exists(keys_of(1)) == [True]


def test_an_engine_id_may_hold_anything(opener: Opener, tmp_path: Path) -> None:
    tier = opener(engine_id="../rank 1/é")
    store(tier, keys_of(1))
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["engine-..%2Frank%201%2F%C3%A9"]


def test_a_path_that_is_a_file_is_refused(opener: Opener, tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("mine")
    with pytest.raises(ConfigError, match=r"path: .*kv.* is not a folder"):
        opener()
    assert (tmp_path / "kv").read_text() == "mine"


def test_room_is_taken_from_other_namespaces_first(opener: Opener, tmp_path: Path) -> None:
    capacity = 8 << 20
    old, newer = Namespace.of(model="old"), Namespace.of(model="newer")
    for when, namespace in ((1_000_000, old), (2_000_000, newer)):
        tier = opener(capacity, namespace=namespace)
        store(tier, keys_of(*range(20)))
        tier.close()
        for path in (tmp_path / "kv" / "engine-0" / namespace.digest.hex()).iterdir():
            os.utime(path, (when, when))
    (tmp_path / "kv" / "engine-0" / old.digest.hex() / "notes.txt").write_text("mine")
    tier = opener(capacity)
    there = {path.name for path in (tmp_path / "kv" / "engine-0").iterdir()}
    assert {old.digest.hex(), newer.digest.hex()} <= there
    for number in range(1000, 1070):
        assert store(tier, keys_of(number)) == [Outcome.OK]
        assert on_disk(tmp_path / "kv" / "engine-0") <= capacity
    left = tmp_path / "kv" / "engine-0"
    assert [path.name for path in (left / old.digest.hex()).iterdir()] == ["notes.txt"]
    assert (left / newer.digest.hex() / "namespace.json").exists()
    tier.delete(keys_of(*range(1000, 1070)))
    fill(tier)
    assert not (left / newer.digest.hex()).exists()
    assert on_disk(left) <= capacity


# Epochs


def test_a_move_is_refused_as_long_as_its_mark_can_not_be_written(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing old is served meanwhile, and nothing taken (vllm-project/vllm#57727)."""
    tier = opener()
    store(tier, keys_of(1))

    def failing(path: Path, content: dict[str, Any]) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(marks_module, "write_durably", failing)
    with pytest.raises(TierUnavailable, match="mark of the new epoch"):
        tier.move_to("v2")
    assert tier.exists(keys_of(1)) == [False]
    assert load(tier, keys_of(1)) == [Outcome.MISSING]
    assert store(tier, keys_of(2)) == [Outcome.REFUSED]
    assert list(tier.entries()) == []
    monkeypatch.undo()
    tier.move_to("v2")
    assert store(tier, keys_of(2)) == [Outcome.OK]
    assert tier.exists(keys_of(1, 2)) == [False, True]


def test_a_read_that_a_move_overtakes_gives_nothing(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm#41956: a completion brought a dropped chunk back."""
    tier = opener()
    store(tier, keys_of(1, 2))
    reader = HeldReader(tier, keys_of(1, 2), monkeypatch)
    tier.move_to("v2")
    assert reader.let_go() == [Outcome.MISSING] * 2
    assert tier.usage() == Usage(0, 0, tier.usage().capacity)
    assert len(fill(tier)) == room(tier)


def test_the_mark_is_written_before_anything_else(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener()
    store(tier, keys_of(1))

    def failing(mark: str) -> None:
        raise TierUnavailable("the index can't be written")

    monkeypatch.setattr(tier._index, "reset", failing)
    with pytest.raises(TierUnavailable):
        tier.move_to("v2")
    assert tier.exists(keys_of(1)) == [False]
    tier.close()
    assert opener(epoch="v2").exists(keys_of(1)) == [False]


@pytest.mark.parametrize(
    ("first", "moved", "then", "warm"),
    [
        ("", None, "", True),
        ("v1", None, "v1", True),
        ("v1", None, "v2", False),
        ("v1", None, "", False),
        ("", None, "v1", False),
        ("", "", "", False),
        ("", "v1", "v1", True),
        ("", "v1", "", False),
        ("v1", "v2", "v1", False),
    ],
)
def test_which_start_is_warm(opener: Opener, first: str, moved: str | None, then: str, warm: bool) -> None:
    """A start finds chunks only where it is known that they are of the same weights."""
    tier = opener(epoch=first)
    if moved is not None:
        tier.move_to(moved)
    store(tier, keys_of(1))
    tier.close()
    again = opener(epoch=then)
    assert again.exists(keys_of(1)) == [warm]
    again.close()
    assert opener(epoch=then).exists(keys_of(1)) == [warm]


def test_a_move_voids_what_the_index_still_lists(opener: Opener, tmp_path: Path) -> None:
    """The process may die between the mark and the index."""
    tier = opener()
    store(tier, keys_of(1))
    tier.close()
    epoch = next(tmp_path.rglob("epoch.json"))
    epoch.unlink()
    again = opener()
    assert again.exists(keys_of(1)) == [False]
    assert again.usage().chunks == 0
    assert len(fill(again)) == room(again)


# Recency


def test_recency_is_persisted_every_five_seconds(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener()
    now = [0.0]
    monkeypatch.setattr(tier, "_clock", lambda: now[0])
    monkeypatch.setattr(tier, "_persisted", 0.0)
    keys = keys_of(1, 2, 3)
    store(tier, keys)
    tier.touch([keys[1], keys[0]])

    def persisted() -> list[Key]:
        rows = sorted(tier._index.rows(), key=lambda row: row.used)
        return [row.key for row in rows if row.used != row.location.written]

    now[0] = 4.9
    tier.maintain(1.0)
    assert persisted() == []
    assert [entry.key for entry in sorted(tier.entries(), key=lambda e: e.used)][1:] == [keys[1], keys[0]]
    now[0] = 5.1
    tier.maintain(1.0)
    assert persisted() == [keys[1], keys[0]]
    tier.touch([keys[1]])
    now[0] = 9.0
    tier.maintain(1.0)
    assert persisted() == [keys[1], keys[0]]


def test_uses_are_persisted_with_the_recency(opener: Opener) -> None:
    tier = opener()
    keys = keys_of(1, 2, 3)
    store(tier, keys)

    def uses(tier: Tier) -> list[int]:
        return [entry.uses for entry in sorted(tier.entries(), key=lambda entry: keys.index(entry.key))]

    assert uses(tier) == [1, 1, 1]
    tier.touch(keys)
    tier.note_uses({keys[0]: 2, keys[2]: 255, key_for(9): 4})
    assert uses(tier) == [2, 1, 255]
    tier._persist_recency()
    assert uses(tier) == [2, 1, 255]
    tier.touch(keys[:1])
    assert uses(tier) == [2, 1, 255], "a touch that is no further use"
    tier.close()
    assert uses(opener()) == [2, 1, 255]


def test_touching_what_is_not_there_does_no_harm(opener: Opener) -> None:
    tier = opener()
    store(tier, keys_of(1))
    tier.touch([key_for(9), b"", b"x" * 600, key_for(1)])
    tier.close()
    assert [entry.key for entry in opener().entries()] == keys_of(1)


# Commits


class Writer(threading.Thread):
    """Stores one chunk, and has written its bytes when this returns, while the test holds commits back."""

    def __init__(self, tier: DiskTier, key: Key) -> None:
        super().__init__()
        self.tier = tier
        self.key = key
        self.outcomes: list[Outcome] = []
        waiting = len(tier._written)
        self.start()
        pause = threading.Event()
        for _ in range(60_000):
            if len(tier._written) > waiting:
                return
            pause.wait(0.001)
        raise AssertionError("it does not come to its commit")

    def run(self) -> None:
        self.outcomes += store(self.tier, [self.key])

    def ended(self) -> list[Outcome]:
        self.join(60)
        return self.outcomes


def test_writers_that_wait_are_committed_together(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener()
    commit = tier._index.commit
    commits: list[list[Key]] = []

    def noting_commit(removed: Any, added: Any) -> list[bool]:
        commits.append([key for key, _ in added])
        return commit(removed, added)

    monkeypatch.setattr(tier._index, "commit", noting_commit)
    first, second = keys_of(1, 2)
    with tier._committing:
        writers = [Writer(tier, key) for key in (first, second, first)]
    assert [writer.ended() for writer in writers] == [[Outcome.OK]] * 3
    assert commits == [[first, second, first]]
    assert load(tier, [first, second]) == [Outcome.OK] * 2
    assert tier.usage() == Usage(2, 2 * tier.footprint(CHUNK), tier.usage().capacity)
    fill(tier)  # nothing has been lost of the slot that was written twice


def test_what_waits_while_the_epoch_moves_on_is_refused_alone(opener: Opener) -> None:
    tier = opener()
    with tier._committing:
        late = Writer(tier, key_for(1))
        tier._begin_era("next")
        timely = Writer(tier, key_for(2))
    assert late.ended() == [Outcome.REFUSED] and timely.ended() == [Outcome.OK]
    assert load(tier, keys_of(1, 2)) == [Outcome.MISSING, Outcome.OK]
    assert tier.usage().chunks == 1
    tier.delete(keys_of(2))
    fill(tier)


def test_a_move_that_begins_while_others_commit_settles_their_chunks_once(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their room was given back twice: the tier took more than its capacity from then on."""
    tier = opener()
    commit = tier._index.commit
    moves = threading.Thread(target=lambda: tier.move_to("next"))

    def moved_meanwhile(removed: Any, added: Any) -> Any:
        new = commit(removed, added)
        if added and not moves.is_alive():
            moves.start()
            wait_until(lambda: tier._era is None, "the move has begun")
        return new

    with monkeypatch.context() as patch:
        patch.setattr(tier._index, "commit", moved_meanwhile)
        store(tier, keys_of(1, 2, 3))
        moves.join(60)
    assert tier._ledger._admitted_bytes == 0
    assert load(tier, keys_of(1)) == [Outcome.MISSING]
    fill(tier)


# Durability


@pytest.mark.parametrize(("durability", "synced"), [("none", False), ("flush", True), ("fsync", True)])
def test_what_is_synced_before_success(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, durability: str, synced: bool
) -> None:
    tier = opener(durability=durability)
    store(tier, keys_of(1))
    events: list[str] = []
    fdatasync, pwritev, commit = os.fdatasync, os.pwritev, tier._index.commit

    def noting_write(fd: int, views: Any, offset: int) -> int:
        events.append("written")
        return pwritev(fd, views, offset)

    def noting_sync(fd: int) -> None:
        events.append("slabs synced")
        fdatasync(fd)

    def noting_commit(*given: Any) -> list[bool]:
        events.append("committed")
        return commit(*given)

    monkeypatch.setattr(os, "pwritev", noting_write)
    monkeypatch.setattr(os, "fdatasync", noting_sync)
    monkeypatch.setattr(tier._index, "commit", noting_commit)
    assert store(tier, keys_of(2, 3)) == [Outcome.OK] * 2
    assert events == (["written", "slabs synced", "committed"] if synced else ["written", "committed"])
    assert load(tier, keys_of(1, 2, 3)) == [Outcome.OK] * 3


def test_a_failed_sync_is_a_failed_store(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener(durability="fsync")

    def failing(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", failing)
    outcomes = store(tier, keys_of(1, 2))
    monkeypatch.undo()
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.FAILED] * 2
    assert tier.exists(keys_of(1, 2)) == [False, False]
    assert tier.usage() == Usage(0, 0, tier.usage().capacity)
    assert store(tier, keys_of(1, 2)) == [Outcome.OK] * 2


# Processes


def test_a_fork_is_refused_and_harms_nothing(opener: Opener) -> None:
    """An inherited environment reads without an error and corrupts (jnwatson/py-lmdb#346)."""
    tier = opener()
    store(tier, keys_of(1))
    child = os.fork()
    if not child:
        code = 1
        try:
            tier.read(keys_of(1), [buffer(CHUNK)])
        except ProtocolError:
            tier.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert load(tier, keys_of(1)) == [Outcome.OK]
    assert store(tier, keys_of(2)) == [Outcome.OK]
    tier.close()
    assert load(opener(), keys_of(1, 2)) == [Outcome.OK] * 2


def test_every_call_after_close_is_refused(opener: Opener) -> None:
    tier = opener()
    tier.close()
    calls: list[Callable[[], object]] = [
        lambda: tier.exists([]),
        lambda: tier.read([], []),
        lambda: tier.write([], []),
        lambda: tier.delete([]),
        lambda: tier.touch([]),
        lambda: tier.entries(),
        lambda: tier.usage(),
        lambda: tier.maintain(1.0),
        lambda: tier.move_to(""),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
