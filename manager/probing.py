"""Asks shared tiers what they hold, in batches, off the scheduler thread."""

from kvcascade.types import Key

from .chain import Chain
from .jobs import Job, JobKind, Report
from .level import Level

__all__ = ["Probing"]

_JOB_KEYS = 1024
_OWNER = "\0probes"
_TRIAL = b"kvcascade: is anybody there?"


class Probing:
    """Lookups note what they want to know; `flush` submits it at the end of the step. A tier that is down is tried
    with a probe now and then."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain

    def ask(self, key: Key, among: frozenset[str] | None = None) -> bool:
        """Notes the key for each tier, of those named in `among`, that may hold it and has not been asked; False
        where there is none."""
        unsure = self._chain.unsure(key, among)
        for level in unsure:
            level.ask(key)
        return bool(unsure)

    def flush(self, now: float) -> None:
        for level in self._chain.levels:
            keys = level.take_asked()
            for start in range(0, len(keys), _JOB_KEYS):
                self._submit(level, keys[start : start + _JOB_KEYS], _OWNER, now)
            if level.trial_due(now):
                self._submit(level, [_TRIAL], "", now)

    def ended(self, level: Level, report: Report, now: float) -> None:
        """The level knows."""

    def _submit(self, level: Level, keys: list[Key], owner: str, now: float) -> None:
        level.submit(Job(JobKind.PROBE, keys, (), (), owner, self, now + level.settings.deadline))
