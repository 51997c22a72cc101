"""Chunks that were used without the server hearing of it, told to it in batches: it evicts by recency, too."""

import time
from collections.abc import Callable, Sequence

from kvcascade.types import Key

from .chunks import Era
from .exchange import Exchange, plain

__all__ = ["Uses"]

_MOST = 10_000  # keys that are remembered; of more, the least recent are forgotten
_BATCH = 500


class Uses:
    """Keys that were used, the most recent last. Single operations on a dict only, so it needs no lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._keys: dict[Key, None] = {}

    def note(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None

    def forget(self) -> None:
        self._keys = {}

    def tell(self, era: Era, exchange: Exchange, budget: float) -> None:
        """Tells the server, for about `budget` seconds.

        Raises:
            TierError: it can't be told; what was not told is forgotten.
        """
        end = self._clock() + budget
        keys, self._keys = list(self._keys)[-_MOST:], {}
        for start in range(0, len(keys), _BATCH):
            names = [era.name(key) for key in keys[start : start + _BATCH]]
            for name, answer in zip(
                names, exchange.ask([plain(name, "TOUCH", name) for name in names]), strict=True
            ):
                exchange.checked(name, answer)
            if self._clock() >= end:
                return
