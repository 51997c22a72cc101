"""The messages between an engine's process and its I/O process."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvcascade.configs.schema import SecondarySettings
from kvcascade.errors import TierError, TierRefused, TierUnavailable
from kvcascade.manager.jobs import Job, JobKind, Report
from kvcascade.tiers import OpenContext
from kvcascade.types import Capabilities, Changes, Entry, Key, Outcome, OutcomeKind, Usage

__all__ = [
    "Answer",
    "CloseLane",
    "CloseTier",
    "Fault",
    "Found",
    "JobOrder",
    "Log",
    "MoveTo",
    "NoteUses",
    "Opened",
    "Refused",
    "Reported",
    "Run",
    "Start",
    "Stop",
    "TierStart",
    "Told",
    "Touch",
    "Withdraw",
]

# To the child. `place` says which tier, by its place among the secondary ones; `number` names the answer.


class TierStart(NamedTuple):
    settings: SecondarySettings
    context: OpenContext
    apart: bool
    """See `open_tier`."""


class Start(NamedTuple):
    """The first message."""

    tiers: Sequence[TierStart]
    again: bool
    """Not the first child: whatever keeps a tier from being opened may pass."""
    log_level: int


class JobOrder(NamedTuple):
    id: int
    kind: JobKind
    keys: Sequence[Key]
    slots: Sequence[int]
    victims: Sequence[Key]
    owner: str
    deadline: float
    """On the system's monotonic clock."""


class Run(NamedTuple):
    """The jobs of a step."""

    place: int
    jobs: Sequence[JobOrder]


class Withdraw(NamedTuple):
    place: int


class Touch(NamedTuple):
    place: int
    keys: Sequence[Key]


class NoteUses(NamedTuple):
    place: int
    uses: Mapping[Key, int]


class MoveTo(NamedTuple):
    place: int
    number: int
    epoch: str


class CloseLane(NamedTuple):
    """Answered with a fault where a job did not end in time."""

    place: int
    number: int
    timeout: float


class CloseTier(NamedTuple):
    place: int
    number: int


class Stop(NamedTuple):
    """The last message."""


# From the child.


class Fault(NamedTuple):
    """A `TierError`, without the driver's error that caused it."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException | None) -> "Fault":
        for kind, known in _ERRORS.items():
            if isinstance(error, known):
                return cls(kind, str(error))
        return cls("unavailable", f"{type(error).__name__}: {error}")

    def error(self) -> TierError:
        return _ERRORS[self.kind](self.text)


_ERRORS = {"refused": TierRefused, "unavailable": TierUnavailable, "failed": TierError}


class Opened(NamedTuple):
    """A tier was opened. A private one tells what it holds next, in `Found`s."""

    place: int
    late: bool
    """It could not be opened yet."""
    capabilities: Capabilities
    usage: Usage
    footprints: Mapping[int, int]
    """Payload bytes -> occupied bytes, of the sizes that messages speak of and that were not told before."""


class Refused(NamedTuple):
    """A tier can never be opened like this: the text of a `ConfigError`."""

    place: int
    text: str


class Found(NamedTuple):
    """Some of what a tier holds."""

    place: int
    entries: Sequence[Entry]
    footprints: Mapping[int, int]
    last: bool


class Reported(NamedTuple):
    """A lane's report of a job."""

    id: int
    kinds: bytes
    """One of `_KINDS` for each key."""
    faults: Sequence[Fault]
    """One for each key that failed."""
    ended: bool
    ran: bool
    late: bool
    seconds: float

    @classmethod
    def of(cls, report: Report) -> "Reported":
        outcomes = report.outcomes
        return cls(
            report.job.id,
            bytes(_PLACES[outcome.kind] for outcome in outcomes),
            [Fault.of(outcome.cause) for outcome in outcomes if outcome.kind is OutcomeKind.FAILED],
            report.ended,
            report.ran,
            report.late,
            report.seconds,
        )

    def report(self, job: Job) -> Report:
        faults = iter(self.faults)
        outcomes = [_WHOLE.get(kind) or Outcome.failed(next(faults).error()) for kind in self.kinds]
        return Report(job, outcomes, self.ended, self.ran, self.late, self.seconds)


_KINDS = list(OutcomeKind)
_PLACES = {kind: place for place, kind in enumerate(_KINDS)}
_WHOLE = {
    _PLACES[outcome.kind]: outcome for outcome in (Outcome.OK, Outcome.MISSING, Outcome.CORRUPT, Outcome.REFUSED)
}


class Told(NamedTuple):
    """What has happened in a lane."""

    place: int
    usage: Usage
    footprints: Mapping[int, int]
    reports: Sequence[Reported]
    changes: Sequence[Changes]


class Answer(NamedTuple):
    number: int
    fault: Fault | None


class Log(NamedTuple):
    """A record for the engine's log."""

    logger: str
    level: int
    text: str
