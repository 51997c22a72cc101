"""A chunk as a value: its envelope, then its payload, under a name that says whose it is."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcascade.tiers.envelope import HEADER_BYTES, Envelope, checksum, flaw_of, pack
from kvcascade.types import Buffer, Key, Namespace

from .exchange import Request
from .replies import Reply, Stored, is_done
from .wire import Part, Wire, command

__all__ = ["Era", "Fetched", "Names", "client_name", "fetch", "store", "store_terms"]

LAYOUT = "v1"
"""A part of every name: versions that lay chunks out in another way never meet."""


def client_name(digest: str, who: str = "") -> str:
    """What a server shows of an engine's connections; `digest`: of its namespace."""
    return f"kvcascade:{digest}:{who}"


class Names:
    """The names of one namespace's keys: PREFIX:v1:NAMESPACE:..."""

    def __init__(self, prefix: str, digest: str) -> None:
        self.base = self.all_of(prefix) + f"{digest}:".encode()

    @staticmethod
    def all_of(prefix: str) -> bytes:
        """What the names of all namespaces begin with."""
        return f"{prefix}:{LAYOUT}:".encode()

    @classmethod
    def of(cls, prefix: str, namespace: Namespace) -> "Names":
        return cls(prefix, namespace.digest.hex())

    @property
    def description(self) -> bytes:
        """What the namespace stands for, as JSON."""
        return self.base + b"namespace"

    def engine(self, who: str) -> bytes:
        """The sign of life of an engine."""
        return self.base + b"engine:" + who.encode()

    def mark(self, name: bytes) -> bytes:
        """The mark of the weights whose name has this digest."""
        return self.base + b"epoch:" + name


class Era(NamedTuple):
    """What a tier is in between two moves to another epoch."""

    stamp: bytes
    base: bytes
    """What the names of its chunks begin with."""

    @classmethod
    def of(cls, names: Names, stamp: bytes) -> "Era":
        return cls(stamp, names.base + stamp.hex().encode() + b":")

    def name(self, key: Key) -> bytes:
        return self.base + key.hex().encode()


class Fetched(NamedTuple):
    """A request for a chunk, and where its envelope comes."""

    request: Request
    header: Buffer


def fetch(name: bytes, payload: Buffer, stamp: bytes, key: Key) -> Fetched:
    """Reads a chunk into `payload`, and verifies it at once, while it is in the processor's cache."""
    header = memoryview(bytearray(HEADER_BYTES))
    sent = b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name)

    def receive(wire: Wire) -> Reply:
        reply = wire.reply_into(header, payload)
        if isinstance(reply, Stored) and reply.in_place:
            return Stored(True, flaw_of(header, payload, stamp, key))
        return reply

    return Fetched(Request(name, lambda: [sent], receive, len(payload)), header)


def store_terms(ttl: float | None) -> bytes:
    """What follows a payload: only if the chunk is not there yet, and for how long."""
    words = [b"NX"] if ttl is None else [b"NX", b"PX", b"%d" % max(1, round(ttl * 1000))]
    return b"\r\n" + command(*words).partition(b"\n")[2]


def store(era: Era, key: Key, payload: Buffer, terms: bytes, now: Callable[[], float] = time.time) -> Request:
    """Writes a chunk that is not there yet; one that is there stays as it is. `terms`: see `store_terms`."""
    name = era.name(key)
    words = 3 + terms.count(b"$")

    def parts() -> Sequence[Part]:
        envelope = Envelope(era.stamp, key, len(payload), now(), time.time_ns(), checksum(payload))
        nbytes = HEADER_BYTES + len(payload)
        front = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (words, len(name), name, nbytes)
        return [front + pack(envelope, HEADER_BYTES), payload, terms]

    return Request(name, parts, weight=len(payload), expects=is_done)
