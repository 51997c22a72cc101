"""When a failed operation is tried again."""

import random

__all__ = ["Retry"]

_BUDGET = 0.2
_MOST = 16.0
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0


class Retry:
    """Up to `times` more attempts, with growing pauses of random length, within a budget: retries add at most a
    fifth to the load of a tier that fails for everybody, but for a few at the start (Google SRE book, chapter 22).

    Used by the threads of one lane; a lost update of the budget does no harm.
    """

    def __init__(self, times: int) -> None:
        self.times = times
        self._budget = _MOST / 2

    def tried(self, operations: int) -> None:
        """So many operations were tried for the first time."""
        self._budget = min(_MOST, self._budget + operations * _BUDGET)

    def allowed(self) -> bool:
        """Takes one retry from the budget, if it has one."""
        if self._budget < 1:
            return False
        self._budget -= 1
        return True

    def pause(self, attempt: int) -> float:
        """Seconds before retry number `attempt`, from 0 on: "full jitter" (M. Brooker, AWS, 2015)."""
        return random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**attempt))
