"""Makes a tier's content void, however long that takes."""

from concurrent.futures import Future

from .lane import Lane

__all__ = ["Voiding"]

_AGAIN = 1.0


class Voiding:
    """Moves a tier to another epoch, in its lane. The mark is written at once. A transfer that was begun before
    may still reach the tier after it: the tier is out of use until all such have ended, and is then voided once
    more. Until then a shared tier waits in an epoch without a name: others are in the one that was named, and must
    not get what such a transfer brings. What fails is tried again. Used by the scheduler thread only."""

    def __init__(self, lane: Lane, shared: bool) -> None:
        """`shared`: others use the tier too."""
        self._lane = lane
        self._shared = shared
        self._epoch = ""
        self._future: Future[None] | None = None
        self._stragglers = False
        self._apart = False
        self._again_at = 0.0

    @property
    def under_way(self) -> bool:
        """Whether the tier is out of use for that."""
        return self._future is not None

    def begin(self, epoch: str, running: int) -> "Future[None]":
        """Begins, where `running` transfers have not ended; the future says when the mark is written, or why it
        can't be."""
        self._epoch = epoch
        self._stragglers = self._apart = self._shared and running > 0
        self._future = self._move()
        return self._future

    def settled(self, now: float, running: int) -> bool:
        """Whether it has just come to its end, where `running` transfers have not ended."""
        future = self._future
        if future is None or not future.done():
            return False
        self._stragglers = self._stragglers or running > 0
        if running:
            return False
        if future.exception() is not None:
            if now >= self._again_at:
                self._again_at = now + _AGAIN
                self._future = self._move()
            return False
        if self._stragglers:
            self._stragglers = self._apart = False
            self._future = self._move()
            return False
        self._future = None
        return True

    def _move(self) -> "Future[None]":
        return self._lane.move_to("" if self._apart else self._epoch)
