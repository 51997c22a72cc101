"""How often keys were used, in bounded memory."""

from kvcascade.types import Key

__all__ = ["UseCounts"]

_KEYS = 1 << 17


class UseCounts:
    """Counts of two generations of 131,072 keys: what was not used while so many others were is forgotten."""

    def __init__(self) -> None:
        self._young: dict[Key, int] = {}
        self._old: dict[Key, int] = {}

    def add(self, key: Key) -> int:
        """One more use; returns how many there were, this one included."""
        count = self[key] + 1
        if len(self._young) >= _KEYS:
            self._old, self._young = self._young, {}
        self._young[key] = count
        return count

    def __getitem__(self, key: Key) -> int:
        count = self._young.get(key)
        return self._old.get(key, 0) if count is None else count
