"""Keys of chunks that went, for policies that learn from those that come back."""

from kvcascade.manager.keymap import KeyMap
from kvcascade.types import Key

from .linked import LinkedLists

__all__ = ["GhostKeys"]


class GhostKeys:
    """Lists of keys, each from the oldest; whoever adds keeps them bounded with `drop_oldest`."""

    def __init__(self, lists: int, capacity: int) -> None:
        self.sizes = [0] * lists
        self._order = LinkedLists(lists, capacity)
        self._ghosts: KeyMap[int] = KeyMap()
        self._keys: list[Key] = [b""] * capacity
        self._of = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))

    def add(self, key: Key, which: int) -> None:
        """A key that is in none of the lists, as the newest of this one."""
        ghost = self._free.pop() if self._free else self._new()
        self._ghosts[key] = ghost
        self._keys[ghost] = key
        self._of[ghost] = which
        self._order.add(ghost, which)
        self.sizes[which] += 1

    def take(self, key: Key) -> int | None:
        """Removes the key; the list it was in, None for none."""
        ghost = self._ghosts.get(key)
        return None if ghost is None else self._remove(ghost)

    def drop_oldest(self, which: int) -> None:
        """Removes the oldest key of a list, which has one."""
        self._remove(self._order.coldest(which))

    def _remove(self, ghost: int) -> int:
        which = self._of[ghost]
        self._ghosts.pop(self._keys[ghost])
        self._keys[ghost] = b""
        self._order.remove(ghost)
        self._free.append(ghost)
        self.sizes[which] -= 1
        return which

    def _new(self) -> int:
        self._keys.append(b"")
        self._of.append(0)
        return len(self._keys) - 1
