"""A tier that keeps nothing: what a stack costs without a medium, and a place to switch one off."""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from kvcascade.errors import ClosedError
from kvcascade.types import Buffer, Entry, Key, Outcome, Usage

from .base import OpenContext, Probe, Tier, TierSettings

__all__ = ["NoopSettings", "NoopTier"]

T = TypeVar("T")


class NoopTier(Tier):
    """Holds nothing, so that it refuses every write: OK would promise a chunk that can't be read."""

    def __init__(self) -> None:
        self._closed = False

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        return self._all(keys, False)

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        return self._all(keys, Outcome.REFUSED)

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        return self._all(keys, Outcome.MISSING)

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        return self._all(keys, Outcome.MISSING)

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def usage(self) -> Usage:
        return Usage(0, 0, None)

    def close(self) -> None:
        self._closed = True

    def _all(self, keys: Sequence[Key], answer: T) -> list[T]:
        if self._closed:
            raise ClosedError("the noop tier is closed")
        return [answer] * len(keys)


class NoopSettings(TierSettings):
    """Keeps nothing and refuses every chunk: for benchmarks, and to switch a tier off in place."""

    type: Literal["noop"] = "noop"

    def open(self, context: OpenContext) -> NoopTier:
        return NoopTier()

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        return Probe([("medium", "none: every chunk is refused")], chunks=0)
