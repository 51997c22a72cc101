"""What the manager itself asks of a tier; all else its lane does."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from kvcascade.types import Capabilities, Entry, Key, Usage

__all__ = ["TierControl"]


class TierControl(Protocol):
    """The part of a `Tier` that the scheduler thread uses, wherever the tier lives. Nothing of it does I/O, but
    `entries` and `close`."""

    @property
    def capabilities(self) -> Capabilities: ...

    def entries(self) -> Iterator[Entry]: ...

    def usage(self) -> Usage: ...

    def footprint(self, nbytes: int) -> int: ...

    def touch(self, keys: Sequence[Key]) -> None: ...

    def note_uses(self, uses: Mapping[Key, int]) -> None: ...

    def close(self) -> None: ...
