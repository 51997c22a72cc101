"""Engines among each other: temporaries, the sweeper and its lease, a directory for one alone."""

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcascade.errors import ConfigError, TierUnavailable
from kvcascade.testing import key_for
from kvcascade.tiers.fs import lease, survey, sweeper, writers
from kvcascade.tiers.fs.layout import Access, server_time
from kvcascade.tiers.fs.lease import EXPIRES, RENEW_EVERY, Lease
from kvcascade.tiers.fs.writers import STALE, Identity, Writer, living
from kvcascade.types import Changes, Outcome, Usage

ELSEWHERE = Identity("far", "0123456789ab", 7, 1234, "", False, "aaaa0000")


def ended_here() -> Identity:
    """A process of this host that has ended."""
    pid = int(subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True).stdout)
    return Identity.new("", exclusive=False)._replace(pid=pid, token="bbbb0000")


def lived_here() -> Identity:
    """An earlier process that had the number of this one."""
    me = Identity.new("", exclusive=False)
    return me._replace(started=me.started - 1, token="cccc0000")


def leave_behind(root: Path, identity: Identity, age: float = 0.0) -> Path:
    """The folder of a writer, with a temporary in it, both last touched `age` seconds ago."""
    writer = Writer(root, identity, Access())
    writer.enter()
    temporary = Path(writer.temporary())
    temporary.write_bytes(b"half")
    for path in (temporary, writer.folder):
        past = path.stat().st_mtime - age
        os.utime(path, (past, past))
    return temporary


# Temporaries


@pytest.mark.parametrize("dead", [ended_here, lived_here])
def test_temporaries_of_dead_local_processes_go_at_start(shared: Any, dead: Any) -> None:
    """LMCache/LMCache#2517: a rule that can't hit a live writer, though numbers of processes are used again."""
    temporary = leave_behind(shared.path, dead())
    shared.engine()
    assert not temporary.parent.exists()


def test_temporaries_of_living_processes_stay(shared: Any) -> None:
    me = leave_behind(shared.path, Identity.new("", exclusive=False), age=2 * STALE)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        other = Identity.new("", False)._replace(pid=process.pid, started=writers._started(process.pid))
        theirs = leave_behind(shared.path, other, age=2 * STALE)
        shared.engine()
        assert me.exists()
        assert theirs.exists()
        process.kill()
        process.wait()
    shared.engine()
    assert me.exists()
    assert not theirs.parent.exists()


def test_a_killed_process_that_nobody_waits_for_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        identity = Identity.new("", False)._replace(pid=process.pid, started=writers._started(process.pid))
        assert identity.lives
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert identity.lives is False


def test_temporaries_of_other_hosts_go_by_their_age(shared: Any) -> None:
    old = leave_behind(shared.path, ELSEWHERE, age=STALE + 60)
    young = leave_behind(shared.path, ELSEWHERE._replace(token="dddd0000"), age=STALE - 60)
    shared.engine()
    assert not old.parent.exists()
    assert young.exists()


def test_an_age_is_measured_on_the_servers_clock(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    young = leave_behind(shared.path, ELSEWHERE)
    monkeypatch.setattr("time.time", lambda: 4e9)
    shared.engine()
    assert young.exists()


def test_an_engine_shows_that_it_lives(shared: Any) -> None:
    tier = shared.engine()
    folder = tier._opened.writer.folder
    os.utime(folder, (1, 1))
    tier.maintain(0.0)
    assert folder.stat().st_mtime == 1
    tier._beaten -= 60.0
    tier.maintain(0.0)
    assert folder.stat().st_mtime > 1
    shutil.rmtree(folder)  # taken for dead
    tier._beaten -= 60.0
    tier.maintain(0.0)
    assert tier._opened.writer.identity in living(shared.path, server_time(shared.path))


def test_what_is_no_writers_folder_is_left_alone(shared: Any) -> None:
    foreign = shared.path / ".kvcascade" / "writers" / "mine"
    foreign.mkdir(parents=True)
    shared.engine()
    assert foreign.exists()


# The lease


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lease_of(root: Path, token: str, clock: Clock) -> Lease:
    return Lease(root / "sweeper", Identity.new("", False)._replace(token=token), Access(), clock)


def test_one_holds_the_lease_until_it_gives_it_back(tmp_path: Path) -> None:
    clock = Clock()
    one, two = lease_of(tmp_path, "11111111", clock), lease_of(tmp_path, "22222222", clock)
    for _ in range(3):
        clock.now += RENEW_EVERY
        assert one.held(lambda: server_time(tmp_path))
        assert not two.held(lambda: server_time(tmp_path))
    one.release()
    clock.now += RENEW_EVERY
    assert two.held(lambda: server_time(tmp_path))
    clock.now += RENEW_EVERY
    assert not one.held(lambda: server_time(tmp_path))
    assert len(list((tmp_path / "sweeper").iterdir())) == 1


def test_a_lease_that_is_not_renewed_expires_on_the_servers_clock(tmp_path: Path) -> None:
    clock = Clock()
    one, two = lease_of(tmp_path, "11111111", clock), lease_of(tmp_path, "22222222", clock)
    assert one.held(lambda: server_time(tmp_path))
    assert not two.held(lambda: server_time(tmp_path) + EXPIRES - 1)
    clock.now += RENEW_EVERY
    assert two.held(lambda: server_time(tmp_path) + EXPIRES + 1)
    assert not one.held(lambda: server_time(tmp_path))  # it was stopped, and goes on


@pytest.mark.parametrize(("holder", "taken"), [(ended_here, True), (lived_here, True), (lambda: ELSEWHERE, False)])
def test_the_lease_of_a_dead_local_process_is_free(tmp_path: Path, holder: Any, taken: bool) -> None:
    clock = Clock()
    dead = Lease(tmp_path / "sweeper", holder(), Access(), clock)
    assert dead.held(lambda: server_time(tmp_path))
    assert lease_of(tmp_path, "11111111", clock).held(lambda: server_time(tmp_path)) is taken


def test_a_lease_without_a_name_is_taken(tmp_path: Path) -> None:
    """Its holder was killed, or is just about to write its name."""
    (tmp_path / "sweeper").mkdir()
    (tmp_path / "sweeper" / "4").touch()
    clock = Clock()
    mine = lease_of(tmp_path, "11111111", clock)
    assert not mine.held(lambda: server_time(tmp_path))
    clock.now += RENEW_EVERY
    assert mine.held(lambda: server_time(tmp_path) + EXPIRES + 1)
    assert [file.name for file in (tmp_path / "sweeper").iterdir()] == ["5"]


# The sweep


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look is always due, and so is asking the others."""
    for setting in ("EVERY", "REST", "TELL_EVERY", "TELL_REST"):
        monkeypatch.setattr(sweeper, setting, 0.0)
    monkeypatch.setattr(lease, "RENEW_EVERY", 0.0)


def aged(shared: Any, tier: Any, count: int, first: int = 0) -> list[bytes]:
    """Stores chunks, the first of them the least recently used."""
    keys = shared.keys(*range(first, first + count))
    assert shared.store(tier, keys) == [Outcome.OK] * count
    for age, key in enumerate(reversed(keys)):
        past = shared.file(tier, key).stat().st_mtime - 60 * age
        os.utime(shared.file(tier, key), (past, past))
    return keys


def crowded(shared: Any, count: int, chunks: int, **settings: Any) -> tuple[Any, list[bytes]]:
    """An engine that finds so many chunks of another one, where `chunks` have room; and their keys."""
    keys = aged(shared, shared.engine(), count)
    return shared.engine(capacity=chunks * (shared.chunk + 4096), **settings), keys


@pytest.mark.usefixtures("restless")
def test_a_sweep_evicts_what_was_used_the_longest_ago(shared: Any) -> None:
    """vllm-project/vllm#52784: from above the high mark down to the low one, of all namespaces and epochs."""
    tier, keys = crowded(shared, 19, 20)
    tier.maintain(60.0)
    assert tier.exists(keys) == [True] * 19
    tier.move_to("v2")
    more = aged(shared, shared.engine("v2"), 3, first=100)
    tier.maintain(60.0)
    assert len(shared.files) == 18
    assert tier.exists(more) == [True] * 3
    tier.maintain(60.0)
    assert len(shared.files) == 18
    assert tier._sweeper.evicted == 4


@pytest.mark.parametrize("held", [False, True])
def test_a_capacity_holds_at_the_pace_of_stores(shared: Any, held: bool) -> None:
    """vllm-project/vllm#52784: without any housekeeping in between, and from the first chunk on: by the engine
    that sweeps, and by one that can't, for which only refusing is left."""
    if held:
        shared.engine(capacity=20 * (shared.chunk + 4096)).maintain(60.0)
    tier = shared.engine(capacity=20 * (shared.chunk + 4096))
    keys = shared.keys(*range(200))
    outcomes = []
    for key in keys:
        outcomes += shared.store(tier, [key])
        assert len(shared.files) <= 22
    assert outcomes == [Outcome.OK] * 20 + [Outcome.REFUSED] * 180 if held else [Outcome.OK] * 200
    assert tier.exists(keys[-15:]) == [not held] * 15
    usage = tier.usage()
    assert abs(usage.bytes - usage.chunks * (shared.chunk + 4096)) <= shared.chunk + 4096
    assert abs(usage.chunks - len(shared.files)) <= 4
    assert usage.capacity == 20 * (shared.chunk + 4096)


def test_a_capacity_without_room_above_its_mark(shared: Any) -> None:
    """What is about to be written counts, so that eviction begins before the capacity is reached."""
    tier = shared.engine(capacity=20 * (shared.chunk + 4096), watermarks={"high": 1.0, "low": 0.9})
    assert shared.store(tier, shared.keys(*range(60))) == [Outcome.OK] * 60
    assert 16 <= len(shared.files) <= 22


def test_what_this_engine_uses_stays_longer(shared: Any) -> None:
    """Files are told of a use at most once an hour; the engine itself knows better."""
    tier = shared.engine(capacity=20 * (shared.chunk + 4096))
    keys = shared.keys(*range(10))
    shared.store(tier, keys)
    for number in range(100, 200):
        tier.touch([keys[1], keys[0]])
        assert shared.load(tier, keys[2:3]) == [Outcome.OK]
        shared.store(tier, shared.keys(number))
    assert tier.exists(keys) == [True] * 3 + [False] * 7


def test_what_was_evicted_is_told(shared: Any) -> None:
    tier = shared.engine(capacity=20 * (shared.chunk + 4096))
    keys = shared.keys(*range(40))
    shared.store(tier, keys)
    evicted = tier.maintain(60.0).evicted
    assert sorted(evicted) == sorted(key for key, there in zip(keys, tier.exists(keys), strict=True) if not there)
    assert tier.maintain(60.0) == Changes()


@pytest.mark.usefixtures("restless")
def test_engines_tell_each_other_how_full_it_is(shared: Any) -> None:
    """One that sweeps learns what the others write, also without a look; they learn what it makes of that."""
    file_bytes = shared.chunk + 4096
    one, two = (shared.engine(capacity=100 * file_bytes) for _ in range(2))
    three = shared.engine()
    one.maintain(60.0)
    one._sweeper._look_at = float("inf")
    shared.store(one, shared.keys(1, 2))
    shared.store(two, shared.keys(3))
    shared.store(three, shared.keys(4, 5))
    two.delete(shared.keys(1))
    for tier in (three, two, one, two):
        tier.maintain(60.0)
    assert [tier.usage().chunks for tier in (one, two)] == [4, 4]
    shared.store(two, shared.keys(6))
    assert [tier.usage().chunks for tier in (one, two)] == [4, 5]
    one.close()
    two.maintain(60.0)  # it takes over, and counts
    assert two.usage() == Usage(5, 5 * file_bytes, 100 * file_bytes)


@pytest.mark.usefixtures("restless")
def test_a_full_file_system_is_swept_all_the_same(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be written there, and so no other engine be told."""
    tier, _ = crowded(shared, 20, 10)
    tier.maintain(0.0)
    create = os.open

    def full(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", full)
    tier.maintain(60.0)
    assert len(shared.files) == 9


@pytest.mark.usefixtures("restless")
def test_what_is_used_during_a_sweep_stays(shared: Any) -> None:
    tier, keys = crowded(shared, 12, 10)
    delete = tier._sweeper._delete
    used = shared.file(tier, keys[1])

    def late(candidate: Any) -> bool:
        if candidate.path == str(used):
            os.utime(used)
        return bool(delete(candidate))

    tier._sweeper._delete = late
    tier.maintain(60.0)
    assert tier.exists(keys[:5]) == [False, True, False, False, True]


@pytest.mark.usefixtures("restless")
def test_a_sweep_goes_on_where_it_was(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`maintain` has little time, and the directory is large."""
    monkeypatch.setattr(survey, "SLICE", 1)
    monkeypatch.setattr(sweeper, "SLICE", 1)
    monkeypatch.setattr(sweeper, "EVERY", 1e9)
    tier, _ = crowded(shared, 20, 10)
    calls = 0
    while len(shared.files) > 9:
        tier.maintain(0.0)
        calls += 1
        assert calls < 1000
    assert calls > 20


@pytest.mark.usefixtures("restless")
def test_a_look_remembers_a_bounded_number_of_chunks(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When they are used up comes another look."""
    monkeypatch.setattr(survey, "CANDIDATES", 3)
    monkeypatch.setattr(sweeper, "EVERY", 1e9)
    tier, keys = crowded(shared, 20, 10)
    for left in (17, 14, 11, 9, 9):
        tier.maintain(60.0)
        assert len(shared.files) == left
    assert tier.exists(keys) == [False] * 11 + [True] * 9


@pytest.mark.usefixtures("restless")
def test_who_loses_the_lease_stops_sweeping_and_goes_on_reading(shared: Any) -> None:
    tier = shared.engine(capacity=10 * (shared.chunk + 4096))
    tier.maintain(60.0)
    keys = aged(shared, shared.engine(), 20)
    (held,) = (shared.path / ".kvcascade" / "sweeper").glob("[0-9]*")
    Path(held.with_name(str(int(held.name) + 1))).write_text(str(ELSEWHERE))
    tier.maintain(60.0)
    assert shared.load(tier, keys) == [Outcome.OK] * 20


@pytest.mark.usefixtures("restless")
def test_a_chunk_that_can_not_be_deleted(
    shared: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """sgl-project/sglang#31485: the next one goes in its place; said once."""
    tier, keys = crowded(shared, 12, 10)
    stuck = [shared.file(tier, key) for key in keys[:2]]
    unlink = os.unlink

    def refusing(path: Any, *args: Any, **named: Any) -> None:
        if Path(path) in stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, *args, **named)

    monkeypatch.setattr(os, "unlink", refusing)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tier.maintain(60.0)
        assert tier.exists(keys) == [True] * 2 + [False] * 3 + [True] * 7
        shared.store(shared.engine(), shared.keys(100, 101))
        for _ in range(3):
            tier.maintain(60.0)
    assert len(shared.files) == 9
    assert [record.message for record in caplog.records if "deleted" in record.message] == [
        f"{shared.path}: 2 chunks can't be deleted and are left where they are"
    ]
    (outcome,) = tier.delete(keys[:1])
    assert isinstance(outcome.cause, TierUnavailable)


def test_a_directory_in_which_nothing_can_be_deleted(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """sgl-project/sglang#31485: no endless loop. What has no room is refused, and what is there is read."""
    monkeypatch.setattr(sweeper, "STUCK", 5)
    tier, keys = crowded(shared, 20, 10)
    tried: list[Any] = []

    def refusing(path: Any, *args: Any, **named: Any) -> None:
        tried.append(path)
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", refusing)
        for _ in range(3):
            tier.maintain(60.0)
        assert shared.store(tier, shared.keys(100)) == [Outcome.REFUSED]
    assert len(tried) == 5
    assert shared.load(tier, keys) == [Outcome.OK] * 20


@pytest.mark.usefixtures("restless")
def test_a_sweep_removes_what_has_expired(shared: Any) -> None:
    keys = aged(shared, shared.engine(), 20)
    tier = shared.engine(ttl="630s")
    tier.maintain(60.0)
    assert tier.exists(keys) == [False] * 9 + [True] * 11
    assert len(shared.files) == 11


@pytest.mark.usefixtures("restless")
def test_foreign_files_are_never_touched(shared: Any) -> None:
    """LMCache/LMCache#1454."""
    other = shared.engine()
    keys = aged(shared, other, 3)
    other.close()
    tier = shared.engine(capacity=1)
    chunk = shared.file(tier, keys[0])
    epoch = chunk.parent.parent
    foreign = [
        shared.path / "mine",
        shared.path / ("0" * 32) / "00" / "0000",
        epoch / "mine",
        chunk.parent / "mine",
        chunk.parent / f"{chunk.name}.bak",
        chunk.parent / f".nfs{chunk.name}",
        tier._opened.home.path / "epochs" / "mine",
        shared.path / ".kvcascade" / "mine",
    ]
    for file in foreign:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    tier.maintain(60.0)
    assert shared.files == []
    tier.close()
    shared.settings().clear(None)
    assert [file.read_text() for file in foreign] == ["mine"] * len(foreign)


@pytest.mark.usefixtures("restless")
def test_a_medium_that_fails_is_swept_later(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, _ = crowded(shared, 12, 10)
    with monkeypatch.context() as broken:

        def fails(path: Any) -> Any:
            raise OSError(errno.EIO, "Input/output error")

        broken.setattr(os, "listdir", fails)
        broken.setattr(os, "scandir", fails)
        with pytest.raises(TierUnavailable):
            tier.maintain(60.0)
    tier.maintain(60.0)
    assert len(shared.files) == 9


@pytest.mark.usefixtures("restless")
def test_empty_folders_go(shared: Any) -> None:
    """A reset leaves an epoch's folder with 256 others in it."""
    other = shared.engine()
    aged(shared, other, 10)
    other.move_to("")
    tier = shared.engine(capacity=1)
    tier.maintain(60.0)
    tier.maintain(60.0)
    assert other._opened.home.epochs() == []
    assert shared.store(other, shared.keys(1)) == [Outcome.OK]


# A directory for one engine alone


def test_an_exclusive_directory_has_one_user(shared: Any) -> None:
    one = shared.engine(exclusive=True, capacity=1 << 20)
    for exclusive in (True, False):
        with pytest.raises(ConfigError, match=f"is used by process {os.getpid()} on .* for itself"):
            shared.engine(exclusive=exclusive, capacity=1 << 20)
    one.close()
    shared.engine()
    with pytest.raises(ConfigError, match="asks for it alone"):
        shared.engine(exclusive=True, capacity=1 << 20)
    assert len(shared.writers) == 1


def test_an_exclusive_directory_of_an_engine_on_another_host(shared: Any) -> None:
    """Whether that has ended can't be asked: it is waited for, and not for long."""
    temporary = leave_behind(shared.path, ELSEWHERE._replace(exclusive=True), age=writers.SILENT - 60)
    with pytest.raises(TierUnavailable, match="process 7 on far for itself, or was less than 180 s"):
        shared.engine()
    past = temporary.parent.stat().st_mtime - 120
    os.utime(temporary.parent, (past, past))
    shared.engine()
    assert temporary.exists()


@pytest.mark.parametrize("name", ["mine", "a~b~0~1~c~shared~d", "a~b~-1~1~c~shared~d", "a~b~1_0~1~c~shared~d"])
def test_names_that_are_no_writers(name: str) -> None:
    assert Identity.parse(name) is None
    assert Identity.parse(str(ELSEWHERE)) == ELSEWHERE


def test_an_exclusive_directory_that_shrinks(shared: Any) -> None:
    """LMCache/LMCache#1454: what is left of a killed engine is counted, used, and cut to the new capacity."""
    file_bytes = shared.chunk + 4096
    tier = shared.engine()
    keys = aged(shared, tier, 10)
    tier.close()
    foreign = shared.path / "mine"
    foreign.write_text("mine")
    damaged = shared.file(tier, shared.keys(100)[0])
    damaged.parent.mkdir(exist_ok=True)
    damaged.write_bytes(b"half")
    again = shared.engine(exclusive=True, capacity=6 * file_bytes)
    assert again.usage() == Usage(6, 6 * file_bytes, 6 * file_bytes)
    assert shared.load(again, keys) == [Outcome.MISSING] * 4 + [Outcome.OK] * 6
    assert shared.bytes == 6 * file_bytes
    assert foreign.read_text() == "mine"


def test_chunks_that_nobody_uses_any_more_make_room_first(shared: Any) -> None:
    file_bytes = shared.chunk + 4096
    tier = shared.engine(exclusive=True, capacity=6 * file_bytes)
    aged(shared, tier, 5)
    tier.move_to("v2")
    fresh = shared.keys(*range(100, 106))
    for number, key in enumerate(fresh, 1):
        assert shared.store(tier, [key]) == [Outcome.OK]
        assert tier.usage() == Usage(number, number * file_bytes, 6 * file_bytes)
        assert shared.bytes <= 6 * file_bytes
    assert shared.store(tier, [key_for(1)]) == [Outcome.REFUSED]
    tier.close()
    again = shared.engine("v2", exclusive=True, capacity=6 * file_bytes)
    assert shared.load(again, fresh) == [Outcome.OK] * 6


def test_leftovers_that_can_not_be_deleted_take_room(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file_bytes = shared.chunk + 4096
    tier = shared.engine(exclusive=True, capacity=6 * file_bytes)
    aged(shared, tier, 2)
    tier.move_to("v2")
    stuck = set(shared.files)
    unlink = os.unlink

    def refusing(path: Any, *args: Any, **named: Any) -> None:
        if Path(path) in stuck:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, *args, **named)

    monkeypatch.setattr(os, "unlink", refusing)
    outcomes = shared.store(tier, shared.keys(*range(100, 106)))
    assert outcomes == [Outcome.OK] * 4 + [Outcome.REFUSED] * 2
    assert shared.bytes == 6 * file_bytes
    assert tier.usage() == Usage(4, 4 * file_bytes, 4 * file_bytes)
