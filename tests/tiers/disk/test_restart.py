"""What a start finds: after a close, a kill, a power cut, with another capacity, in another format."""

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import ConfigError
from kvcascade.testing import buffer, bytes_for, holds, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers import boot as boot_module
from kvcascade.tiers.disk import DiskSettings
from kvcascade.tiers.disk.tier import DiskTier
from kvcascade.types import Changes, Entry, Key, Namespace, Outcome, Usage

KIB = 1 << 10
CHUNK = 64 * KIB
NAMESPACE = Namespace.of(model="m", tenant="")
Opener = Callable[..., DiskTier]


@pytest.fixture
def opener(tmp_path: Path) -> Iterator[Opener]:
    opened: list[DiskTier] = []

    def open_it(capacity: int = 8 << 20, chunk: int = CHUNK, epoch: str = "", **settings: Any) -> DiskTier:
        tier = DiskSettings(path=str(tmp_path / "kv"), capacity=capacity, **settings).open(
            OpenContext(NAMESPACE, chunk, epoch=epoch)
        )
        assert isinstance(tier, DiskTier)
        opened.append(tier)
        return tier

    yield open_it
    for tier in opened:
        tier.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "engine-0" / NAMESPACE.digest.hex()


def keys_of(*numbers: int) -> list[Key]:
    return [key_for(number) for number in numbers]


def store(tier: DiskTier, keys: list[Key], nbytes: int = CHUNK, epoch: str = "") -> None:
    assert set(tier.write(keys, [memoryview(bytes_for(key, nbytes, epoch)) for key in keys])) == {Outcome.OK}


def found(tier: DiskTier, keys: list[Key], nbytes: int = CHUNK, epoch: str = "") -> list[Key]:
    """Which keys the tier gives, right to the last byte; all that it names it gives."""
    there = tier.exists(keys)
    targets = [buffer(nbytes) for _ in keys]
    outcomes = tier.read(keys, targets)
    for key, target, outcome in zip(keys, targets, outcomes, strict=True):
        assert not outcome.ok or holds(target, key, epoch)
    assert [outcome.ok for outcome in outcomes] == there
    return [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.ok]


def on_disk(path: Path) -> int:
    return int(
        subprocess.run(["du", "-sB1", str(path)], check=True, capture_output=True, text=True).stdout.split()[0]
    )


def kill(tier: DiskTier) -> None:
    """Ends the tier as SIGKILL does: what is written stays, nothing else is done."""
    tier._opened.close()
    tier._calls.close()


def cut_power(tier: DiskTier, folder: Path) -> None:
    """Ends the tier as a power cut does: the machine boots anew, and nobody knows what became of the index."""
    kill(tier)
    session = json.loads((folder / "session.json").read_text())
    if session["boot"]:
        session["boot"] = "another boot"
    (folder / "session.json").write_text(json.dumps(session))


def scan(tier: DiskTier) -> list[Entry]:
    """Lets the tier look through the disk; returns what came to light."""
    appeared: list[Entry] = []
    while tier._scan is not None:
        appeared += tier.maintain(10.0).appeared
    return appeared + list(tier.maintain(10.0).appeared)


# After a kill


@pytest.mark.parametrize("durability", ["none", "flush", "fsync"])
def test_a_killed_process_loses_nothing(opener: Opener, durability: str) -> None:
    tier = opener(durability=durability)
    keys = keys_of(*range(20))
    store(tier, keys)
    tier.delete(keys[:5])
    kill(tier)
    again = opener(durability=durability)
    assert again._scan is None
    assert found(again, keys) == keys[5:]
    assert again.usage().chunks == 15


def test_chunks_are_found_without_reading_them(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener(128 << 20, 512)
    keys = keys_of(*range(10_000))
    store(tier, keys, 512)
    tier.touch(keys[::2])
    tier.close()

    def forbidden(*_: object) -> int:
        raise AssertionError("a chunk was read")

    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: len(views[0]))  # of the probe of direct I/O
    again = opener(128 << 20, 512)
    monkeypatch.setattr(os, "preadv", forbidden)
    entries = list(again.entries())
    assert {entry.key for entry in entries} == set(keys)
    assert {entry.key for entry in entries if entry.used > entry.written} == set(keys[::2])


# Another capacity


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_smaller_capacity_keeps_the_most_recent(opener: Opener, folder: Path, how: str) -> None:
    """LMCache/LMCache#1454: after a restart the limit was exceeded by what was left."""
    tier = opener(8 << 20)
    keys = keys_of(*range(60))
    store(tier, keys)
    order = keys[::-3] + [key for key in keys if key not in keys[::-3]]
    tier.touch(order)
    (folder / "notes.txt").write_text("mine")
    if how == "killed":
        tier._persist_recency()
        kill(tier)
    else:
        tier.close()
    again = opener(3 << 20)
    fits = (again.usage().capacity or 0) // again.footprint(CHUNK)
    assert 10 < fits < 60
    assert found(again, order) == order[-fits:]
    assert again.usage().chunks == fits
    assert on_disk(folder.parent) - 4096 <= 3 << 20
    more = keys_of(*range(100, 110))
    outcomes = again.write(more, [memoryview(bytes_for(key, CHUNK)) for key in more], order[-10:])
    assert outcomes == [Outcome.OK] * 10
    assert on_disk(folder.parent) - 4096 <= 3 << 20
    assert (folder / "notes.txt").read_text() == "mine"
    again.close()
    assert found(opener(3 << 20), order + more) == order[-fits:-10] + more


def test_a_much_smaller_capacity_shrinks_the_index_too(opener: Opener, folder: Path) -> None:
    tier = opener(32 << 20, 512)
    keys = keys_of(*range(3000))
    store(tier, keys, 512)
    tier.close()
    before = (folder / "index.lmdb").stat().st_size
    again = opener(1 << 20, 512)
    entries = list(again.entries())
    assert 10 < len(entries) < 200
    assert (folder / "index.lmdb").stat().st_size < before
    assert on_disk(folder.parent) <= 1 << 20
    assert len(found(again, [entry.key for entry in entries], 512)) == len(entries)
    again.close()
    assert len(list(opener(32 << 20, 512).entries())) == len(entries)


def test_a_larger_capacity_keeps_all(opener: Opener) -> None:
    tier = opener(3 << 20)
    keys = keys_of(*range(20))
    store(tier, keys)
    tier.close()
    again = opener(16 << 20)
    more = keys_of(*range(100, 200))
    store(again, more)
    assert found(again, keys + more) == keys + more


def test_another_chunk_size_starts_with_what_is_there(opener: Opener, folder: Path) -> None:
    tier = opener(8 << 20)
    keys = keys_of(*range(90))
    store(tier, keys)
    tier.close()
    again = opener(8 << 20, chunk=1 << 20)
    kept = found(again, keys)
    assert len(kept) > 30
    large = key_for(1000)
    outcomes = again.write([large], [memoryview(bytes_for(large, 1 << 20))], kept)
    assert outcomes == [Outcome.OK]
    assert found(again, [large], 1 << 20) == [large]
    assert on_disk(folder.parent) <= 8 << 20


# After a power cut


def test_chunks_are_found_again_by_their_envelopes(opener: Opener, folder: Path) -> None:
    tier = opener()
    keys = keys_of(*range(40))
    store(tier, keys)
    store(tier, keys_of(99), 100)
    cut_power(tier, folder)
    (folder / "index.lmdb").write_bytes(b"torn" * 5000)
    again = opener()
    assert list(again.entries()) == []
    appeared = scan(again)
    assert sorted(entry.key for entry in appeared) == sorted([*keys, key_for(99)])
    assert sorted(again.entries()) == sorted(appeared)
    assert found(again, keys) == keys
    assert found(again, keys_of(99), 100) == keys_of(99)
    assert again.usage().chunks == 41
    kill(again)
    assert found(opener(), keys) == keys


def test_a_scan_keeps_to_its_budget(opener: Opener, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener(64 << 20, 512)
    keys = keys_of(*range(1000))
    store(tier, keys, 512)
    cut_power(tier, folder)
    again = opener(64 << 20, 512)
    now = [0.0]

    def clock() -> float:
        now[0] += 0.25
        return now[0]

    monkeypatch.setattr(again, "_clock", clock)
    appeared = again.maintain(1.0).appeared
    assert 0 < len(appeared) < 1000
    assert len(appeared) + len(scan(again)) == 1000


def test_a_slot_that_was_not_looked_at_is_not_given_away(opener: Opener, folder: Path) -> None:
    tier = opener()
    fits = (tier.usage().capacity or 0) // tier.footprint(CHUNK)
    keys = keys_of(*range(fits))
    store(tier, keys)
    cut_power(tier, folder)
    again = opener()
    fresh = keys_of(*range(1000, 1000 + fits))
    outcomes = again.write(fresh, [memoryview(bytes_for(key, CHUNK)) for key in fresh])
    stored = [key for key, outcome in zip(fresh, outcomes, strict=True) if outcome.ok]
    assert len(stored) < fits
    scan(again)
    assert found(again, stored) == stored
    assert len(found(again, keys)) >= fits - len(stored) - 8
    usage = again.usage()
    assert usage.bytes <= (usage.capacity or 0)


def test_a_store_during_the_scan_is_the_newer_one(opener: Opener, folder: Path) -> None:
    tier = opener()
    keys = keys_of(*range(10))
    store(tier, keys)
    cut_power(tier, folder)
    again = opener()
    store(again, keys[:5])
    appeared = scan(again)
    assert sorted(entry.key for entry in appeared) == sorted(keys[5:])
    assert found(again, keys) == keys
    assert again.usage().chunks == 10
    again.delete(keys)
    assert again.usage() == Usage(0, 0, again.usage().capacity)


def test_the_newest_copy_of_a_key_counts(opener: Opener, folder: Path) -> None:
    """Deleted and stored again: the older copy lies on the disk still."""
    tier = opener()
    key, other = keys_of(1, 2)
    store(tier, [key])
    first = tier._index.lookup([key])[0]
    store(tier, [other])
    tier.delete([key])
    holder = keys_of(3)
    store(tier, holder)  # takes the slot of the first copy
    store(tier, [key])
    second = tier._index.lookup([key])[0]
    assert first
    assert second
    assert first.slot != second.slot
    cut_power(tier, folder)
    again = opener()
    scan(again)
    assert again._index.lookup([key])[0] == second
    assert found(again, [key, other, *holder]) == [key, other, *holder]


def test_nothing_of_another_epoch_comes_back(opener: Opener, folder: Path) -> None:
    """Chunks that had been evicted may come back, never those of a void epoch (vllm-project/vllm#57727)."""
    tier = opener(epoch="v1")
    store(tier, keys_of(*range(20)), epoch="v1")
    tier.move_to("v2")
    store(tier, keys_of(0, 50), epoch="v2")
    cut_power(tier, folder)
    again = opener(epoch="v2")
    assert sorted(entry.key for entry in scan(again)) == sorted(keys_of(0, 50))
    assert found(again, keys_of(*range(20), 50), epoch="v2") == keys_of(0, 50)


def test_a_move_during_the_scan_ends_it(opener: Opener, folder: Path) -> None:
    tier = opener(64 << 20, 512)
    keys = keys_of(*range(1000))
    store(tier, keys, 512)
    cut_power(tier, folder)
    again = opener(64 << 20, 512)
    again._scan_slice()
    again.move_to("v2")
    assert again.maintain(10.0) == Changes()
    assert list(again.entries()) == []
    assert again.usage().chunks == 0
    store(again, keys, 512)
    assert found(again, keys, 512) == keys


@pytest.mark.parametrize("durability", ["flush", "fsync"])
def test_a_synced_index_is_trusted(opener: Opener, folder: Path, durability: str) -> None:
    tier = opener(durability=durability)
    keys = keys_of(*range(10))
    store(tier, keys)
    cut_power(tier, folder)
    again = opener(durability=durability)
    assert again._scan is None
    assert found(again, keys) == keys


def test_a_synced_session_after_an_unsynced_one_is_trusted(opener: Opener, folder: Path) -> None:
    tier = opener(durability="none")
    store(tier, keys_of(*range(10)))
    kill(tier)
    tier = opener(durability="flush")
    assert json.loads((folder / "session.json").read_text())["durability"] == "flush"
    store(tier, keys_of(10))
    cut_power(tier, folder)
    again = opener(durability="flush")
    assert again._scan is None
    assert found(again, keys_of(*range(11))) == keys_of(*range(11))


def test_a_clean_close_is_trusted_after_another_boot(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = opener()
    store(tier, keys_of(1))
    tier.close()
    monkeypatch.setattr(boot_module, "BOOT_ID", Path("/nowhere"))
    again = opener()
    assert again._scan is None
    assert found(again, keys_of(1)) == keys_of(1)
    kill(again)
    assert opener()._scan is not None  # where boots can't be told apart, a kill may have been a power cut


def test_a_kill_during_the_scan_begins_it_again(opener: Opener, folder: Path) -> None:
    tier = opener(64 << 20, 512)
    keys = keys_of(*range(1000))
    store(tier, keys, 512)
    cut_power(tier, folder)
    tier = opener(64 << 20, 512)
    tier._scan_slice()
    store(tier, keys_of(5000), 512)
    kill(tier)
    again = opener(64 << 20, 512)
    assert len(scan(again)) == 1001
    assert found(again, [*keys, key_for(5000)], 512) == [*keys, key_for(5000)]


def test_an_index_that_lost_its_last_commits_gives_no_wrong_bytes(opener: Opener, folder: Path) -> None:
    """What a power cut leaves with `flush`: entries of slots that hold another chunk by now."""
    tier = opener(durability="flush")
    fits = (tier.usage().capacity or 0) // tier.footprint(CHUNK)
    keys = keys_of(*range(fits))
    store(tier, keys)
    tier._index.sync()
    tier._index.compact_to(folder / "saved")
    tier.delete(keys[: fits // 2])
    store(tier, keys_of(*range(1000, 1000 + fits // 2)))
    cut_power(tier, folder)
    (folder / "saved").replace(folder / "index.lmdb")
    again = opener(durability="flush")
    targets = [buffer(CHUNK) for _ in keys]
    outcomes = again.read(keys, targets)
    good = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome.ok]
    assert set(keys[fits // 2 :]) <= set(good)
    assert all(holds(target, key) for key, target in zip(keys, targets, strict=True) if key in good)
    assert len(good) < fits
    assert sorted(entry.key for entry in again.entries()) == sorted(good)


def test_a_smaller_capacity_after_a_power_cut(opener: Opener, folder: Path) -> None:
    tier = opener(8 << 20)
    keys = keys_of(*range(90))
    store(tier, keys)
    cut_power(tier, folder)
    again = opener(3 << 20)
    scan(again)
    usage = again.usage()
    assert 0 < usage.bytes <= (usage.capacity or 0)
    assert len(found(again, keys)) == usage.chunks
    assert on_disk(folder.parent) <= 3 << 20


# Damage and other formats


def test_a_damaged_index_is_built_anew(opener: Opener, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opener()
    keys = keys_of(*range(10))
    store(tier, keys)
    tier.close()
    (folder / "index.lmdb").write_bytes(b"\xff" * 100_000)
    with caplog.at_level(logging.WARNING):
        again = opener()
    assert "built anew" in caplog.text
    scan(again)
    assert found(again, keys) == keys


@pytest.mark.parametrize("lost", ["index.lmdb", "index.lmdb-lock", "session.json", "*.slab", "namespace.json"])
def test_a_lost_file_never_gives_wrong_bytes(opener: Opener, folder: Path, lost: str) -> None:
    tier = opener()
    keys = keys_of(*range(30))
    store(tier, keys)
    tier.close()
    for path in list(folder.glob(lost))[:1]:
        path.unlink()
    again = opener()
    scan(again)
    kept = found(again, keys)
    assert sorted(entry.key for entry in again.entries()) == sorted(kept)
    store(again, keys)
    assert found(again, keys) == keys
    assert again.usage().chunks == 30


def test_what_a_killed_process_left_half_done_is_removed(opener: Opener, folder: Path) -> None:
    opener().close()
    leftovers = ["extent-000007-69632.slab", "epoch.json.tmp", "session.json.tmp", "index.lmdb.compact"]
    for name in leftovers:
        (folder / name).touch()
    (folder / "notes.tmp").write_text("mine")
    (folder / "extent-notes.slab").write_text("mine")
    tier = opener()
    names = {path.name for path in folder.iterdir()}
    assert not names & set(leftovers)
    assert {"notes.tmp", "extent-notes.slab"} <= names
    store(tier, keys_of(1))


def test_an_older_format_starts_empty(opener: Opener, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opener()
    store(tier, keys_of(1))
    tier.close()
    rewrite(folder / "namespace.json", format=0)
    with caplog.at_level(logging.WARNING):
        again = opener()
    assert len(caplog.records) == 1
    assert "older format" in caplog.text
    assert again.exists(keys_of(1)) == [False]
    store(again, keys_of(2))
    again.close()
    assert found(opener(), keys_of(1, 2)) == keys_of(2)


def test_a_newer_format_is_refused_untouched(opener: Opener, folder: Path) -> None:
    tier = opener()
    store(tier, keys_of(1))
    tier.close()
    rewrite(folder / "namespace.json", format=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=r"format 2, by a newer version; this one knows 1.*untouched"):
        opener()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
