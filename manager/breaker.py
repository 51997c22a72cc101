"""Keeps a tier that does not work from being asked at every turn."""

from enum import Enum

__all__ = ["Breaker", "BreakerState"]


class BreakerState(Enum):
    CLOSED = "closed"
    """The tier works."""
    OPEN = "open"
    """The tier is down: nothing is asked of it."""
    HALF_OPEN = "half-open"
    """One trial is under way; what it says decides."""


class Breaker:
    """A circuit breaker (M. Nygard, Release It!): it opens after some failures in a row, lets one trial through
    every so often, and closes when that succeeds. Used by the scheduler thread only."""

    def __init__(self, failures: int, probe_every: float) -> None:
        """`failures`: in a row, that open it; `probe_every`: seconds between two trials."""
        self._failures = failures
        self._probe_every = probe_every
        self._in_a_row = 0
        self._next_trial = 0.0
        self.state = BreakerState.CLOSED

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    def succeeded(self) -> None:
        """An operation has worked."""
        self._in_a_row = 0
        self.state = BreakerState.CLOSED

    def failed(self, now: float) -> None:
        """An operation has failed."""
        self._in_a_row += 1
        if self.state is BreakerState.OPEN:
            return  # what was under way when it opened puts off no trial
        if self.state is BreakerState.HALF_OPEN or self._in_a_row >= self._failures:
            self.open(now)

    def untried(self) -> None:
        """The trial was taken back before it began: another one may begin."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN

    def open(self, now: float) -> None:
        """The tier is down, whatever was counted."""
        self.state = BreakerState.OPEN
        self._next_trial = now + self._probe_every

    def trial_due(self, now: float) -> bool:
        """Whether a trial should begin now; if so it has, as far as the breaker knows."""
        if self.state is not BreakerState.OPEN or now < self._next_trial:
            return False
        self.state = BreakerState.HALF_OPEN
        return True
