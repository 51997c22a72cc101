"""Media of `StackWorld`: one that others write to as well, and one whose housekeeping does what it is told."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from kvcascade.configs.schema import SharedSettings
from kvcascade.tiers import OpenContext, Probe, Tier, TierSettings
from kvcascade.tiers.memory import MemoryTier
from kvcascade.types import Buffer, Capabilities, Changes, Entry, Key, Outcome, Usage

from .wrappers import TierWrapper

__all__ = ["Keeper", "Shelf", "ShelfSettings"]


class Shelf(Tier):
    """Chunks in memory, in epochs that other engines may be in, too, as those of an `fs` tier: who leaves an epoch
    makes it void; an epoch without a name is private, but for the first."""

    capabilities = Capabilities(shared=True)

    def __init__(self, weights: str) -> None:
        self._left: Counter[str] = Counter()
        self._epochs: dict[tuple[str, int], MemoryTier] = {}
        self._name = weights
        self._here = self.epoch(weights)

    def epoch(self, weights: str) -> MemoryTier:
        """What an engine that names these weights finds and stores now."""
        return self._epochs.setdefault((weights, self._left[weights]), MemoryTier())

    def named(self) -> Iterator[tuple[str, MemoryTier]]:
        """All that was ever stored in epochs that have names, with these."""
        return ((name, chunks) for (name, _), chunks in self._epochs.items() if name)

    def move_to(self, epoch: str) -> None:
        self._left[self._name] += 1
        self._left[""] += self._name != ""
        self._name = epoch
        self._here = self.epoch(epoch) if epoch else MemoryTier()

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        return self._here.exists(keys)

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        return self._here.write(keys, buffers, victims)

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        return self._here.read(keys, buffers)

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        return self._here.delete(keys)

    def entries(self) -> Iterator[Entry]:
        return self._here.entries()

    def usage(self) -> Usage:
        return self._here.usage()

    def close(self) -> None:
        """Others still use it."""


class ShelfSettings(SharedSettings, TierSettings):
    """A medium that others write to as well."""

    type: Literal["shelf"] = "shelf"

    def open(self, context: OpenContext) -> Shelf:
        return Shelf(context.epoch)

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        return Probe()


class Keeper(TierWrapper):
    """Finds and loses chunks when it is told to, as a tier's own housekeeping does."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self._next = Changes()

    def lose(self, key: Key) -> None:
        """The next housekeeping tells that the chunk is gone."""
        self.inner.delete([key])
        self._next = Changes(vanished=(key,))

    def find(self, key: Key, content: Buffer) -> None:
        """The next housekeeping tells that the chunk is there, written just now."""
        if self.inner.write([key], [content])[0].ok:
            self._next = Changes(appeared=(Entry(key, len(content), float("inf"), 0.0),))

    def forget(self) -> None:
        """What could not be told by now never is."""
        self._next = Changes()

    def maintain(self, budget: float) -> Changes:
        changes, self._next = self._next, Changes()
        return changes
