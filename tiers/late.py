"""Stands in for a tier that could not be opened when the stack was built."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvcascade.errors import TierUnavailable
from kvcascade.types import Buffer, Capabilities, Changes, Entry, Key, Outcome, Usage

from .base import Tier

__all__ = ["LateTier"]


class LateTier(Tier):
    """Is unavailable until `exists` is asked for, as by a probe whether the tier is back, and the tier can be
    opened then. What a private one holds is told by the next `maintain`.

    Notes:
        `_lock` covers opening and closing, so that a tier is opened once; calls run with the lock released.
    """

    def __init__(self, open_tier: Callable[[], Tier], capabilities: Capabilities) -> None:
        """`capabilities`: those that the tier will have."""
        self.capabilities = capabilities
        self._open_tier = open_tier
        self._lock = threading.Lock()
        self._tier: Tier | None = None
        self._untold = False
        self._closed = False

    def exists(self, keys: Sequence[Key]) -> list[bool]:
        return self._opened().exists(keys)

    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        return self._tier.write(keys, buffers, victims) if self._tier else _unavailable(keys)

    def read(self, keys: Sequence[Key], buffers: Sequence[Buffer]) -> list[Outcome]:
        return self._tier.read(keys, buffers) if self._tier else _unavailable(keys)

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        return self._tier.delete(keys) if self._tier else _unavailable(keys)

    def entries(self) -> Iterator[Entry]:
        return self._tier.entries() if self._tier else iter(())

    def usage(self) -> Usage:
        return self._tier.usage() if self._tier else Usage(0, 0, 0 if self.capabilities.bounded else None)

    def footprint(self, nbytes: int) -> int:
        return self._tier.footprint(nbytes) if self._tier else nbytes

    def touch(self, keys: Sequence[Key]) -> None:
        if self._tier:
            self._tier.touch(keys)

    def note_uses(self, uses: Mapping[Key, int]) -> None:
        if self._tier:
            self._tier.note_uses(uses)

    def maintain(self, budget: float) -> Changes:
        if self._tier is None:
            return Changes()
        changes = self._tier.maintain(budget)
        if not self._untold or self.capabilities.shared:
            return changes
        self._untold = False
        return Changes((*self._tier.entries(), *changes.appeared), changes.vanished)

    def move_to(self, epoch: str) -> None:
        """Raises `TierUnavailable` where the tier can't be opened: its mark is not written."""
        self._opened().move_to(epoch)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._tier:
                self._tier.close()

    def _opened(self) -> Tier:
        with self._lock:
            if self._tier is None:
                if self._closed:
                    raise TierUnavailable("closed before it could be opened")
                self._tier = self._open_tier()
                self._untold = True
            return self._tier


def _unavailable(keys: Sequence[Key]) -> list[Outcome]:
    return [Outcome.failed(TierUnavailable("the tier could not be opened yet"))] * len(keys)
