import pytest

from kvcascade.replay.content import Content, WrongBytesError, key_of


def filled(content, key, nbytes):
    slot = memoryview(bytearray(nbytes))
    content.write(key, slot)
    return slot


def test_keys_are_an_engines_hash_and_the_group():
    keys = {key_of(number) for number in range(100)}
    assert len(keys) == 100
    assert all(len(key) == 36 and key.endswith(bytes(4)) for key in keys)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 4096, 65536, 65539])
def test_what_was_written_is_right_also_in_another_process(nbytes):
    key = key_of(1)
    Content().check(key, filled(Content(), key, nbytes))


def test_every_word_depends_on_key_and_position():
    one, other = (filled(Content(), key_of(number), 4096).cast("Q").tolist() for number in (1, 2))
    assert len(set(one) | set(other)) == 2 * 512


@pytest.mark.parametrize("place", [0, 1234, 65535])
def test_one_wrong_byte_is_found_and_said(place):
    content = Content()
    slot = filled(content, key_of(1), 65536)
    slot[place] ^= 1
    with pytest.raises(
        WrongBytesError, match=rf"{key_of(1).hex()}: 1 of 65,536 bytes are wrong, .* offset {place}:"
    ):
        content.check(key_of(1), slot)


def test_another_keys_chunk_and_a_moved_one_are_wrong():
    content = Content()
    slot = filled(content, key_of(1), 4096)
    moved = memoryview(bytes(slot[8:]) + bytes(slot[:8]))
    for key, buffer in [(key_of(2), slot), (key_of(1), moved)]:
        with pytest.raises(WrongBytesError):
            content.check(key, buffer)
