"""The fs tier: what a file system may answer, what others may do to the directory, and who may read it."""

import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import ClosedError, ConfigError, ProtocolError, TierUnavailable
from kvcascade.testing import bytes_for, key_for
from kvcascade.tiers.blocks import DIRECT
from kvcascade.tiers.described import NAMESPACE_NAME
from kvcascade.tiers.envelope import FORMAT, Envelope, checksum, pack
from kvcascade.tiers.fs.layout import BLOCK
from kvcascade.types import Namespace, Outcome, OutcomeKind, Usage

HOUR = 3600.0


def failing(real: Callable[..., Any], error: int, times: int = 1, after: bool = False) -> Callable[..., Any]:
    """The call, failing its first times: before it does anything, or after."""
    left = [times]

    def call(*args: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            if after:
                real(*args, **named)
            raise OSError(error, os.strerror(error), str(args[0]))
        return real(*args, **named)

    return call


# Answers of a file system


def test_a_rename_that_was_done_although_it_says_otherwise(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats a call that got no answer, and then finds that there is nothing left to rename."""
    tier = shared.engine()
    keys = shared.keys(1, 2)
    shared.store(tier, shared.keys(1000))
    monkeypatch.setattr(os, "rename", failing(os.rename, errno.ENOENT, times=2, after=True))
    for key in keys:
        shared.file(tier, key).parent.mkdir(exist_ok=True)
    assert shared.store(tier, keys) == [Outcome.OK] * 2
    assert shared.load(tier, keys) == [Outcome.OK] * 2
    assert shared.temporaries == []


def test_a_temporary_that_others_have_removed_is_a_failed_write(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kvcache-ai/Mooncake#974: a writer that was stopped for long, and taken for dead, can't bring anything half
    done to light."""
    tier = shared.engine()
    rename = os.rename

    def too_late(source: Any, target: Any) -> None:
        Path(source).unlink()
        rename(source, target)

    monkeypatch.setattr(os, "rename", too_late)
    (outcome,) = shared.store(tier, shared.keys(1))
    assert outcome.kind is OutcomeKind.FAILED
    assert isinstance(outcome.cause, TierUnavailable)
    monkeypatch.setattr(os, "rename", rename)
    assert shared.load(tier, shared.keys(1)) == [Outcome.MISSING]
    assert shared.store(tier, shared.keys(1)) == [Outcome.OK]


def test_folders_may_vanish_at_any_time(shared: Any) -> None:
    tier = shared.engine()
    (key,) = shared.keys(1)
    shared.store(tier, [key])
    shared.file(tier, key).unlink()
    shared.file(tier, key).parent.rmdir()
    shutil.rmtree(tier._opened.writer.folder)
    assert shared.load(tier, [key]) == [Outcome.MISSING]
    assert shared.store(tier, [key]) == [Outcome.OK]
    assert shared.load(tier, [key]) == [Outcome.OK]


@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
def test_a_stale_handle_is_a_miss(shared: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Another client of the server has removed or replaced the file."""
    tier = shared.engine()
    keys = shared.keys(1, 2)
    shared.store(tier, keys)
    monkeypatch.setattr(os, call, failing(getattr(os, call), errno.ESTALE))
    assert shared.load(tier, keys) == [Outcome.MISSING, Outcome.OK]
    assert shared.load(tier, keys) == [Outcome.OK, Outcome.OK]


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_read_error_keeps_the_file(shared: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """vllm-project/vllm#54363: what may be passing deletes nothing."""
    tier = shared.engine()
    keys = shared.keys(1, 2)
    shared.store(tier, keys)
    monkeypatch.setattr(os, call, failing(getattr(os, call), errno.EIO))
    first, second = shared.load(tier, keys)
    assert first.kind is OutcomeKind.FAILED
    assert isinstance(first.cause.__cause__, OSError)
    assert second == Outcome.OK
    assert shared.load(tier, keys) == [Outcome.OK] * 2


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["pwritev", "close", "rename"])
def test_no_room_is_a_refusal(shared: Any, monkeypatch: pytest.MonkeyPatch, call: str, error: int) -> None:
    """A network file system may say so only when the file is closed."""
    tier = shared.engine()
    keys = shared.keys(1, 2)
    monkeypatch.setattr(os, call, failing(getattr(os, call), error, after=call == "close"))
    assert shared.store(tier, keys) == [Outcome.REFUSED, Outcome.OK]
    monkeypatch.undo()
    assert shared.load(tier, keys) == [Outcome.MISSING, Outcome.OK]
    assert shared.temporaries == []
    assert shared.store(tier, keys) == [Outcome.OK] * 2


def test_a_write_error_leaves_nothing(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = shared.engine()
    keys = shared.keys(1, 2)
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, errno.EIO))
    first, second = shared.store(tier, keys)
    assert first.kind is OutcomeKind.FAILED
    assert second == Outcome.OK
    assert shared.temporaries == []
    assert tier.exists(keys) == [False, True]


def test_existence_that_can_not_be_told_is_an_error(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = shared.engine()
    monkeypatch.setattr(os, "lstat", failing(os.lstat, errno.EIO))
    with pytest.raises(TierUnavailable, match="can't be used now"):
        tier.exists(shared.keys(1))
    assert tier.exists(shared.keys(1)) == [False]


def test_direct_io_that_does_not_work(
    shared: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vllm-project/vllm#44016: found out once, said once, and every size works."""
    if not DIRECT:
        pytest.skip("this system has no direct I/O")
    real = os.open

    def without(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", str(path))
        return real(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", without)
    with caplog.at_level(logging.WARNING):
        tier = shared.engine()
        for nbytes in (1, 4097, 65_536):
            key = key_for(nbytes)
            assert shared.store(tier, [key], nbytes) == [Outcome.OK]
            assert shared.load(tier, [key], nbytes) == [Outcome.OK]
    assert [record.message for record in caplog.records] == [
        f"{shared.path}: no direct I/O here, the page cache is used"
    ]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs")
def test_on_tmpfs(shared: Any) -> None:
    """vllm-project/vllm#44016."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        shared.path = Path(folder) / "kv"
        tier = shared.engine(capacity=1 << 20)
        for nbytes in (1, 4096, 4097):
            key = key_for(nbytes)
            assert shared.store(tier, [key], nbytes) == [Outcome.OK]
            assert shared.load(tier, [key], nbytes) == [Outcome.OK]
        tier.maintain(60.0)
        tier.close()


def test_chunks_written_with_and_without_direct_io_are_the_same(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that share a directory may be on machines where it does and does not work."""
    one = shared.engine()
    monkeypatch.setattr("kvcascade.tiers.fs.opening.direct_works", lambda temporary: False)
    other = shared.engine()
    keys = shared.keys(1, 2)
    assert shared.store(one, keys[:1], 4097) + shared.store(other, keys[1:], 4097) == [Outcome.OK] * 2
    assert shared.load(other, keys, 4097) == [Outcome.OK] * 2
    assert shared.load(one, keys, 4097) == [Outcome.OK] * 2


@pytest.mark.parametrize("durability", ["none", "flush", "fsync"])
def test_every_durability(shared: Any, monkeypatch: pytest.MonkeyPatch, durability: str) -> None:
    tier = shared.engine(durability=durability)
    synced: list[bool] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    assert shared.store(tier, shared.keys(1)) == [Outcome.OK]
    assert synced == {"none": [], "flush": [False], "fsync": [False, True]}[durability]
    assert shared.load(tier, shared.keys(1)) == [Outcome.OK]


# What others may do to the directory


def test_a_chunk_that_broke_after_it_was_found(shared: Any) -> None:
    """vllm-project/vllm#49176: it is a miss from then on, the others of its batch are not, and a store heals
    it."""
    tier = shared.engine()
    keys = shared.keys(0, 1, 2, 3)
    shared.store(tier, keys)
    assert tier.exists(keys) == [True] * 4
    os.truncate(shared.file(tier, keys[2]), 5000)
    assert shared.load(tier, keys) == [Outcome.OK, Outcome.OK, Outcome.CORRUPT, Outcome.OK]
    assert tier.exists(keys) == [True, True, False, True]
    assert shared.load(tier, keys[2:3]) == [Outcome.MISSING]
    assert shared.store(tier, keys) == [Outcome.OK] * 4
    assert shared.load(tier, keys) == [Outcome.OK] * 4


@pytest.mark.parametrize("left", [0, 1, BLOCK, BLOCK + 512])
def test_a_file_that_was_cut_off(shared: Any, left: int) -> None:
    """vllm-project/vllm#54363: as a power cut leaves it, empty or short."""
    tier = shared.engine()
    (key,) = shared.keys(1)
    shared.store(tier, [key])
    os.truncate(shared.file(tier, key), left)
    assert tier.exists([key]) == [False]
    assert shared.load(tier, [key]) == [Outcome.CORRUPT]
    assert list(tier.entries()) == []
    assert shared.store(tier, [key]) == [Outcome.OK]
    assert shared.load(tier, [key]) == [Outcome.OK]


def test_a_store_heals_a_short_file_that_nobody_has_read(shared: Any) -> None:
    tier = shared.engine()
    (key,) = shared.keys(1)
    shared.store(tier, [key])
    os.truncate(shared.file(tier, key), 0)
    assert shared.store(tier, [key]) == [Outcome.OK]
    assert shared.load(tier, [key]) == [Outcome.OK]


def test_a_file_in_the_place_of_another(shared: Any) -> None:
    tier = shared.engine()
    one, two = shared.keys(1, 2)
    shared.store(tier, [one, two])
    shared.file(tier, one).replace(shared.file(tier, two))
    assert shared.load(tier, [one, two]) == [Outcome.MISSING, Outcome.CORRUPT]
    assert list(tier.entries()) == []


def test_a_file_of_another_identity(shared: Any) -> None:
    """Right key, right length, right checksum, and yet not these bytes."""
    tier, other = shared.engine(), shared.engine(namespace=Namespace.of(model="other", tenant=""))
    (key,) = shared.keys(1)
    shared.store(tier, [key])
    shared.store(other, [key], epoch="other")
    shared.file(other, key).replace(shared.file(tier, key))
    assert shared.load(tier, [key]) == [Outcome.CORRUPT]


def test_a_chunk_of_a_newer_format_is_left_alone(shared: Any) -> None:
    tier = shared.engine()
    (key,) = shared.keys(1)
    shared.store(tier, [key])
    path = shared.file(tier, key)
    newer = path.read_bytes()[:8] + (FORMAT + 1).to_bytes(2, "little") + path.read_bytes()[10:]
    path.write_bytes(newer)
    assert shared.load(tier, [key]) == [Outcome.MISSING]
    assert path.read_bytes() == newer


def test_a_namespace_of_a_newer_format_is_refused(shared: Any) -> None:
    tier = shared.engine()
    tier.close()
    description = tier._opened.home.path / NAMESPACE_NAME
    text = description.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}')
    description.write_text(text)
    with pytest.raises(ConfigError, match="by a newer version"):
        shared.engine()
    assert description.read_text() == text
    assert shared.writers == []


def test_a_good_chunk_that_took_the_place_of_a_bad_one_stays(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the read and the removal another engine has stored the chunk anew."""
    tier, other = shared.engine(), shared.engine()
    (key,) = shared.keys(1)
    shared.store(tier, [key])
    with shared.file(tier, key).open("r+b") as file:
        file.seek(BLOCK + 7)
        file.write(b"\0\0\0\0\0\0\0\0")
    reject = tier._reject

    def late(*args: Any) -> Outcome:
        other.delete([key])
        shared.store(other, [key])
        return reject(*args)

    monkeypatch.setattr(tier, "_reject", late)
    assert shared.load(tier, [key]) == [Outcome.MISSING]
    assert shared.load(tier, [key]) == [Outcome.OK]


def test_quarantine_keeps_a_few(shared: Any) -> None:
    tier = shared.engine(on_corrupt="quarantine")
    keys = shared.keys(*range(20))
    shared.store(tier, keys, 4096)
    for key in keys:
        os.truncate(shared.file(tier, key), 5000)
    assert shared.load(tier, keys, 4096) == [Outcome.CORRUPT] * 20
    kept = list(tier._opened.home.quarantine.iterdir())
    assert len(kept) == 16
    assert {file.stat().st_size for file in kept} == {5000}
    assert shared.files == []


def test_a_symbolic_link_is_not_followed(shared: Any, tmp_path: Path) -> None:
    tier = shared.engine()
    one, two = shared.keys(1, 2)
    shared.store(tier, [one, two])
    outside = tmp_path / "outside"
    outside.write_bytes(shared.file(tier, one).read_bytes())
    shared.file(tier, one).unlink()
    shared.file(tier, one).symlink_to(outside)
    first, second = shared.load(tier, [one, two])
    assert not first.ok
    assert second == Outcome.OK
    assert [entry.key for entry in tier.entries()] == [two]


# Recency and age


def test_a_hit_sets_the_time_of_a_file_once_an_hour(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, other = shared.engine(), shared.engine()
    keys = shared.keys(1, 2, 3)
    shared.store(other, keys)
    old = shared.file(tier, keys[0]).stat().st_mtime - 2 * HOUR
    for key in keys[:2]:
        os.utime(shared.file(tier, key), (old, old))
    fresh = shared.file(tier, keys[2]).stat().st_mtime_ns
    assert shared.load(tier, keys) == [Outcome.OK] * 3
    tier.maintain(60.0)
    assert all(shared.file(tier, key).stat().st_mtime > old + HOUR for key in keys[:2])
    assert shared.file(tier, keys[2]).stat().st_mtime_ns == fresh
    monkeypatch.setattr(os, "utime", failing(os.utime, errno.EIO))
    shared.load(tier, keys)
    tier.touch(keys)
    tier.maintain(60.0)  # nothing to do


def test_chunks_expire(shared: Any) -> None:
    tier, forever = shared.engine(ttl="1h"), shared.engine()
    keys = shared.keys(1, 2)
    shared.store(tier, keys)
    now = tier._now()
    tier._now = lambda: now + HOUR / 2
    assert shared.load(tier, keys) == [Outcome.OK] * 2
    assert tier.exists(keys) == [True] * 2
    tier._now = lambda: now + HOUR + 1
    assert tier.exists(keys) == [False] * 2
    assert list(tier.entries()) == []
    assert len(list(forever.entries())) == 2
    assert shared.load(tier, keys[:1]) == [Outcome.MISSING]
    assert shared.store(tier, keys) == [Outcome.OK] * 2
    assert shared.load(tier, keys) == [Outcome.OK] * 2


def test_a_chunk_that_is_used_expires_all_the_same(shared: Any) -> None:
    """Its file is told of each use, but its envelope says when it was written."""
    tier = shared.engine(ttl="1h")
    (key,) = shared.keys(1)
    shared.store(tier, [key])
    later = tier._now() + HOUR + 1
    os.utime(shared.file(tier, key), (later, later))
    tier._now = lambda: later
    assert shared.load(tier, [key]) == [Outcome.MISSING]
    assert tier.exists([key]) == [False]


# Who may read it


def modes(path: Path) -> tuple[set[int], set[int]]:
    """Of all files, of all folders."""
    everything = [path, *path.rglob("*")]
    files = {stat.S_IMODE(found.stat().st_mode) for found in everything if found.is_file()}
    return files, {stat.S_IMODE(found.stat().st_mode) for found in everything if found.is_dir()}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_for_this_user_alone(shared: Any, umask: int) -> None:
    """KV reveals prompts."""
    before = os.umask(umask)
    try:
        tier = shared.engine(capacity=1 << 30)
        shared.store(tier, shared.keys(1))
        tier.maintain(60.0)
        tier.move_to("v2")
        shared.store(tier, shared.keys(1))
        assert modes(shared.path) == ({0o600}, {0o700})
    finally:
        os.umask(before)


def test_files_may_be_for_a_group(shared: Any) -> None:
    before = os.umask(0o077)
    try:
        tier = shared.engine(mode="0660", group=str(os.getgid()), capacity=1 << 30)
        shared.store(tier, shared.keys(1))
        tier.maintain(60.0)
        tier.move_to("v2")
        shared.store(tier, shared.keys(1))
        assert modes(shared.path) == ({0o660}, {0o2770})
        assert {path.stat().st_gid for path in shared.path.rglob("*")} == {os.getgid()}
    finally:
        os.umask(before)


def test_a_group_that_is_not_there(shared: Any) -> None:
    with pytest.raises(ConfigError, match="group: 'no-such-group' is no group"):
        shared.engine(group="no-such-group")


def test_a_path_that_is_a_file(shared: Any) -> None:
    shared.path.write_text("mine")
    with pytest.raises(ConfigError, match="can't be used"):
        shared.engine()
    assert shared.path.read_text() == "mine"


# The rest


def test_usage_is_what_this_engine_has_put_there(shared: Any) -> None:
    one, two = shared.engine(), shared.engine()
    shared.store(one, shared.keys(1, 2, 3))
    shared.store(two, shared.keys(3, 4))
    assert one.usage() == Usage(3, 3 * one.footprint(shared.chunk), None)
    assert two.usage() == Usage(1, one.footprint(shared.chunk), None)
    one.delete(shared.keys(1))
    assert one.usage().chunks == 2


def test_of_a_batch_only_what_is_missing_is_written(shared: Any) -> None:
    """kvcache-ai/Mooncake#1374: all are reported as stored, and those that were there are as they were."""
    one, two = shared.engine(), shared.engine()
    keys = shared.keys(*range(8))
    shared.store(one, keys[:3])
    before = [shared.file(one, key).stat().st_ino for key in keys[:3]]
    assert shared.store(two, keys) == [Outcome.OK] * 8
    assert two.usage().chunks == 5
    assert [shared.file(one, key).stat().st_ino for key in keys[:3]] == before
    assert shared.load(one, keys) == [Outcome.OK] * 8


def test_long_keys_have_short_names(shared: Any) -> None:
    """Some file systems take no more than 143 characters."""
    tier = shared.engine()
    keys = [bytes([number]) * number for number in (1, 64, 65, 255)]
    assert shared.store(tier, keys) == [Outcome.OK] * 4
    assert max(len(file.name) for file in shared.files) <= 143
    assert {entry.key for entry in tier.entries()} == set(keys)
    assert shared.store(tier, [b"", bytes(256)]) == [Outcome.REFUSED] * 2


def test_a_fork_can_not_use_it(shared: Any) -> None:
    tier = shared.engine()
    tier._calls._pid += 1
    with pytest.raises(ProtocolError, match="after a fork"):
        tier.exists(shared.keys(1))
    tier.close()
    assert len(shared.writers) == 1
    tier._calls._pid -= 1


def test_entries_end_when_the_tier_is_closed(shared: Any) -> None:
    tier = shared.engine()
    shared.store(tier, shared.keys(*range(8)), 4096)
    listed = tier.entries()
    next(listed)
    tier.close()
    with pytest.raises(ClosedError):
        list(listed)


def test_the_payload_is_written_after_its_envelope(shared: Any) -> None:
    """The stored format, byte by byte."""
    tier = shared.engine()
    (key,) = shared.keys(1)
    tier._now = lambda: 1.5
    shared.store(tier, [key], 5000)
    stored = shared.file(tier, key).read_bytes()
    payload = bytes_for(key, 5000)
    sequence = int.from_bytes(stored[48:56], "little")
    envelope = Envelope(tier._era.stamp, key, 5000, 1.5, sequence, checksum(memoryview(payload)))
    assert stored == pack(envelope, BLOCK) + payload + bytes(8192 - 5000)
