"""The envelope: what stands in front of every stored payload, so that a read can prove what it has read."""

import struct
from enum import Enum
from typing import NamedTuple

import xxhash

from kvcascade.types import MAX_KEY_BYTES, Buffer, Key

__all__ = ["FORMAT", "HEADER_BYTES", "Envelope", "Flaw", "checksum", "flaw_of", "pack", "parse"]

MAGIC = b"KVCASC\r\n"
FORMAT = 1
"""The version of the stored format. A tier reads its own, starts empty on an older one, refuses a newer one."""

# magic, format, key length, stamp, payload length, write time, sequence number, payload checksum, key; then the
# checksum of all that.
_FIELDS = struct.Struct(f"<8sHB5x16sQdQQ{MAX_KEY_BYTES}sx")
_CHECKSUM = struct.Struct("<Q")
_PREFIX = struct.Struct("<8sH")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class Flaw(Enum):
    """What is wrong with a stored chunk."""

    NO_ENVELOPE = "no envelope"
    OLDER_FORMAT = "older format"
    NEWER_FORMAT = "newer format"
    HEADER_DAMAGED = "header damaged"
    OTHER_NAMESPACE = "other namespace"
    OTHER_KEY = "other key"
    OTHER_LENGTH = "other length"
    PAYLOAD_DAMAGED = "payload damaged"


class Envelope(NamedTuple):
    """The fields of a header whose own checksum is right."""

    stamp: bytes
    """16 bytes: `Namespace.stamp` of the tier's mark at the time of the write."""
    key: Key
    nbytes: int
    """Payload bytes."""
    written: float
    """Unix time."""
    sequence: int
    """Grows with every write of a tier: of two copies of a key the higher one is the newer."""
    checksum: int
    """xxh3-64 of the payload."""


def checksum(payload: Buffer) -> int:
    """xxh3-64; the interpreter lock is released while it runs."""
    return xxhash.xxh3_64_intdigest(payload)


def pack(envelope: Envelope, block: int = 512) -> bytes:
    """The header of a chunk, padded with zeros to `block` bytes (at least `HEADER_BYTES`)."""
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT,
        len(envelope.key),
        envelope.stamp,
        envelope.nbytes,
        envelope.written,
        envelope.sequence,
        envelope.checksum,
        envelope.key,
    )
    return (fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))).ljust(block, b"\0")


def parse(block: Buffer | bytes) -> Envelope | Flaw:
    """The header at the start of `block`, or what is wrong with it."""
    if len(block) < HEADER_BYTES:
        return Flaw.NO_ENVELOPE
    magic, version = _PREFIX.unpack_from(block)
    if magic != MAGIC:
        return Flaw.NO_ENVELOPE
    if version != FORMAT:
        return Flaw.NEWER_FORMAT if version > FORMAT else Flaw.OLDER_FORMAT
    fields = bytes(block[: _FIELDS.size])
    if _CHECKSUM.unpack_from(block, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(fields):
        return Flaw.HEADER_DAMAGED
    _, _, key_bytes, stamp, nbytes, written, sequence, payload_checksum, key = _FIELDS.unpack(fields)
    return Envelope(stamp, key[:key_bytes], nbytes, written, sequence, payload_checksum)


def flaw_of(block: Buffer | bytes, payload: Buffer, stamp: bytes, key: Key) -> Flaw | None:
    """What keeps `block` and `payload` from being the chunk `key` of namespace and mark `stamp`; None where all
    is right, to the last byte."""
    envelope = parse(block)
    if isinstance(envelope, Flaw):
        return envelope
    if envelope.stamp != stamp:
        return Flaw.OTHER_NAMESPACE
    if envelope.key != key:
        return Flaw.OTHER_KEY
    if envelope.nbytes != len(payload):
        return Flaw.OTHER_LENGTH
    return None if checksum(payload) == envelope.checksum else Flaw.PAYLOAD_DAMAGED
