"""Remembers why chunks are not there, so that every miss has a reason."""

from collections import deque
from collections.abc import Iterable

from kvcascade.types import Key, MissReason

__all__ = ["Ghosts"]

_GENERATIONS = 8
_A_GENERATION = 8192


class Ghosts:
    """At least the last 65,536 chunks that one tier lost or did not take, each with its reason; of those before
    only that they were here.

    They are kept in generations, so that none is forgotten by itself, and no call forgets many. Kept are hashes of
    64 bits: most are never asked for, and to let go of the keys themselves, which have left the processor's caches
    by then, would take longer than all the rest.
    """

    def __init__(self) -> None:
        from .seen import Seen  # NumPy, which only who has a stack should have to load

        self._young: dict[int, MissReason] = {}
        self._generations = deque([self._young])
        """The youngest first."""
        self._seen = Seen()

    def add(self, key: Key, reason: MissReason) -> None:
        """The tier does not have this key, and this is why."""
        self.add_all((key,), reason)

    def add_all(self, keys: Iterable[Key], reason: MissReason) -> None:
        """As `add`, of several keys."""
        self._young.update(dict.fromkeys(map(hash, keys), reason))
        if len(self._young) >= _A_GENERATION:
            self._begin_generation()

    def why(self, key: Key) -> MissReason:
        """Why the tier, which does not have this key, does not."""
        known = hash(key)
        for generation in self._generations:
            if known in generation:
                return generation[known]
        return MissReason.UNKNOWN if known in self._seen else MissReason.NEVER_STORED

    def _begin_generation(self) -> None:
        self._young = {}
        self._generations.appendleft(self._young)
        if len(self._generations) > _GENERATIONS + 1:
            self._seen.add(self._generations.pop())
