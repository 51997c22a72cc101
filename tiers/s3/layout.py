"""How objects are named.

    PREFIX/NAMESPACE/namespace.json       what the digest NAMESPACE stands for
    PREFIX/NAMESPACE/epochs/NAME/N        generations of named epochs; the highest number counts
    PREFIX/NAMESPACE/STAMP/epoch.json     which epoch the digest STAMP stands for
    PREFIX/NAMESPACE/STAMP/FAN/CHUNK      chunks of one epoch: NAMESPACE and STAMP are 32 hexadecimal digits, CHUNK
                                          is the key in hexadecimal, FAN its first two digits

Whatever else lies there is foreign, and never touched. A chunk is an envelope of `ENVELOPE` bytes, then the
payload; what the envelope says stands in the object's metadata, too, for people and their tools.
"""

import hashlib
import re
from typing import NamedTuple

from kvcascade.tiers.envelope import FORMAT, Envelope
from kvcascade.types import Key

__all__ = ["ENVELOPE", "WRITTEN", "Home", "epoch_description", "is_chunk", "key_in", "metadata", "place"]

ENVELOPE = 512
"""Bytes in front of a payload."""
LONGEST_KEY = 64
"""Bytes. Names of longer keys are hashes: stores on file systems take no longer parts of names."""
WRITTEN = "x-amz-meta-kv-written"

_CHUNK = re.compile(r"(?:[0-9a-f]{2}){1,64}|x[0-9a-f]{64}")


class Home(NamedTuple):
    """Where everything of one namespace lies."""

    path: str
    """What the names of its objects begin with, a slash at the end."""

    @classmethod
    def of(cls, prefix: str, digest: str) -> "Home":
        return cls(f"{prefix}/{digest}/" if prefix else f"{digest}/")

    @property
    def description(self) -> str:
        return f"{self.path}namespace.json"

    def marks(self, weights: str) -> str:
        """What the marks of the epochs of one name begin with."""
        return f"{self.path}epochs/{hashlib.sha256(weights.encode()).hexdigest()[:32]}/"

    def epoch(self, stamp: bytes) -> str:
        """What the names of the chunks of an epoch begin with."""
        return f"{self.path}{stamp.hex()}/"


def epoch_description(epoch: str) -> str:
    """The object that says which epoch it is, whose chunks' names begin with `epoch`."""
    return f"{epoch}epoch.json"


def place(epoch: str, key: Key) -> str:
    """The name of a chunk of an epoch."""
    if len(key) <= LONGEST_KEY:
        name = key.hex()
        return f"{epoch}{name[:2]}/{name}"
    digest = hashlib.sha256(key).hexdigest()
    return f"{epoch}{digest[:2]}/x{digest}"


def is_chunk(name: str) -> bool:
    """Whether an object has the name of a chunk, whichever."""
    fan, _, chunk = name.rpartition("/")
    return bool(_CHUNK.fullmatch(chunk)) and fan.endswith("/" + chunk.removeprefix("x")[:2])


def key_in(name: str) -> Key | None:
    """The key of a chunk, as far as its name says it."""
    chunk = name.rpartition("/")[2]
    return None if chunk.startswith("x") else bytes.fromhex(chunk)


def metadata(envelope: Envelope) -> tuple[tuple[str, str], ...]:
    """What an envelope says, as an object's metadata."""
    facts = {
        "format": FORMAT,
        "key": envelope.key.hex(),
        "bytes": envelope.nbytes,
        "written": f"{envelope.written:.6f}",
        "sequence": envelope.sequence,
        "xxh3": f"{envelope.checksum:016x}",
        "stamp": envelope.stamp.hex(),
    }
    return tuple((f"x-amz-meta-kv-{name}", str(value)) for name, value in facts.items())
