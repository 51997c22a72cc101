"""What a header says, and what it does not let pass."""

import pytest

from kvcascade.testing import bytes_for, key_for
from kvcascade.tiers.envelope import FORMAT, HEADER_BYTES, Envelope, Flaw, checksum, flaw_of, pack, parse
from kvcascade.types import Namespace

STAMP = Namespace.of(model="m").stamp("mark")
KEY = key_for(1)
PAYLOAD = memoryview(bytes_for(KEY, 5000))


def envelope(key: bytes = KEY) -> Envelope:
    return Envelope(STAMP, key, len(PAYLOAD), 1_700_000_000.25, 7, checksum(PAYLOAD))


@pytest.mark.parametrize("block", [512, 1024, 4096])
def test_what_is_packed_is_parsed(block: int) -> None:
    packed = pack(envelope(), block)
    assert len(packed) == block
    assert parse(packed) == envelope()
    assert flaw_of(packed, PAYLOAD, STAMP, KEY) is None


@pytest.mark.parametrize("key", [b"a", b"\0", b"\0\xff\0", b"k" * 255])
def test_keys_of_any_length_and_content(key: bytes) -> None:
    parsed = parse(pack(envelope(key)))
    assert isinstance(parsed, Envelope)
    assert parsed.key == key


def test_the_header_fits_into_the_smallest_block() -> None:
    assert HEADER_BYTES <= 512


def test_a_changed_bit_anywhere_in_the_header_is_seen() -> None:
    packed = pack(envelope())
    for place in range(HEADER_BYTES * 8):
        damaged = bytearray(packed)
        damaged[place // 8] ^= 1 << place % 8
        assert flaw_of(bytes(damaged), PAYLOAD, STAMP, KEY) is not None, f"bit {place}"


def test_a_changed_bit_in_the_payload_is_seen() -> None:
    """vllm-project/vllm#54363: right length, wrong bytes."""
    for place in (0, 1, 2500, len(PAYLOAD) - 1):
        damaged = bytearray(PAYLOAD)
        damaged[place] ^= 0x10
        assert flaw_of(pack(envelope()), memoryview(damaged), STAMP, KEY) is Flaw.PAYLOAD_DAMAGED


def test_another_chunk_is_seen() -> None:
    """Whole and right, but not what was asked for (vllm-project/vllm#49261)."""
    packed = pack(envelope())
    assert flaw_of(packed, PAYLOAD, STAMP, key_for(2)) is Flaw.OTHER_KEY
    assert flaw_of(packed, PAYLOAD[:-1], STAMP, KEY) is Flaw.OTHER_LENGTH
    assert flaw_of(packed, PAYLOAD, Namespace.of(model="m").stamp("later"), KEY) is Flaw.OTHER_NAMESPACE
    assert flaw_of(packed, PAYLOAD, Namespace.of(model="n").stamp("mark"), KEY) is Flaw.OTHER_NAMESPACE


@pytest.mark.parametrize(
    ("version", "flaw"),
    [(FORMAT - 1, Flaw.OLDER_FORMAT), (FORMAT + 1, Flaw.NEWER_FORMAT), (65535, Flaw.NEWER_FORMAT)],
)
def test_another_format_is_told_apart(version: int, flaw: Flaw) -> None:
    packed = bytearray(pack(envelope()))
    packed[8:10] = version.to_bytes(2, "little")
    assert parse(bytes(packed)) is flaw


@pytest.mark.parametrize("block", [b"", b"\0" * 512, b"KVCASC", b"\xff" * 4096])
def test_what_is_no_envelope(block: bytes) -> None:
    assert parse(block) is Flaw.NO_ENVELOPE


def test_the_layout_is_the_same_on_every_machine() -> None:
    packed = pack(Envelope(bytes(range(16)), b"key", 3, 1.5, 258, 0x0102030405060708))
    assert packed[:16].hex() == "4b56434153430d0a0100030000000000"
    assert packed[16:32] == bytes(range(16))
    assert packed[32:40] == (3).to_bytes(8, "little")
    assert packed[40:48].hex() == "000000000000f83f"
    assert packed[48:56] == (258).to_bytes(8, "little")
    assert packed[56:64] == (0x0102030405060708).to_bytes(8, "little")
    assert packed[64:68] == b"key\0"
