"""What is answered where primary does not have a chunk."""

from kvcascade.types import Key, LookupResult, MissReason

from .chain import Chain
from .level import Level
from .primary import Primary
from .probing import Probing
from .promotion import Promotion
from .requests import Delivery, Request

__all__ = ["Lookups"]

_NEVER = MissReason.NEVER_STORED


class Lookups:
    """Answers for chunks that primary can't give now: from what the tiers below hold, or are asked for. What is on
    its way, or can be, is waited for as long as any tier may take; every miss has a reason, and is counted."""

    def __init__(self, primary: Primary, chain: Chain, promotion: Promotion, patience: float) -> None:
        """`patience`: seconds for which a request may be told "not yet"."""
        self._primary = primary
        self._slots = primary.slots
        self._chain = chain
        self._levels = chain.levels
        self._promotion = promotion
        self._probing = Probing(chain)
        self._patience = patience

    def flush(self, now: float) -> None:
        """End of the step: tiers are asked for what nobody knows."""
        self._probing.flush(now)

    def answer(self, key: Key, slot: int, request: Request, now: float) -> LookupResult:
        """What this request is told of the chunk, which is not readable in its `slot` (-1: it has none)."""
        wanted = slot < 0 and not self._slots.quarantined(key)
        level = self._chain.find(key, request.load_from) if wanted and self._levels else None
        lost = None
        if key not in request.answers:
            lost = self._primary.why(key)
            self._count_misses(key, lost, level)
        reason = request.turned_down.get(key)
        unsure = reason is None and wanted and level is None and self._ask(key, request)
        if reason is None and slot < 0 and level is None and not unsure:
            reason = self._why(key, lost)
        elif reason is None and self._out_of_patience(request, now):
            reason = request.turned_down[key] = MissReason.TIMED_OUT
        if reason is not None:
            request.answers[key] = reason
            return LookupResult.MISS
        request.answers[key] = Delivery.PENDING
        if unsure:
            return LookupResult.RETRY
        if level is not None:
            self._promotion.want(key, request)
        else:
            self._promotion.join(slot, request)
        return LookupResult.HIT_PENDING

    def _ask(self, key: Key, request: Request) -> bool:
        """Has shared tiers asked for the chunk; False where there is none to ask."""
        return bool(self._levels) and self._probing.ask(key, request.load_from)

    def _out_of_patience(self, request: Request, now: float) -> bool:
        """Whether this request has been told 'not yet' for as long as any tier may take."""
        if request.waiting_since is None:
            request.waiting_since = now
        return now - request.waiting_since > self._patience

    def _why(self, key: Key, lost: MissReason | None) -> MissReason:
        """Why nobody has the chunk; `lost`: why primary has not, where that is known."""
        reason = self._chain.why(key) if self._levels else _NEVER
        return reason if reason is not _NEVER else lost or self._primary.why(key)

    def _count_misses(self, key: Key, lost: MissReason, level: Level | None) -> None:
        """The chunk is not in primary, for this reason, nor in any tier above `level`."""
        self._primary.stats.misses[lost] += 1
        for above in self._levels[: level.place] if level else self._levels:
            above.stats.misses[above.why(key)] += 1
