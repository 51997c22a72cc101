"""A request is one use, however often it touches a chunk."""

__all__ = ["OncePerRequest"]

_NOBODY = -1


class OncePerRequest:
    """Remembers of each entry the latest request that used it.

    A request touches a chunk when it finds it, when it stores behind it, and when it ends; several requests do so
    in turn. As their numbers grow, one int an entry tells a new use from one more touch.
    """

    def __init__(self, capacity: int) -> None:
        self._latest = [_NOBODY] * capacity

    def insert(self, entry: int) -> None:
        """A new entry, used by whoever touches it first; that is no further use."""
        if entry >= len(self._latest):
            self._latest += [_NOBODY] * (entry + 1 - len(self._latest))
        self._latest[entry] = _NOBODY

    def again(self, entry: int, request: int) -> bool:
        """Whether this touch is a further use of the entry."""
        latest = self._latest[entry]
        if request <= latest or not request:
            return False
        self._latest[entry] = request
        return latest != _NOBODY
