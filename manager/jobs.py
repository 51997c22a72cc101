"""The messages between the scheduler thread and the lanes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvcascade.errors import TierUnavailable
from kvcascade.types import Key, Outcome

if TYPE_CHECKING:
    from .level import Level

__all__ = ["Flow", "Job", "JobKind", "Report"]

_ids = count(1)


class JobKind(Enum):
    READ = "read"
    WRITE = "write"
    PROBE = "probe"
    """Asks whether keys are there: OK or MISSING. It has no slots."""


@dataclass(slots=True, eq=False)
class Job:
    """One asynchronous transfer of some keys between slots of the pool and one tier. A lane gets
    `(keys, slots, victims)` and gives back outcomes; it knows nothing else of the manager."""

    kind: JobKind
    keys: Sequence[Key]
    slots: Sequence[int]
    victims: Sequence[Key]
    owner: str
    """The request that it is for; "" for the manager itself."""
    flow: "Flow"
    """Who is told what became of it."""
    deadline: float
    """When it is reported as failed, whether it has ended or not; in the manager's clock."""
    generation: int = 0
    """Which reset it comes after; results of an earlier one are of no interest but for the pins."""
    id: int = field(default_factory=_ids.__next__)
    begun: bool = False
    withdrawn: bool = False
    """It will not run: taken back, or too late, before it began."""
    expired: bool = False
    """Its deadline passed while it ran, and it was reported then."""

    def failed(self, why: str) -> list[Outcome]:
        """The outcomes of a job that did nothing."""
        return [Outcome.failed(TierUnavailable(why))] * len(self.keys)


class Flow(Protocol):
    """A kind of movement of chunks: it submits jobs, and is told their reports."""

    def ended(self, level: "Level", report: "Report", now: float) -> None:
        """What a lane says of a job of this flow; the level is up to date with it."""


class Report(NamedTuple):
    """What a lane says of a job. Every job gets one report with `ended`, and before it, where its deadline passes
    while it runs, one without."""

    job: Job
    outcomes: list[Outcome]
    ended: bool = True
    """False: the deadline has passed, but the transfer may still use its slots."""
    ran: bool = True
    """False: it was withdrawn before it began, so its victims are still there."""
    late: bool = False
    """Its deadline has passed."""
    seconds: float = 0.0
    """How long it ran."""
