"""Primary to secondary."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType

from kvcascade.types import Key, MissReason

from .chain import Chain
from .jobs import Flow, Job, JobKind, Report
from .level import Level
from .primary import Primary
from .wishes import Priority

__all__ = ["Cascade"]


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
        self.hold: Callable[[Level | None, Sequence[Key], float], bool] = lambda level, victims, now: False
        """Whether these victims of a tier (None: primary) should not go yet; set where chunks are demoted."""
        self.makes_room: Callable[[Level | None], bool] = lambda level: False
        """Whether the tier will have room soon; set where chunks are demoted."""
        self._demotes = bool(chain.levels) and chain.levels[0].settings.write == "on_evict"
        self._waiting: dict[Level, dict[Key, None]] = {level: {} for level in chain.levels}
        """Chunks in primary that a tier will have room for soon."""

    def keeps(self, victims: Sequence[int], now: float) -> bool:
        """Whether these victims of primary should not go yet, since they are just being moved down."""
        if not self._demotes or not victims:
            return False
        return self.hold(None, [self._slots.key(slot) for slot in victims], now)

    def store(self, keys: Sequence[Key], owner: str, now: float, priority: Priority) -> None:
        """These keys, just readable in primary, go to each tier that receives `through`."""
        if priority == "low":
            return
        for level in self._chain.levels:
            if level.settings.write == "through":
                self._offer(level, keys, owner, now, at_once=priority == "high")

    def again(self, keys: Sequence[Key], owner: str, now: float) -> None:
        """These keys were used: cascades of them that did not happen are tried again."""
        for level in self._chain.levels:
            missed = [key for key in level.take_missed(keys) if self._slots.hit(key)]
            if missed and level.settings.write == "through":
                self._offer(level, missed, owner, now)

    def resume(self, now: float) -> None:
        """End of the step: chunks that wait for room in a tier are offered to it again, if they are still here."""
        for level, waiting in self._waiting.items():
            if not waiting:
                continue
            keys = list(islice(waiting, level.job_chunks))
            for key in keys:
                del waiting[key]
            here = [key for key in keys if self._slots.hit(key)]
            self._shed(level, set(keys).difference(here))
            self._offer(level, here, "", now, at_once=True)

    def reset(self) -> None:
        """Every chunk is void: none waits for room."""
        for waiting in self._waiting.values():
            waiting.clear()

    def fill(self, source: Level, keys: Sequence[Key], now: float) -> None:
        """These keys were promoted from `source`: the tiers above it that are filled receive them too."""
        for level in self._chain.levels[: source.place]:
            if level.settings.fill and level.settings.write != "off":
                self._offer(level, keys, "", now)

    def submit(
        self,
        level: Level,
        keys: Sequence[Key],
        now: float,
        *,
        owner: str = "",
        flow: Flow | None = None,
        staged: Mapping[Key, int] = MappingProxyType({}),
    ) -> list[Key]:
        """Brings as many leading ones of these keys as may be on their way to this tier now, and are not there.
        Returns them.

        Args:
            flow: who is told; it passes the report on to `ended`. Default: nobody else.
            staged: key -> the staging slot that it is in; the others are in primary.
        """
        submitted: list[Key] = []
        self._chain.expire(level, keys)
        absent = (keys[place] for place in level.residency.absent(keys))
        new = [key for key in absent if key not in level.being_deleted]
        new = new[: self._room(level, new)]
        for start in range(0, len(new), level.job_chunks):
            part = new[start : start + level.job_chunks]
            admitted = self._submit_job(level, part, now, owner, flow or self, staged)
            submitted += part[:admitted]
        return submitted

    def ended(self, level: Level, report: Report, now: float) -> None:
        if not report.ended:
            return
        ours = [slot for slot in report.job.slots if slot in self._pinned]
        self._slots.unpin_all(ours)
        for slot in ours:
            self._pinned[slot] -= 1
            if not self._pinned[slot]:
                del self._pinned[slot]

    def _offer(self, level: Level, keys: Sequence[Key], owner: str, now: float, at_once: bool = False) -> None:
        """Submits what may be; the rest is remembered until its chunk is used again. `at_once`: however seldom the
        chunks were used."""
        wanted = [key for key in keys if at_once or level.admits(key)]
        for key in set(keys).difference(wanted):
            level.residency.ghosts.add(key, MissReason.REFUSED)
            level.miss(key)
        submitted = set(self.submit(level, wanted, now, owner=owner))
        left = [wanted[place] for place in level.residency.absent(wanted) if wanted[place] not in submitted]
        if level.up and self.makes_room(level):
            self._waiting[level].update(dict.fromkeys(left))
        else:
            self._shed(level, left)
        for key in level.residency.leaving(wanted):
            level.miss(key)

    def _submit_job(
        self, level: Level, keys: Sequence[Key], now: float, owner: str, flow: Flow, staged: Mapping[Key, int]
    ) -> int:
        """Submits the leading keys that the tier has room for; returns how many."""
        admission = level.residency.admit(keys, level.chunk_bytes, lambda victims: self.hold(level, victims, now))
        admitted = keys[: admission.admitted]
        if admitted:
            slots = (
                self._pinned_slots(admitted) if not staged else [self._slot_of(key, staged) for key in admitted]
            )
            deadline = now + level.settings.deadline
            level.submit(Job(JobKind.WRITE, admitted, slots, admission.victims, owner, flow, deadline))
        return len(admitted)

    def _slot_of(self, key: Key, staged: Mapping[Key, int]) -> int:
        return staged[key] if key in staged else self._pinned_slots([key])[0]

    def _pinned_slots(self, keys: Sequence[Key]) -> list[int]:
        """The slots of these chunks of primary, pinned for a store."""
        slots = self._slots.find_all(keys)
        self._slots.pin_all(slots)
        for slot in slots:
            self._pinned[slot] = self._pinned.get(slot, 0) + 1
        return slots

    def _room(self, level: Level, keys: Sequence[Key]) -> int:
        """How many leading keys may wait for this tier now. A slot that waits for several tiers counts once."""
        if not level.up:
            return 0
        share = self._shares[level] - level.pinned
        left = self._slots.capacity // 2 - len(self._pinned)
        for place, slot in enumerate(self._slots.find_all(keys)):
            left -= slot not in self._pinned
            if place >= share or left < 0:
                return place
        return len(keys)

    def _shed(self, level: Level, keys: Iterable[Key]) -> None:
        reason = MissReason.SHED if level.up else MissReason.TIER_DOWN
        for key in keys:
            level.stats.shed += 1
            level.residency.ghosts.add(key, reason)
            level.miss(key)
