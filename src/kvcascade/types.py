"""The words that all layers share. Nothing here does I/O or holds state."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple, TypeAlias

from kvcascade.errors import TierError

__all__ = [
    "MAX_KEY_BYTES",
    "Buffer",
    "Capabilities",
    "Changes",
    "Entry",
    "Key",
    "LookupResult",
    "MissReason",
    "Namespace",
    "Outcome",
    "OutcomeKind",
    "PrefixMatch",
    "RequestContext",
    "StoreOffer",
    "Usage",
]

Key: TypeAlias = bytes
"""Identifies a chunk: the engine's block hash of the chunk's last block, then the group index in 4 bytes,
big-endian. At most `MAX_KEY_BYTES` long, never empty."""

Buffer: TypeAlias = memoryview
"""The bytes of one chunk: contiguous, format 'B', writable where something is read into it."""

MAX_KEY_BYTES = 255


@dataclass(frozen=True, slots=True)
class Namespace:
    """What a chunk's bytes belong to: every field that, changed, changes the bytes.

    Two namespaces are equal exactly when all fields are. Fields are tagged and length-prefixed before they are
    hashed, so that no two different sets of fields give one digest (as in vllm-project/vllm#44701).
    """

    fields: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, **fields: object) -> "Namespace":
        """A namespace of these fields; values are compared by their text."""
        return cls(tuple(sorted((name, str(value)) for name, value in fields.items())))

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for the fields, the same in every process."""
        return _digest([part for field in self.fields for part in field])

    def stamp(self, mark: str) -> bytes:
        """16 bytes that stand for the fields and a tier's current `mark` (its epoch): written into every
        envelope, so that a chunk of another model or of a void epoch is never served."""
        return _digest([*(part for field in self.fields for part in field), "mark", mark])

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.fields) or "(default)"


def _digest(parts: list[str]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "big"))
        digest.update(raw)
    return digest.digest()[:16]


class OutcomeKind(Enum):
    """What became of one key of a batch."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one key of a batch. Positional: outcome i belongs to key i.

    - `OK`: done; a read has put the right bytes, verified, into the buffer.
    - `MISSING`: not there.
    - `CORRUPT`: there, but not what was stored; the tier has removed or quarantined it.
    - `REFUSED`: the tier does not take it (above its capacity, too large for it).
    - `failed(cause)`: the medium failed; whether the chunk is there is not known.
    """

    kind: OutcomeKind
    cause: TierError | None = None

    OK: ClassVar["Outcome"]
    MISSING: ClassVar["Outcome"]
    CORRUPT: ClassVar["Outcome"]
    REFUSED: ClassVar["Outcome"]

    @staticmethod
    def failed(cause: TierError) -> "Outcome":
        """The outcome of a key on which the medium failed."""
        return Outcome(OutcomeKind.FAILED, cause)

    @property
    def ok(self) -> bool:
        return self.kind is OutcomeKind.OK


Outcome.OK = Outcome(OutcomeKind.OK)
Outcome.MISSING = Outcome(OutcomeKind.MISSING)
Outcome.CORRUPT = Outcome(OutcomeKind.CORRUPT)
Outcome.REFUSED = Outcome(OutcomeKind.REFUSED)


class Entry(NamedTuple):
    """One chunk on a tier, as `Tier.entries` lists it."""

    key: Key
    nbytes: int
    """Payload bytes, without envelope and rounding."""
    written: float
    """Unix time of the write."""
    used: float
    """Unix time of the last known use; what eviction order is restored from."""
    uses: int = 1
    """Requests that have used it, as far as is known, its store included; 255 stands for more, too."""


class Usage(NamedTuple):
    """How full a tier is. Bytes are those that its entries occupy: payload, envelope and rounding."""

    chunks: int
    bytes: int
    capacity: int | None
    """Bytes that entries may occupy in all; None where the tier has no bound of its own."""
    evictions: int = 0
    """Chunks that the tier itself has evicted, through this engine."""


class Changes(NamedTuple):
    """What a tier's own housekeeping has changed: chunks that came to light, that it dropped, and that it evicted
    to make room. A lane whose tier was opened anew says in `held` all that it holds: other keys are gone."""

    appeared: tuple[Entry, ...] = ()
    vanished: tuple[Key, ...] = ()
    evicted: tuple[Key, ...] = ()
    held: frozenset[Key] | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tier can do, always said positively."""

    persistent: bool = False
    """Chunks outlive the process."""
    shared: bool = False
    """Others write to it too, so its content can't be known from here; it must be asked."""
    batches: bool = False
    """Keys that are read or written in one call cost less than each by itself, so that a lane does small jobs
    together."""
    bounded: bool = False
    """It has a hard capacity: `Usage.capacity` is set, and the manager chooses victims for it."""


@dataclass(eq=False, slots=True)
class RequestContext:
    """The request on whose behalf a verb is called. Any object with these attributes fits, vLLM's too."""

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None
    """What the client has sent along; may be anything."""
    load_from: frozenset[str] | None = None
    """Read by `on_new_request`, may be absent: the secondary tiers, by name, that may serve it; None: all."""


class LookupResult(Enum):
    """What the manager knows of a key. Members are named and meant as in vLLM."""

    MISS = auto()
    HIT = auto()
    """Readable now, and until the end of the step."""
    HIT_PENDING = auto()
    """There, but not readable yet: ask again in a later step."""
    RETRY = auto()
    """Not known yet: ask again in a later step."""


class PrefixMatch(NamedTuple):
    """The batch form of a lookup."""

    hits: int
    """How many leading keys are HIT."""
    pending: bool
    """True where the key after them is not decided yet: the prefix may grow, ask again in a later step."""


class StoreOffer(NamedTuple):
    """What `prepare_store` grants: chunk `keys[i]` is to be copied into slot `slots[i]`.

    Keys that were asked for and are in neither list are already present or on their way.
    """

    keys: list[Key]
    slots: list[int]
    evicted: list[Key]
    refused: Sequence[Key] = ()
    """Those for which there is no room now; they may be offered again."""


class MissReason(Enum):
    """Why a lookup was a miss."""

    NEVER_STORED = "never stored"
    REFUSED = "refused"
    SHED = "shed"
    EVICTED = "evicted"
    EXPIRED = "expired"
    CORRUPT = "corrupt"
    OTHER_NAMESPACE = "other namespace"
    TIMED_OUT = "timed out"
    TIER_DOWN = "tier down"
    UNKNOWN = "unknown"

    __hash__ = object.__hash__  # members are counted at every miss, and an enum's own hash is slow
