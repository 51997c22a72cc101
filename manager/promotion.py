"""Secondary to primary."""

from collections.abc import Iterable, Sequence

from kvcascade.types import Key, MissReason, Outcome, OutcomeKind

from .cascade import Cascade
from .chain import Chain
from .jobs import Job, JobKind, Report
from .level import Level
from .primary import Primary
from .requests import Request
from .slots import SlotState

__all__ = ["Promotion"]


class Promotion:
    """Secondary to primary, for requests whose lookup found a chunk further down.

    Lookups note what they want; `flush` submits it at the end of the step, for each request the prefix that fits.
    What has arrived is pinned for those who wait for it. Slots in flight and pinned never exceed half of primary.
    Where there is no room now, a request waits without reading; only one of those that wait holds pins, so that no
    two block each other.
    """

    def __init__(self, primary: Primary, chain: Chain, cascade: Cascade) -> None:
        self._primary = primary
        self._cascade = cascade
        self._slots = primary.slots
        self._chain = chain
        self._limit = max(1, self._slots.capacity // 2)
        self._wanted: dict[Request, dict[Key, None]] = {}
        self._waiters: dict[int, list[Request]] = {}
        """Slot being read into -> who waits for it."""
        self._holders: dict[int, int] = {}
        """Slot pinned for requests -> by how many."""
        self._holding: dict[Request, None] = {}
        """Requests that slots are pinned for."""
        self._lost = 0
        """Slots whose read has passed its deadline and not ended."""
        self._waiting_holder: Request | None = None
        self._arrived: list[tuple[Level, list[Key]]] = []

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
        """End of the step: reads what was wanted in it, in the order of asking. Nobody overtakes who waits for
        room, but the one that holds pins meanwhile: the others may need what it holds."""
        if not self._wanted:
            return
        wanted, self._wanted = self._wanted, {}
        room = True
        for request in sorted(wanted, key=lambda request: request is not self._waiting_holder):
            if not request.finished:
                room = self._start(request, wanted[request], room, now) and room

    def release(self, request: Request, slots: Iterable[int] | None = None) -> None:
        """The request no longer needs what was pinned for it: these slots, or all."""
        for slot in list(request.held) if slots is None else request.held.intersection(slots):
            request.held.discard(slot)
            self._slots.unpin(slot)
            self._holders[slot] -= 1
            if not self._holders[slot]:
                del self._holders[slot]
        self._free_holder(request)

    def overdue(self, now: float) -> list[Request]:
        """The requests that have not come in time for what was pinned for them."""
        return [request for request in self._holding if request.held_until < now]

    def drop(self, request: Request) -> None:
        """The request has ended. What is on its way for it still arrives, and stays as long as others leave it."""
        self.release(request)
        self._wanted.pop(request, None)

    def fill(self, now: float) -> None:
        """What has arrived in primary goes to the tiers between, too."""
        arrived, self._arrived = self._arrived, []
        for level, keys in arrived:
            self._cascade.fill(level, keys, now)

    def ended(self, level: Level, report: Report, now: float) -> None:
        job = report.job
        if not report.ended:
            self._lose(job)
            return
        if job.expired:
            self._lost -= len(job.slots)
            for slot in job.slots:
                self._slots.unpin(slot)
            return
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
        self._arrived.append((level, arrived))

    def reset(self) -> None:
        """Every chunk is void: nobody waits for any."""
        self._wanted.clear()
        self._waiters.clear()
        self._holders.clear()
        self._holding.clear()
        self._arrived.clear()
        self._waiting_holder = None

    def _start(self, request: Request, wanted: Iterable[Key], room: bool, now: float) -> bool:
        """Reads what this request wants, or as much of it as it may ever get. False where it has to wait for
        room.

        Args:
            room: nobody before it waits for some.
        """
        keys = self._joined(request, wanted)
        found = ((key, self._chain.find(key, request.load_from)) for key in keys)
        levels = {key: level for key, level in found if level is not None}
        keys = list(levels)  # the others were evicted since they were asked for
        quota = max(0, self._limit - len(request.held) - request.promoting)
        for key in keys[quota:]:
            request.turned_down[key] = MissReason.REFUSED
        keys = keys[:quota]
        room = (room and self.reserved + len(keys) <= self._limit) or not keys
        victims = self._slots.victims(len(keys)) if room else None
        if victims is None or self._cascade.keeps(victims, now):
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
                level.submit(Job(JobKind.READ, part, slots, (), request.owner, self, deadline))

    def _arrive(self, slot: int, waiters: Iterable[Request], level: Level, now: float) -> None:
        self._slots.publish(slot)
        if level.settings.write == "on_evict" and level.place == 0:
            self._slots.mark_clean(self._slots.key(slot))
        for request in waiters:
            request.promoting -= 1
            if not request.finished:
                self._slots.pin(slot)
                request.held.add(slot)
                self._holding[request] = None
                request.held_until = now + level.settings.deadline
                self._holders[slot] = self._holders.get(slot, 0) + 1
        self._slots.unpin(slot)

    def _lose(self, job: Job) -> None:
        """The read has passed its deadline: nobody waits for it any more, but it may still write its slots."""
        self._lost += len(job.slots)
        for key, slot in zip(job.keys, job.slots, strict=True):
            self._turn_down(key, self._waiters.pop(slot, ()), MissReason.TIMED_OUT)
            self._slots.abandon(slot)

    def _turn_down(self, key: Key, waiters: Iterable[Request], reason: MissReason) -> None:
        """The read has failed: a MISS for those who waited, but where the tier has turned out not to hold the
        chunk and one below it does."""
        elsewhere = reason in (MissReason.EVICTED, MissReason.CORRUPT) and self._chain.find(key)
        for request in waiters:
            request.promoting -= 1
            request.sources.pop(key, None)
            if not elsewhere:
                request.turned_down[key] = reason
            self._free_holder(request)

    def _free_holder(self, request: Request) -> None:
        """Another request may wait for room while it holds pins, where this one holds none any more."""
        if not request.held:
            self._holding.pop(request, None)
        if self._waiting_holder is request and not request.held and not request.promoting:
            self._waiting_holder = None


def _reason(outcome: Outcome, late: bool) -> MissReason:
    if outcome.kind is OutcomeKind.CORRUPT:
        return MissReason.CORRUPT
    if outcome.kind is OutcomeKind.MISSING:
        return MissReason.EVICTED
    return MissReason.TIMED_OUT if late else MissReason.TIER_DOWN
