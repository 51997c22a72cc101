"""The archive of chunks: what is read is what was written, however it is damaged."""

import io
import json
import struct
from collections.abc import Sequence

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcascade.errors import ConfigError, TierRefused
from kvcascade.testing import bytes_for, holds, key_for
from kvcascade.tiers.archive import ArchivedChunk, ArchiveReader, ArchiveWriter, Damage, Section
from kvcascade.types import Namespace

A = Section(Namespace.of(model="a", tenant=""), "", 3, 600, 300)
B = Section(Namespace.of(model="b"), "v1", 4, 1000, 400)
SIZES = {A: [100, 200, 300], B: [1, 199, 400, 400]}
CONTENT = [
    (section, key_for(n, group=nbytes), nbytes) for section in SIZES for n, nbytes in enumerate(SIZES[section])
]


def archive() -> tuple[bytes, list[int]]:
    """An archive of all of `CONTENT`, and where in it each chunk ends."""
    file, ends = io.BytesIO(), []
    writer = ArchiveWriter(file, "test")
    for section in SIZES:
        writer.begin(section)
        for of, key, nbytes in CONTENT:
            if of is section:
                writer.add(key, memoryview(bytes_for(key, nbytes)), 1e9 + nbytes, 7)
                ends.append(file.tell())
    writer.end()
    assert (writer.chunks, writer.bytes) == (7, 1600)
    return file.getvalue(), ends


WHOLE, ENDS = archive()


def read(raw: bytes) -> tuple[list[tuple[Section, ArchivedChunk]], list[Damage], Exception | None]:
    """What is taken, what is damaged, and what ended it."""
    taken: list[tuple[Section, ArchivedChunk]] = []
    damaged: list[Damage] = []
    try:
        for section, thing in ArchiveReader(io.BytesIO(raw)):
            if isinstance(thing, Damage):
                damaged.append(thing)
            else:
                taken.append((section, thing))
    except (ConfigError, TierRefused) as error:
        return taken, damaged, error
    return taken, damaged, None


def check(taken: Sequence[tuple[Section, ArchivedChunk]]) -> list[tuple[Section, bytes, int]]:
    """Whatever was taken is right; returns what it is."""
    assert all(holds(chunk.payload, chunk.key) for _, chunk in taken)
    found = [(section, chunk.key, len(chunk.payload)) for section, chunk in taken]
    assert all(one in CONTENT for one in found)
    return found


def test_what_is_read_is_what_was_written() -> None:
    taken, damaged, error = read(WHOLE)
    assert (damaged, error) == ([], None)
    assert check(taken) == CONTENT
    assert [chunk.written for _, chunk in taken] == [1e9 + nbytes for _, _, nbytes in CONTENT]


def test_an_archive_may_be_empty() -> None:
    file = io.BytesIO()
    ArchiveWriter(file, "test").end()
    assert read(file.getvalue()) == ([], [], None)


@given(st.integers(0, len(WHOLE) - 1))
@settings(max_examples=300, deadline=None)
@example(0)
@example(len(WHOLE) - 1)
def test_what_comes_before_a_cut_is_taken(cut: int) -> None:
    taken, damaged, error = read(WHOLE[:cut])
    assert damaged == []
    assert check(taken) == CONTENT[: len(taken)]
    assert isinstance(error, TierRefused if cut >= 8 else ConfigError)
    assert len(taken) == sum(end <= cut for end in ENDS)


@given(st.integers(0, len(WHOLE) * 8 - 1))
@settings(max_examples=500, deadline=None)
@example(8 * 8 + 1)
def test_a_changed_bit_costs_a_chunk_or_is_said(bit: int) -> None:
    """Never wrong bytes, never a chunk of another namespace or key, never silence."""
    raw = bytearray(WHOLE)
    raw[bit // 8] ^= 1 << bit % 8
    taken, damaged, error = read(bytes(raw))
    found = check(taken)
    assert damaged or error is not None
    if error is None:
        assert len(damaged) == 1
        assert len(found) == len(CONTENT) - 1


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_pieces_that_are_lost_or_doubled_do_no_harm(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(WHOLE)))
    end = data.draw(st.integers(start, len(WHOLE)))
    again = data.draw(st.booleans())
    raw = WHOLE[:end] + WHOLE[start:] if again else WHOLE[:start] + WHOLE[end:]
    taken, _, _ = read(raw)
    check(taken)


def test_a_chunk_is_of_the_section_that_it_stands_in() -> None:
    """The same chunk, put behind another namespace."""
    file = io.BytesIO()
    writer = ArchiveWriter(file, "test")
    writer.begin(A)
    key = key_for(1)
    writer.add(key, memoryview(bytes_for(key, 300)), 1e9, 7)
    middle = file.tell()
    start = file.getvalue().index(b"CHNK")
    record = file.getvalue()[start:middle]
    writer.begin(B)
    file.write(record)
    writer.end()
    taken, damaged, error = read(file.getvalue())
    assert [section for section, _ in taken] == [A]
    assert damaged == [Damage("other namespace")]
    assert error is None


def test_a_length_that_is_wrong_takes_no_memory() -> None:
    record = struct.pack("<4sQ", b"CHNK", 1 << 60)
    raw = WHOLE[: WHOLE.index(b"CHNK")] + record + struct.pack("<Q", xxhash.xxh3_64_intdigest(record)) + bytes(100)
    taken, damaged, error = read(raw)
    assert (taken, damaged) == ([], [])
    assert str(error) == "the archive is cut off"


@pytest.mark.parametrize("raw", [b"", b"KVCAR", b"PK\x03\x04" + bytes(100), bytes(4096)])
def test_what_is_no_archive(raw: bytes) -> None:
    _, _, error = read(raw)
    assert isinstance(error, ConfigError)
    assert str(error) == "the archive is no archive of KVCascade"


def test_a_newer_format_is_refused() -> None:
    body = json.dumps({"format": 2}).encode()
    record = struct.pack("<4sQ", b"HEAD", len(body) + 8)
    checks = [struct.pack("<Q", xxhash.xxh3_64_intdigest(part)) for part in (record, body)]
    _, _, error = read(b"KVCARCH\n" + record + checks[0] + body + checks[1])
    assert isinstance(error, ConfigError)
    assert "format 2, of a newer version" in str(error)
