"""The index: transactions, readers that died, one environment a process."""

import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcascade.errors import ProtocolError, TierRefused, TierUnavailable
from kvcascade.testing import key_for
from kvcascade.tiers.disk.index import IndexDamaged, LmdbIndex, Location, Use
from kvcascade.tiers.disk.slabs import Slot

MIB = 1 << 20


def open_index(
    path: Path, map_bytes: int = 4 * MIB, limit_bytes: int = 4 * MIB, max_readers: int = 8
) -> LmdbIndex:
    return LmdbIndex.for_writing(path, map_bytes, limit_bytes, max_readers, sync=False, metasync=False)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[LmdbIndex]:
    opened = open_index(tmp_path / "index.lmdb")
    yield opened
    opened.close()


def at(number: int) -> Location:
    return Location(Slot(number // 100, number % 100), 4096 + number, 1000 + number, 1_700_000_000.5 + number)


def test_what_is_added_is_found(index: LmdbIndex) -> None:
    added = [(key_for(number), at(number)) for number in range(300)]
    assert index.commit([], added) == [True] * 300
    assert index.lookup([key for key, _ in added]) == [location for _, location in added]
    assert index.contains([key_for(1), key_for(999)]) == [True, False]
    assert {row.key: row.location for row in index.rows()} == dict(added)


def test_a_key_that_is_there_keeps_its_location(index: LmdbIndex) -> None:
    index.commit([], [(b"k", at(1))])
    assert index.commit([], [(b"k", at(2)), (b"l", at(3))]) == [False, True]
    assert index.lookup([b"k", b"l"]) == [at(1), at(3)]
    assert index.commit([b"k", b"absent"], [(b"k", at(4))]) == [True]
    assert index.lookup([b"k"]) == [at(4)]


def test_a_key_that_no_index_can_hold_is_not_there(index: LmdbIndex) -> None:
    """LMDB raises for empty keys and long ones (jnwatson/py-lmdb#39)."""
    assert index.lookup([b"", b"x" * 600, b"x" * 255]) == [None] * 3
    assert index.contains([b"", b"x" * 600]) == [False] * 2


def test_a_full_map_changes_nothing(tmp_path: Path) -> None:
    """A batch is one transaction (jnwatson/py-lmdb#269)."""
    index = open_index(tmp_path / "index.lmdb", map_bytes=128 << 10)
    index.commit([], [(key_for(number), at(number)) for number in range(100)])
    with pytest.raises(TierRefused, match="no room"):
        index.commit([key_for(1)], [(key_for(number), at(number)) for number in range(200, 5000)])
    assert len(list(index.rows())) == 100
    assert index.lookup([key_for(1), key_for(200)]) == [at(1), None]
    assert index.commit([key_for(1)], [(key_for(300), at(300))]) == [True]
    index.close()


def test_above_the_limit_only_removing_works(tmp_path: Path) -> None:
    index = open_index(tmp_path / "index.lmdb", limit_bytes=64 << 10)
    stored = 0
    with pytest.raises(TierRefused, match="longer than 64 bytes"):
        while True:
            index.commit([], [(key_for(stored), at(stored))])
            stored += 1
    assert 300 < stored < 2000
    for number in range(stored):
        index.commit([key_for(number)], [])
    assert list(index.rows()) == []
    index.close()


def test_recency_belongs_to_the_write_that_has_the_slot(index: LmdbIndex) -> None:
    index.commit([], [(b"k", at(1))])
    index.note_used({b"k": Use(2e9, 7), b"absent": Use(3e9, 7), b"": Use(3e9, 7)})
    assert [row.used for row in index.rows()] == [2e9]
    later = Location(at(1).slot, 4096, 5000, 1.9e9)
    index.commit([b"k"], [(b"k", later)])
    assert [row.used for row in index.rows()] == [1.9e9]
    index.note_used({b"k": Use(2.1e9, 0)})
    assert index.columns()[3] == [Use(2.1e9, 1)], "the uses of the chunk that was there before do not count"


def test_uses_stay_where_only_the_time_is_noted(index: LmdbIndex) -> None:
    index.commit([], [(b"k", at(1))])
    assert [use.uses for use in index.columns()[3]] == [1]
    index.note_used({b"k": Use(2e9, 255)})
    index.note_used({b"k": Use(2.1e9, 0)})
    assert index.columns()[3] == [Use(2.1e9, 255)]


def test_a_recency_without_a_count_is_of_a_chunk_used_once(index: LmdbIndex) -> None:
    """Earlier versions wrote 16 bytes."""
    index.commit([], [(b"k", at(1)), (b"l", at(2))])
    with index._writing() as transaction:
        for number in (1, 2):
            place = struct.pack(">II", *at(number).slot)
            transaction.put(place, struct.pack("<Qd", at(number).sequence, 2e9), db=index._recency)
    index.note_used({b"l": Use(2.1e9, 3)})
    assert index.columns()[3] == [Use(2e9, 1), Use(2.1e9, 3)]
    assert [row.used for row in index.rows()] == [2e9, 2.1e9]
    index.note_used({b"k": Use(2.2e9, 0)})
    assert index.columns()[3] == [Use(2.2e9, 1), Use(2.1e9, 3)]


def test_a_reset_leaves_nothing_but_the_new_mark(index: LmdbIndex) -> None:
    assert index.mark() == ""
    index.commit([], [(b"k", at(1))])
    index.note_used({b"k": Use(2e9, 2)})
    index.reset("mark")
    assert index.mark() == "mark"
    assert list(index.rows()) == []


def test_an_open_index_is_found_again_and_not_opened_twice(index: LmdbIndex, tmp_path: Path) -> None:
    """Twice in one process corrupts, also through a link (jnwatson/py-lmdb#129)."""
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    alias = tmp_path / "link" / "index.lmdb"
    assert LmdbIndex.opened_here(alias) is index
    with pytest.raises(TierUnavailable, match="already open"):
        open_index(alias)
    index.commit([], [(b"k", at(1))])
    index.close()
    assert LmdbIndex.opened_here(alias) is None
    again = open_index(alias)
    assert again.lookup([b"k"]) == [at(1)]
    again.close()


def test_what_is_no_index_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "index.lmdb").write_bytes(b"no index" * 10_000)
    with pytest.raises(IndexDamaged):
        open_index(tmp_path / "index.lmdb")
    with pytest.raises(TierUnavailable):
        open_index(tmp_path / "nowhere" / "index.lmdb")


HOLD_READERS = """
import lmdb, signal, sys
environment = lmdb.open(sys.argv[1], subdir=False, max_dbs=3, readonly=True)
held = [environment.begin() for _ in range(3)]
print("held", flush=True)
signal.pause()
"""

COUNT = """
import sys
from pathlib import Path
from kvcascade.tiers.disk.index import LmdbIndex
index = LmdbIndex.for_reading(Path(sys.argv[1]))
print(len(list(index.rows())))
index.close()
"""


def test_readers_that_were_killed_give_their_places_back(tmp_path: Path) -> None:
    """The table is full of the dead: looked through once, then it works (frappe/mail#559)."""
    index = open_index(tmp_path / "index.lmdb", max_readers=4)
    index.commit([], [(b"k", at(1))])
    script = [sys.executable, "-c", HOLD_READERS, str(index.path)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert child.stdout.readline() == "held\n"
        child.kill()
    together = threading.Barrier(4)
    found: list[object] = []

    def reader() -> None:
        with index._reading() as transaction:
            together.wait(60)
            found.append(transaction.get(b"k", db=index._entries))
            together.wait(60)

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [at(1).pack()] * 4
    index.close()


def test_a_reader_in_another_process_sees_commits(index: LmdbIndex) -> None:
    script = [sys.executable, "-c", COUNT, str(index.path)]
    index.commit([], [(b"k", at(1))])
    assert subprocess.run(script, check=True, capture_output=True, text=True).stdout == "1\n"
    index.commit([], [(b"l", at(2))])
    assert subprocess.run(script, check=True, capture_output=True, text=True).stdout == "2\n"


def test_a_fork_is_refused(index: LmdbIndex) -> None:
    """It could read without an error (jnwatson/py-lmdb#346)."""
    index.commit([], [(b"k", at(1))])
    child = os.fork()
    if not child:
        code = 1
        try:
            assert LmdbIndex.opened_here(index.path) is None
            index.lookup([b"k"])
        except ProtocolError:
            index.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert index.lookup([b"k"]) == [at(1)]
    assert index.commit([], [(b"l", at(2))]) == [True]
