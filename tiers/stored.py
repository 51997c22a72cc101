"""What a tier keeps of one namespace, seen from outside: with or without an engine running."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcascade.errors import TierUnavailable
from kvcascade.types import Buffer, Entry, Namespace, Outcome

if TYPE_CHECKING:
    from .envelope import Flaw

__all__ = ["UNKNOWN", "Holding", "Reading", "Removed", "StoredChunk", "StoredEpoch", "StoredNamespace"]

UNKNOWN = Namespace((("namespace.json", "damaged"), ("tenant", "(unknown)")))
"""Stands for a namespace whose description is damaged: nobody can say whose it is, so it is no tenant's."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What a tier holds of one namespace, for `kvcascade ls`."""

    place: str
    """Where: a folder, a key prefix."""
    namespace: str
    """The namespace's fields in words."""
    chunks: int
    bytes: int
    """Bytes on the medium, everything included."""
    oldest: float | None
    newest: float | None
    """Unix times of the first and last write; None where nothing is held."""
    used_by: str = ""
    """The process that has it open now, in words; "" for none."""
    tenant: str = ""
    """The namespace's `tenant`: what `clear` goes by."""


@dataclass(frozen=True, slots=True)
class StoredEpoch:
    """The epoch of a stored chunk."""

    words: str
    """For a person: "unnamed", "weights v2", "private"."""
    weights: str | None
    """The `weights_version` whose engines read the chunk, "" for those that name none; None where no engine that
    starts will read it, or where that is not known."""
    void: bool
    """It is over, and no engine that runs may be in it: nobody can ever read the chunk again."""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk as it was when it was listed."""

    entry: Entry
    epoch: StoredEpoch
    place: str
    """Where it lies: a file, a slot of a file, a key on a server."""
    sequence: int
    """Of the write, as its envelope says; 0 where the listing does not say."""
    token: Any = field(default=None, repr=False, compare=False)
    """Whatever the tier needs to find it again, and to see whether it has changed since."""


class Reading(NamedTuple):
    """What became of reading one chunk."""

    outcome: Outcome
    """OK: the payload is right. MISSING: it has gone, or was written anew, since it was listed. CORRUPT: it is
    still what was listed, and does not verify; nothing was removed. FAILED: the medium failed."""
    payload: Buffer = memoryview(b"")
    """Verified, where the outcome is OK."""
    flaw: "Flaw | None" = None
    """What is wrong, where it is CORRUPT."""
    sequence: int = 0
    """Of the write, where the outcome is OK."""

    @classmethod
    def failed(cls, error: OSError) -> "Reading":
        cause = TierUnavailable(f"a chunk can't be read: {error.strerror}")
        cause.__cause__ = error
        return cls(Outcome.failed(cause))


class Removed(NamedTuple):
    """What was removed, or would be."""

    chunks: int = 0
    bytes: int = 0
    """On the medium."""
    others: int = 0
    """Temporaries, marks and empty folders."""

    def plus(self, more: "Removed") -> "Removed":
        return Removed(self.chunks + more.chunks, self.bytes + more.bytes, self.others + more.others)


class StoredNamespace(ABC):
    """What a tier keeps of one namespace, in all of its epochs.

    Nothing here disturbs an engine that runs: what it writes, removes or resets meanwhile is met or not. Not
    thread-safe. All methods raise, for what the medium does:

        TierError: the medium can't be read or changed.
        ConfigError: it can never be, like this (no permission, in use).
    """

    namespace: Namespace
    place: str
    """Where: a folder, a key prefix."""

    @property
    def locked_by(self) -> str:
        """The process that has it to itself now, in words, so that nothing can be removed from outside; "" for
        none. A shared medium may be changed beside its engines."""
        return ""

    @abstractmethod
    def holding(self) -> Holding:
        """The sums, as cheaply as they can be had."""

    @abstractmethod
    def chunks(self, prefix: str = "", share: float = 1.0) -> Iterator[StoredChunk]:
        """All chunks, in no order: of every epoch, void ones and damaged ones too.

        Args:
            prefix: only those whose key, in hexadecimal, begins so.
            share: only a random share of them, each chosen before anything of it is read.
        """

    @abstractmethod
    def read(self, chunks: Sequence[StoredChunk]) -> list[Reading]:
        """Reads and verifies chunks that were listed; reading i belongs to chunk i. All payloads are in memory at
        once: the caller bounds the batch."""

    @abstractmethod
    def remove(self, chunks: Iterable[StoredChunk], quarantine: bool = False) -> Removed:
        """Removes chunks, as they come, that are still what was listed; others stay.

        Args:
            quarantine: keep the latest few for inspection.

        Raises:
            ConfigError: an engine has it to itself, or the tier keeps no quarantine.
        """

    def sweep(self, dry_run: bool) -> Removed:
        """Removes what nobody can ever read again: void chunks, and, where the medium has such things, what killed
        writers have left behind, marks that mean nothing any more and empty folders. What is in doubt stays, and
        so does what an engine has to itself. With `dry_run` it only counts."""
        void = (chunk for chunk in self.chunks() if chunk.epoch.void)
        if not dry_run:
            return self.remove(void)
        sizes = [chunk.entry.nbytes for chunk in void]
        return Removed(len(sizes), sum(sizes))
