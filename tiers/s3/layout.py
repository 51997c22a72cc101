"""How objects are named.

    PREFIX/NAMESPACE/namespace.json       what the digest NAMESPACE stands for
    PREFIX/NAMESPACE/engines/STAMP/WHO    signs of life, of engines that are in an epoch
    PREFIX/NAMESPACE/epochs/NAME/N        generations of named epochs; the highest number counts
    PREFIX/NAMESPACE/epochs/NAME/N-CLAIM  while engines agree on who begins one
    PREFIX/NAMESPACE/epochs/STAMP.json    which epoch the digest STAMP stands for
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

__all__ = ["ENVELOPE", "WRITTEN", "Home", "is_chunk", "key_in", "metadata", "place", "stamp_in"]

ENVELOPE = 512
"""Bytes in front of a payload."""
LONGEST_KEY = 64
"""Bytes. Names of longer keys are hashes: stores on file systems take no longer parts of names."""
WRITTEN = "x-amz-meta-kv-written"

_DIGEST = r"[0-9a-f]{32}"
_CHUNK = r"[0-9a-f]{2}/(?:(?:[0-9a-f]{2}){1,64}|x[0-9a-f]{64})"
_STAMPED = re.compile(rf"(?:.*/)?({_DIGEST})/{_CHUNK}")
_OURS = re.compile(
    rf"namespace\.json|engines/{_DIGEST}/[^/]+~[^/]+|epochs/{_DIGEST}(?:\.json|/[0-9]+(?:-{_DIGEST})?)|{_DIGEST}/{_CHUNK}"
)


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

    @property
    def engines(self) -> str:
        """What the signs of life begin with."""
        return f"{self.path}engines/"

    @property
    def epochs(self) -> str:
        """What everything that is said of epochs begins with."""
        return f"{self.path}epochs/"

    def note(self, stamp: bytes) -> str:
        """The object that says which epoch it is."""
        return f"{self.epochs}{stamp.hex()}.json"

    def marks(self, weights: str) -> str:
        """What the marks of the epochs of one name begin with."""
        return f"{self.epochs}{hashlib.sha256(weights.encode()).hexdigest()[:32]}/"

    def owns(self, name: str) -> bool:
        """Whether an object in it is one of ours."""
        return bool(_OURS.fullmatch(name.removeprefix(self.path)))

    def epoch(self, stamp: bytes) -> str:
        """What the names of the chunks of an epoch begin with."""
        return f"{self.path}{stamp.hex()}/"


def place(epoch: str, key: Key) -> str:
    """The name of a chunk of an epoch."""
    if len(key) <= LONGEST_KEY:
        name = key.hex()
        return f"{epoch}{name[:2]}/{name}"
    digest = hashlib.sha256(key).hexdigest()
    return f"{epoch}{digest[:2]}/x{digest}"


def is_chunk(name: str) -> bool:
    """Whether an object has the name of a chunk, whichever."""
    return bool(_STAMPED.fullmatch(name))


def stamp_in(name: str) -> str:
    """The stamp of a chunk's epoch, in hexadecimal; "" where it is no chunk."""
    found = _STAMPED.fullmatch(name)
    return found[1] if found else ""


def key_in(name: str) -> Key | None:
    """The key of a chunk, as far as its name says it."""
    chunk = name.rpartition("/")[2]
    return None if chunk.startswith("x") else bytes.fromhex(chunk)


def metadata(envelope: Envelope) -> tuple[tuple[str, str], ...]:
    """What an envelope says and neither name nor size of the object do, as its metadata."""
    return (
        ("x-amz-meta-kv-format", str(FORMAT)),
        ("x-amz-meta-kv-key", envelope.key.hex()),
        (WRITTEN, f"{envelope.written:.6f}"),
        ("x-amz-meta-kv-sequence", str(envelope.sequence)),
        ("x-amz-meta-kv-xxh3", f"{envelope.checksum:016x}"),
    )
