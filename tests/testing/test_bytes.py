"""Bytes from keys: what makes a crossed, shifted or stale chunk show."""

import subprocess
import sys

import pytest

from kvcascade.testing import UNWRITTEN, buffer, bytes_for, holds, key_for

KEY = key_for(1)


def test_keys_look_as_an_engine_makes_them() -> None:
    assert len(key_for(7)) == 36
    assert key_for(7, group=3)[-4:] == (3).to_bytes(4, "big")
    assert len({key_for(number, group) for number in range(1000) for group in range(2)}) == 2000


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4096, 4097])
def test_a_shorter_chunk_begins_as_a_longer_one(nbytes: int) -> None:
    assert len(bytes_for(KEY, nbytes)) == nbytes
    assert bytes_for(KEY, 8192).startswith(bytes_for(KEY, nbytes))


def test_each_word_depends_on_key_place_and_epoch() -> None:
    words = {
        chunk[at : at + 8]
        for chunk in (bytes_for(KEY, 4096), bytes_for(key_for(2), 4096), bytes_for(KEY, 4096, "v2"))
        for at in range(0, 4096, 8)
    }
    assert len(words) == 3 * 4096 // 8


def test_they_are_the_same_in_every_process() -> None:
    code = "from kvcascade.testing import *; print(bytes_for(key_for(1), 20, 'e').hex())"
    other = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "5"}, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == bytes_for(KEY, 20, "e").hex()


@pytest.mark.parametrize("nbytes", [1, 8, 13, 4097])
def test_holds_sees_one_wrong_byte(nbytes: int) -> None:
    view = buffer(nbytes)
    assert not holds(view, KEY)
    view[:] = bytes_for(KEY, nbytes)
    assert holds(view, KEY)
    assert not holds(view, key_for(2))
    assert not holds(view, KEY, "v2")
    for place in (0, nbytes // 2, nbytes - 1):
        view[place] ^= 1
        assert not holds(view, KEY)
        view[place] ^= 1


def test_a_buffer_is_writable_and_marked_as_unwritten() -> None:
    view = buffer(5000)
    assert len(view) == 5000
    assert set(view) == {UNWRITTEN}
    view[4999] = 1
    assert len(buffer(0)) == 0
