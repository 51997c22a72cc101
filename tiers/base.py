"""What a storage medium is to the rest: a `Tier`, opened by its settings."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvcascade.configs.schema import SecondarySettings, Watermarks
from kvcascade.types import Buffer, Capabilities, Changes, Entry, Key, Namespace, Outcome, Usage

from .stored import Holding, Removed, StoredNamespace

__all__ = ["Holding", "OpenContext", "Probe", "StoredNamespace", "Tier", "TierSettings"]


class Tier(ABC):
    """A storage medium, over batches of keys and buffers.

    A tier is synchronous and thread-safe: a lane calls it from several threads at once. It never owns a thread,
    never retries, never picks victims, and never logs per chunk. It knows nothing of requests or engines.

    An author writes seven methods (`exists`, `write`, `read`, `delete`, `entries`, `usage`, `close`); the
    others have defaults that are right, if slow or without effect.

    Batches are positional: result i belongs to key i, and a key that goes wrong never harms its neighbours. None
    of the batch methods raises for what the medium does: errors become outcomes. After `close` they raise
    `ClosedError`.
    """

    capabilities: Capabilities = Capabilities()
    """Of the class; a tier whose settings decide sets its own."""

    @abstractmethod
    def exists(self, keys: Sequence[Key]) -> list[bool]:
        """Whether each key could be read now.

        Raises:
            TierError: the medium can't say. (The one batch method whose answer has no room for a failure.)
        """

    @abstractmethod
    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        """Stores `buffers[i]` under `keys[i]`, after deleting `victims`.

        A key is readable once its outcome is OK, with all of its bytes, never before. A key that is already there
        keeps its bytes and is OK (content-addressed). A chunk that does not fit is REFUSED.
        """

    @abstractmethod
    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        """Reads `keys[i]` straight into `buffers[i]`, verified. Where the outcome is not OK the buffer's content
        is undefined. A stored length other than the buffer's is CORRUPT."""

    @abstractmethod
    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        """Removes keys: OK where it was there, MISSING where not."""

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Everything that is readable now, in no order; for recovery and inspection. Safe beside writes: entries
        that come or go meanwhile may be seen or not."""

    @abstractmethod
    def usage(self) -> Usage:
        """How full it is. Cheap: no I/O."""

    @abstractmethod
    def close(self) -> None:
        """Ends all use of the medium, after calls that are running. A second call does nothing."""

    def footprint(self, nbytes: int) -> int:
        """Bytes of the capacity that a chunk of `nbytes` payload bytes occupies."""
        return nbytes

    def touch(self, keys: Sequence[Key]) -> None:  # noqa: B027
        """Notes that these keys were used, the most recent last. Persisted by `maintain`. No I/O."""

    def note_uses(self, uses: Mapping[Key, int]) -> None:  # noqa: B027
        """Notes how many requests have used these keys so far, 255 at most; comes right after the `touch` that
        says so. A tier that can keeps it beside the recency, for `entries` after a restart. No I/O."""

    def maintain(self, budget: float) -> Changes:
        """Housekeeping for at most about `budget` seconds: persists recency, syncs, sweeps. Called every few
        seconds, however busy the lane is, and again soon where it took all of its time. Returns what changed.

        Raises:
            TierError: the medium failed; it is called again later.
        """
        return Changes()

    def move_to(self, epoch: str) -> None:
        """Makes everything stored so far void, for good: when this returns, no chunk written before is served,
        not after a restart or a power cut, and a write that had begun before does not become visible.
        An `epoch` is "" where nobody named the weights that follow.

        The default deletes all entries and suits a medium that does not outlive the process.

        Raises:
            TierError: the mark can't be written; old chunks may come back, so the tier must not be used.
        """
        self.delete([entry.key for entry in self.entries()])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class OpenContext:
    """What a tier is told when it is opened, beyond its settings."""

    namespace: Namespace
    chunk_bytes: int
    """Payload bytes of the engine's (largest) chunk; a tier takes smaller ones too."""
    engine_id: str = ""
    """Names the engine among those that share a stack file; "" takes a free place."""
    epoch: str = ""
    """The caller's name for its weights (`weights_version`), "" for none. Chunks of another named epoch, and
    those of an engine that has since been reset, are void."""
    place: int = 0
    """Which place is taken first, where it is free: an engine of several that start together (by its data-parallel
    rank) finds its own again."""


@dataclass(slots=True)
class Probe:
    """What `kvcascade check` finds out about a tier, without changing anything."""

    facts: list[tuple[str, str]] = field(default_factory=list)
    """(name, value) lines for the reader: "free space", "1.2 TiB"."""
    problems: list[str] = field(default_factory=list)
    """What will keep the tier from starting, in words; empty where it would start."""
    chunks: int | None = None
    """How many chunks of the asked size it would hold; None where it has no bound or no size was asked."""
    soft: Watermarks | None = None
    """Between which shares of that it evicts by itself; None where it does not."""


class TierSettings(SecondarySettings):
    """The settings class of a tier type, found by entry point (`kvcascade.tiers`).

    Importing its module must import nothing heavier than pydantic; `open` imports the driver.
    """

    @abstractmethod
    def open(self, context: OpenContext) -> Tier:
        """Opens the medium.

        Raises:
            ConfigError: it can never be opened like this (no permission, too small, in use).
            TierUnavailable: it can't be opened now.
        """

    @abstractmethod
    def probe(self, chunk_bytes: int | None = None) -> Probe:
        """Looks whether `open` would succeed, without changing anything, also beside a running engine."""

    def stored(self, engine_id: str | None = None) -> list[StoredNamespace]:
        """What is kept there now, one for each namespace, also without an engine running; [] for a tier that keeps
        nothing. Where each engine has a place of its own: that of `engine_id`, or of all where it is None.

        Raises:
            TierError: the medium can't be read.
        """
        return []

    def holdings(self) -> list[Holding]:
        """The sums of what is `stored`.

        Raises:
            TierError: the medium can't be read.
        """
        return [kept.holding() for kept in self.stored()]

    def sweep(self, dry_run: bool) -> Removed:
        """Removes what is of no use and belongs to no single namespace, of which `StoredNamespace.sweep` is in
        charge, and brings what is kept down to a capacity that is of all of them together, where no engine does
        that. With `dry_run` it only counts.

        Raises:
            ConfigError: it can never be removed like this.
            TierError: the medium failed.
        """
        return Removed()

    def clear(self, tenant: str | None) -> list[str]:
        """Removes what is ours: all namespaces of this tenant (the stack's `namespace`), or every one where it
        is None. Foreign files stay. Returns one line for each thing removed or left, in words.

        Raises:
            ConfigError: an engine is using it.
            TierError: the medium failed.
        """
        return []
