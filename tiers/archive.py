"""An archive of chunks in one file or pipe, which says what it holds.

    8 bytes      KVCARCH\\n
    HEAD         JSON: format, who wrote it and when
    SPCE         JSON: the fields of a namespace, the weights, how many chunks follow at most, their bytes
      CHNK ...   an envelope and the payload behind it, the most recently used chunk first
    SPCE ...
    DONE         JSON: how many chunks there are in all

Each record begins with its kind (4 bytes), the length of its body (8, little-endian), and a checksum of these two
(8, xxh3-64). A JSON body ends with its own checksum. So what is damaged in a body costs that record only.
"""

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import xxhash

from kvcascade.errors import ConfigError, TierRefused
from kvcascade.types import MAX_KEY_BYTES, Buffer, Key, Namespace

from .envelope import HEADER_BYTES, Envelope, checksum, flaw_of, pack, parse

__all__ = ["ArchiveReader", "ArchiveWriter", "ArchivedChunk", "Damage", "Section"]

MAGIC = b"KVCARCH\n"
FORMAT = 1
PIECE = 4 << 20
"""Bytes that are read at a time, so that a length that is wrong takes no memory."""

_RECORD = struct.Struct("<4sQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Section:
    """The chunks that follow, up to the next one, belong to this namespace and these weights."""

    namespace: Namespace
    weights: str
    """The `weights_version`, "" for none."""
    chunks: int
    """At most."""
    nbytes: int
    """Of their payloads."""
    largest: int
    """Payload bytes of the largest one."""

    @property
    def stamp(self) -> bytes:
        return self.namespace.stamp(f"archive {self.weights}")


class ArchivedChunk(NamedTuple):
    """A chunk whose bytes are right."""

    key: Key
    payload: Buffer
    written: float
    """Unix time of the first write."""


class Damage(NamedTuple):
    """A chunk whose bytes are not right; what follows it can be read."""

    what: str


class ArchiveWriter:
    """Writes an archive. All methods raise OSError where the file can't be written."""

    def __init__(self, file: BinaryIO, author: str) -> None:
        self._file = file
        self._section: Section | None = None
        self.chunks = 0
        self.bytes = 0
        """Of payloads."""
        file.write(MAGIC)
        self._json(b"HEAD", {"format": FORMAT, "author": author, "written": time.time()})

    def begin(self, section: Section) -> None:
        """What is added from here on belongs to this."""
        self._section = section
        sums = {"chunks": section.chunks, "bytes": section.nbytes, "largest": section.largest}
        self._json(b"SPCE", {"namespace": section.namespace.fields, "weights": section.weights, **sums})

    def add(self, key: Key, payload: Buffer, written: float, sequence: int) -> None:
        """A chunk whose payload was verified."""
        if self._section is None:
            raise ValueError("begin a section first")
        envelope = Envelope(self._section.stamp, key, len(payload), written, sequence, checksum(payload))
        self._begin_record(b"CHNK", HEADER_BYTES + len(payload))
        self._file.write(pack(envelope, HEADER_BYTES))
        self._file.write(payload)
        self.chunks += 1
        self.bytes += len(payload)

    def end(self) -> None:
        """Nothing follows. Without this an archive counts as cut off."""
        self._json(b"DONE", {"chunks": self.chunks, "bytes": self.bytes})

    def _json(self, kind: bytes, content: dict[str, Any]) -> None:
        body = json.dumps(content, ensure_ascii=False).encode()
        self._begin_record(kind, len(body) + _CHECKSUM.size)
        self._file.write(body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)))

    def _begin_record(self, kind: bytes, nbytes: int) -> None:
        record = _RECORD.pack(kind, nbytes)
        self._file.write(record + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(record)))


class ArchiveReader:
    """Reads an archive from its beginning, once, in bounded memory: each chunk with what it belongs to.

    Iterating raises:
        ConfigError: it is no archive, or one of a newer version.
        TierRefused: it ends too early, or is damaged so that what follows can't be read.
        OSError: the file can't be read.
    """

    def __init__(self, file: BinaryIO, name: str = "the archive") -> None:
        self._file = file
        self._name = name

    def __iter__(self) -> Iterator[tuple[Section, ArchivedChunk | Damage]]:
        self._check_head()
        section: Section | None = None
        while True:
            kind, nbytes = self._record()
            if kind == b"DONE":
                self._json(nbytes)
                return
            if kind == b"SPCE":
                section = _section(self._json(nbytes))
            elif kind == b"CHNK" and section is not None:
                yield section, self._chunk(nbytes, section)
            else:
                raise TierRefused(f"{self._name} is damaged, and what follows can't be read")

    def _check_head(self) -> None:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise ConfigError(f"{self._name} is no archive of KVCascade")
        kind, nbytes = self._record()
        head = self._json(nbytes)
        if kind != b"HEAD" or not isinstance(head.get("format"), int):
            raise TierRefused(f"{self._name} is damaged at its beginning")
        if head["format"] > FORMAT:
            raise ConfigError(
                f"{self._name} is in format {head['format']}, of a newer version; this one knows {FORMAT}"
            )

    def _record(self) -> tuple[bytes, int]:
        raw = self._read(_RECORD.size + _CHECKSUM.size)
        record = raw[: _RECORD.size]
        if _CHECKSUM.unpack_from(raw, _RECORD.size)[0] != xxhash.xxh3_64_intdigest(record):
            raise TierRefused(f"{self._name} is damaged, and what follows can't be read")
        kind, nbytes = _RECORD.unpack(record)
        return kind, nbytes

    def _json(self, nbytes: int) -> dict[str, Any]:
        raw = self._read(nbytes)
        body = raw[: -_CHECKSUM.size]
        if nbytes < _CHECKSUM.size or raw[len(body) :] != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)):
            raise TierRefused(f"{self._name} is damaged, and what follows can't be read")
        content = json.loads(bytes(body))
        return content if isinstance(content, dict) else {}

    def _chunk(self, nbytes: int, section: Section) -> ArchivedChunk | Damage:
        raw = self._read(nbytes)
        envelope = parse(raw)
        if not isinstance(envelope, Envelope):
            return Damage(envelope.value)
        payload = raw[HEADER_BYTES:]
        flaw = flaw_of(raw, payload, section.stamp, envelope.key)
        if flaw is not None or not 0 < len(envelope.key) <= MAX_KEY_BYTES:
            return Damage(flaw.value if flaw else "no key")
        return ArchivedChunk(envelope.key, payload, envelope.written)

    def _read(self, nbytes: int) -> Buffer:
        """Exactly `nbytes`."""
        read = bytearray()
        left = nbytes
        while left:
            piece = self._file.read(min(left, PIECE))
            if not piece:
                raise TierRefused(f"{self._name} is cut off")
            left -= len(piece)
            read += piece
        return memoryview(read)


def _section(content: dict[str, Any]) -> Section:
    try:
        namespace = Namespace(tuple((str(name), str(value)) for name, value in content["namespace"]))
        sums = [int(content[name]) for name in ("chunks", "bytes", "largest")]
        return Section(namespace, str(content["weights"]), *sums)
    except (KeyError, TypeError, ValueError) as error:
        raise TierRefused("the archive does not say what its chunks belong to") from error
