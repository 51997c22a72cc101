"""How chunks move between primary and the tiers below it: cascades down, promotions up."""

from collections.abc import Iterable, Sequence

from kvcascade.types import Key, MissReason, Outcome, OutcomeKind

from .chain import Chain
from .jobs import Job, JobKind, Report
from .level import Level
from .primary import Primary
from .requests import Request
from .slots import SlotState

__all__ = ["Cascade", "Promotion"]


class Cascade:
    """Primary to secondary: after a store has completed, and after a promotion for the tiers that are filled.

    Stores that wait for a tier pin at most its `queue` share of primary, and half of primary in all; beyond that
    they are shed, and remembered by the level until their chunk is used again.
    """

    def __init__(self, primary: Primary, chain: Chain) -> None:
        self._slots = primary.slots
        self._chain = chain
        slots = self._slots.capacity
        self._shares = {level: max(1, int(level.settings.queue * slots)) for level in chain.levels}
        self._pinned: dict[int, int] = {}
        """Slot -> how many stores wait to read it, or do."""

    def store(self, keys: Sequence[Key], owner: str, now: float) -> None:
        """These keys, just readable in primary, go to each tier that receives `through`."""
        for level in self._chain.levels:
            if level.settings.write == "through":
                self._submit(level, keys, owner, now)

    def again(self, keys: Sequence[Key], owner: str, now: float) -> None:
        """These keys were used: cascades of them that did not happen are tried again."""
        for level in self._chain.levels:
            missed = [key for key in level.take_missed(keys) if self._slots.hit(key)]
            if missed:
                self._submit(level, missed, owner, now)

    def fill(self, source: Level, keys: Sequence[Key], now: float) -> None:
        """These keys were promoted from `source`: the tiers above it that are filled receive them too."""
        for level in self._chain.levels[: source.place]:
            if level.settings.fill and level.settings.write == "through":
                self._submit(level, keys, "", now)

    def ended(self, report: Report) -> None:
        if report.ended:
            for slot in report.job.slots:
                self._slots.unpin(slot)
                self._pinned[slot] -= 1
                if not self._pinned[slot]:
                    del self._pinned[slot]

    def _submit(self, level: Level, keys: Sequence[Key], owner: str, now: float) -> None:
        new = [keys[place] for place in level.residency.absent(keys)]
        room = self._room(level, new)
        self._shed(level, new[room:])
        for start in range(0, room, level.job_chunks):
            self._submit_job(level, new[start : min(room, start + level.job_chunks)], owner, now)

    def _submit_job(self, level: Level, keys: Sequence[Key], owner: str, now: float) -> None:
        admission = level.residency.admit(keys, level.chunk_bytes)
        admitted, turned_down = keys[: admission.admitted], keys[admission.admitted :]
        level.stats.refused += len(turned_down)
        for key in turned_down:
            level.residency.ghosts.add(key, MissReason.REFUSED)
        if not admitted:
            return
        slots = [self._slots.find(key) for key in admitted]
        for slot in slots:
            self._slots.pin(slot)
            self._pinned[slot] = self._pinned.get(slot, 0) + 1
        deadline = now + level.settings.deadline
        level.submit(Job(JobKind.WRITE, admitted, slots, admission.victims, owner, deadline))

    def _room(self, level: Level, keys: Sequence[Key]) -> int:
        """How many leading keys may wait for this tier now. A slot that waits for several tiers counts once."""
        if not level.up:
            return 0
        share = self._shares[level] - level.pinned
        left = self._slots.capacity // 2 - len(self._pinned)
        for place, key in enumerate(keys):
            left -= self._slots.find(key) not in self._pinned
            if place >= share or left < 0:
                return place
        return len(keys)

    def _shed(self, level: Level, keys: Iterable[Key]) -> None:
        reason = MissReason.SHED if level.up else MissReason.TIER_DOWN
        for key in keys:
            level.stats.shed += 1
            level.residency.ghosts.add(key, reason)
            level.miss(key)


class Promotion:
    """Secondary to primary, for requests whose lookup found a chunk further down.

    Lookups note what they want; `flush` submits it at the end of the step, for each request the prefix that fits.
    What has arrived is pinned for those who wait for it. Slots in flight and pinned never exceed half of primary.
    Where there is no room now, a request waits without reading; only one of those that wait holds pins, so that no
    two block each other.
    """

    def __init__(self, primary: Primary, chain: Chain) -> None:
        self._primary = primary
        self._slots = primary.slots
        self._chain = chain
        self._limit = max(1, self._slots.capacity // 2)
        self._wanted: dict[Request, dict[Key, None]] = {}
        self._waiters: dict[int, list[Request]] = {}
        """Slot being read into -> who waits for it."""
        self._holders: dict[int, int] = {}
        """Slot pinned for requests -> by how many."""
        self._lost = 0
        """Slots whose read has passed its deadline and not ended."""
        self._waiting_holder: Request | None = None

    @property
    def reserved(self) -> int:
        """Slots in flight or pinned for a waiting request."""
        return len(self._waiters) + len(self._holders) + self._lost

    def want(self, key: Key, request: Request) -> None:
        """This request waits for this key, which is in a tier and not in primary."""
        self._wanted.setdefault(request, {})[key] = None

    def join(self, slot: int, request: Request) -> None:
        """This request waits for a slot that is being read into already."""
        waiters = self._waiters.get(slot)
        if waiters is not None and request not in waiters:
            key = self._slots.key(slot)
            if waiters and key in waiters[0].sources:
                request.sources[key] = waiters[0].sources[key]
            waiters.append(request)
            request.promoting += 1

    def flush(self, now: float) -> None:
        """End of the step: reads what was wanted in it, in the order of asking."""
        wanted, self._wanted = self._wanted, {}
        for request, keys in wanted.items():
            if not request.finished and not self._start(request, keys, now):
                return

    def release(self, request: Request, slots: Iterable[int] | None = None) -> None:
        """The request no longer needs what was pinned for it: these slots, or all."""
        for slot in list(request.held) if slots is None else request.held.intersection(slots):
            request.held.discard(slot)
            self._slots.unpin(slot)
            self._holders[slot] -= 1
            if not self._holders[slot]:
                del self._holders[slot]
        if self._waiting_holder is request and not request.held:
            self._waiting_holder = None

    def drop(self, request: Request) -> None:
        """The request has ended. What is on its way for it still arrives, and stays as long as others leave it."""
        self.release(request)
        self._wanted.pop(request, None)

    def ended(self, level: Level, report: Report, now: float) -> list[Key]:
        """A read has ended, or passed its deadline. Returns the keys that have arrived by it."""
        job = report.job
        if not report.ended:
            self._lose(job)
            return []
        if job.expired:
            self._lost -= len(job.slots)
            for slot in job.slots:
                self._slots.unpin(slot)
            return []
        arrived = []
        for key, slot, outcome in zip(job.keys, job.slots, report.outcomes, strict=True):
            waiters = self._waiters.pop(slot, [])
            if outcome.ok:
                self._arrive(slot, waiters, level, now)
                arrived.append(key)
            else:
                self._slots.discard(slot)
                self._turn_down(key, waiters, _reason(outcome, late=report.late))
        self._primary.arrived(arrived)
        return arrived

    def reset(self) -> None:
        """Every chunk is void: nobody waits for any."""
        self._wanted.clear()
        self._waiters.clear()
        self._holders.clear()
        self._waiting_holder = None

    def _start(self, request: Request, wanted: Iterable[Key], now: float) -> bool:
        """Reads what this request wants, or as much of it as it may ever get. False where it has to wait for
        room."""
        keys = self._joined(request, wanted)
        levels = {key: level for key in keys if (level := self._chain.find(key)) is not None}
        keys = list(levels)  # the others were evicted since they were asked for
        quota = max(0, self._limit - len(request.held) - request.promoting)
        for key in keys[quota:]:
            request.turned_down[key] = MissReason.REFUSED
        keys = keys[:quota]
        victims = self._slots.victims(len(keys)) if self.reserved + len(keys) <= self._limit else None
        if victims is None:
            return self._wait_for_room(request, keys)
        if self._waiting_holder is request:
            self._waiting_holder = None
        self._primary.evict(victims)
        for slot, key in zip(self._slots.allocate(keys, SlotState.PROMOTING), keys, strict=True):
            self._waiters[slot] = [request]
            request.sources[key] = levels[key].place
        request.promoting += len(keys)
        self._read(request, keys, levels, now)
        return True

    def _joined(self, request: Request, keys: Iterable[Key]) -> list[Key]:
        """The keys that nobody has begun to read meanwhile; the request joins those that somebody has."""
        fresh = []
        for key in keys:
            slot = self._slots.find(key)
            if slot < 0:
                fresh.append(key)
            else:
                self.join(slot, request)
        return fresh

    def _wait_for_room(self, request: Request, keys: Sequence[Key]) -> bool:
        if not request.held and not request.promoting:
            return False
        if self._waiting_holder in (None, request):
            self._waiting_holder = request
            return False
        for key in keys:
            request.turned_down[key] = MissReason.REFUSED
        return True

    def _read(self, request: Request, keys: Sequence[Key], levels: dict[Key, Level], now: float) -> None:
        for level in self._chain.levels:
            here = [key for key in keys if levels[key] is level]
            for start in range(0, len(here), level.job_chunks):
                part = here[start : start + level.job_chunks]
                for key in part:
                    level.residency.begin_read(key)
                slots = [self._slots.find(key) for key in part]
                deadline = now + level.settings.deadline
                level.submit(Job(JobKind.READ, part, slots, (), request.owner, deadline))

    def _arrive(self, slot: int, waiters: Iterable[Request], level: Level, now: float) -> None:
        self._slots.publish(slot)
        for request in waiters:
            request.promoting -= 1
            if not request.finished:
                self._slots.pin(slot)
                request.held.add(slot)
                request.held_until = now + level.settings.deadline
                self._holders[slot] = self._holders.get(slot, 0) + 1
        self._slots.unpin(slot)

    def _lose(self, job: Job) -> None:
        """The read has passed its deadline: nobody waits for it any more, but it may still write into its slots."""
        self._lost += len(job.slots)
        for key, slot in zip(job.keys, job.slots, strict=True):
            self._turn_down(key, self._waiters.pop(slot, ()), MissReason.TIMED_OUT)
            self._slots.abandon(slot)

    def _turn_down(self, key: Key, waiters: Iterable[Request], reason: MissReason) -> None:
        """The read has failed: a MISS for those who waited, but where the tier has turned out not to hold the chunk
        and one below it does."""
        elsewhere = reason in (MissReason.EVICTED, MissReason.CORRUPT) and self._chain.find(key)
        for request in waiters:
            request.promoting -= 1
            request.sources.pop(key, None)
            if not elsewhere:
                request.turned_down[key] = reason


def _reason(outcome: Outcome, late: bool) -> MissReason:
    if outcome.kind is OutcomeKind.CORRUPT:
        return MissReason.CORRUPT
    if outcome.kind is OutcomeKind.MISSING:
        return MissReason.EVICTED
    return MissReason.TIMED_OUT if late else MissReason.TIER_DOWN
