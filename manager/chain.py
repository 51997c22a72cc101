"""What lies below primary: the secondary tiers, in order."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvcascade.errors import TierError
from kvcascade.types import Key, MissReason

from .events import EventLog
from .jobs import Report
from .level import Level, Moved

__all__ = ["Chain"]


class Chain:
    """The secondary tiers of a stack. It knows keys, slot numbers and jobs, and nothing of who owns the slots, so
    it can also work over the pool of another manager.

    Used by the scheduler thread only. Nothing here does I/O or waits, but `drain`, `void` and `close`.
    """

    def __init__(
        self, levels: Sequence[Level], events: EventLog, release: Callable[[], bool] = lambda: False
    ) -> None:
        """`release`: ends what the lanes run in, by force where they have not ended; False where that can't be."""
        self.levels = list(levels)
        self._events = events
        self._release = release
        for level in self.levels:
            events.stored(level.name, level.residency)

    def find(self, key: Key, among: frozenset[str] | None = None) -> Level | None:
        """The topmost tier, of those named in `among`, that holds the key and gives it to primary."""
        for level in self._named(among):
            if level.holds(key) and level.promotes(key):
                return level
        return None

    def unsure(self, key: Key, among: frozenset[str] | None = None) -> list[Level]:
        """The tiers, of those named in `among`, that would have to be asked whether they hold the key."""
        return [level for level in self._named(among) if level.unsure(key) and level.promotes(key)]

    def _named(self, names: frozenset[str] | None) -> list[Level]:
        return self.levels if names is None else [level for level in self.levels if level.name in names]

    def why(self, key: Key) -> MissReason:
        """Why no tier gives the key: the reason of the lowest tier that has ever known it."""
        if any(level.holds(key) for level in self.levels):
            return MissReason.REFUSED
        for level in reversed(self.levels):
            reason = level.why(key)
            if reason is not MissReason.NEVER_STORED:
                return reason
        return MissReason.NEVER_STORED

    @property
    def awaited(self) -> bool:
        """Whether a job of a request has not been reported."""
        return any(level.awaited for level in self.levels)

    @property
    def under_way(self) -> int:
        """Jobs that have not been reported."""
        return sum(level.lane.queued for level in self.levels)

    def poll(self, now: float, overdue: float | None = None) -> Iterator[tuple[Level, Report]]:
        """What the lanes have to say; each level is up to date with a report when it is given out. Jobs whose
        deadline is before `overdue` (default: now) are reported, ended or not."""
        for level in self.levels:
            level.advance(now)
            self._events.removed(level.name, level.settle_void(now))
            for report in level.lane.poll(now if overdue is None else overdue):
                self._tell(level, level.record(report, now))
                yield level, report
            for moved in level.read_changes():
                self._tell(level, moved)

    def _tell(self, level: Level, moved: Moved) -> None:
        self._events.removed(level.name, moved.went)
        self._events.stored(level.name, moved.came)

    def touch(self, keys: Sequence[Key], request: int = 0) -> None:
        """These were used by the request of this number, as one prompt, head first."""
        for level in self.levels:
            self.expire(level, keys)
            here, uses = level.residency.touch(keys, request)
            if here:
                level.tier.touch(here)
            if uses:
                level.tier.note_uses(uses)

    def expire(self, level: Level, keys: Sequence[Key]) -> None:
        """Of these keys, the tier forgets those whose time is over."""
        self._events.removed(level.name, level.expire(keys))

    def used(self, keys: Iterable[Key]) -> None:
        """A request that used these keys has finished."""
        for level in self.levels:
            if level.counts_uses:
                for key in keys:
                    level.used(key)

    def start(self) -> None:
        """The step ends: what was submitted in it begins."""
        for level in self.levels:
            level.lane.start()

    def finish(self, owner: str) -> None:
        """This request will cause no more jobs."""
        for level in self.levels:
            level.lane.finish(owner)

    # These wait

    def drain(self, timeout: float) -> bool:
        """Withdraws the jobs that have not begun, and waits for the others to end; False where one did not."""
        for level in self.levels:
            level.lane.withdraw()
        return self.flush(timeout)

    def flush(self, timeout: float) -> bool:
        """Waits for all jobs to end; False where one did not."""
        end = time.monotonic() + timeout
        return all(level.lane.wait(max(0.0, end - time.monotonic())) for level in self.levels)

    def void(self, epoch: str, timeout: float, now: float) -> dict[str, str]:
        """Makes everything stored so far void in every tier. Returns, for each tier that could not do it in time,
        why; such a tier is down until it could."""
        end = time.monotonic() + timeout
        begun = [(level, level.void(epoch)) for level in self.levels]
        problems = {}
        for level, future in begun:
            try:
                future.result(max(0.0, end - time.monotonic()))
            except TierError as error:
                problems[level.name] = str(error)
            except TimeoutError:
                problems[level.name] = f"did not answer within {timeout:g} s"
            self._events.removed(level.name, level.settle_void(now))
            if not level.up:
                problems.setdefault(level.name, "a transfer that was begun before has not ended")
        return problems

    def close(self, timeout: float) -> tuple[bool, list[Exception]]:
        """Ends all lanes, then closes all tiers, each of them whatever the others do. Returns whether all I/O has
        ended, and what went wrong."""
        end = time.monotonic() + timeout
        ended = [level.lane.close(max(0.0, end - time.monotonic())) for level in self.levels]
        problems: list[Exception] = []
        for level, quiet in zip(self.levels, ended, strict=True):
            if not quiet:
                continue  # its threads still use it
            try:
                level.tier.close()
            except Exception as error:  # the others are to be closed too; the caller raises it
                problems.append(error)
        released = self._release()
        return released or all(ended), problems
