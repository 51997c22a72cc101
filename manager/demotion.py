"""Moves chunks down as they get cold: into a tier that receives `on_evict`, from the tier directly above it."""

from collections.abc import Sequence

from kvcascade.configs.schema import Watermarks
from kvcascade.types import Key

from .cascade import Cascade
from .chain import Chain
from .level import Level
from .pairs import FromPrimary, Pair
from .primary import Primary
from .staged import FromLevel

__all__ = ["Demotion"]


class Demotion:
    """Runs ahead of need: of each tier above one that receives `on_evict` it keeps some of the coldest chunks
    *clean*, that is held below too, so that room can be made at once. When fewer than a share of 1 - `high` of the
    tier is free or clean, the coldest of the others are copied down, until a share of 1 - `low` is.

    Where room is needed and the chunks that would go are not clean, the need waits for the copies that are under
    way, there or further down, at most to their deadline; where there are none, because the tier below is down or
    full of work, the chunks are dropped, and counted. Chunks that the tier below would not admit just go.
    Between two secondary tiers chunks pass through primary's slot, if they are there, else through staging slots.
    The entry above stays until room is needed, thus at least until the lower one is committed. What the lower tier
    has evicted meanwhile, or does not take, is not copied again; what it has lost otherwise, or kept for its time,
    is. Nothing waits for a copy that has failed before.
    """

    def __init__(
        self, primary: Primary, chain: Chain, cascade: Cascade, watermarks: Watermarks, staging: Sequence[int]
    ) -> None:
        """`staging`: slots of the pool outside primary's capacity."""
        shelf = list(staging)
        self._pairs: dict[Level | None, Pair] = {}
        for lower in chain.levels:
            if lower.settings.write != "on_evict":
                continue
            if lower.place == 0:
                self._pairs[None] = FromPrimary(primary, chain, lower, cascade, watermarks)
            else:
                upper = chain.levels[lower.place - 1]
                self._pairs[upper] = FromLevel(primary, chain, upper, lower, cascade, watermarks, shelf)
        for pair in self._pairs.values():
            pair.below = self._pairs.get(pair.lower)
            pair.lower.on_loss = pair.mark_dirty

    def advance(self, now: float) -> None:
        """End of the step: copies down what the watermarks ask for."""
        for pair in self._pairs.values():
            pair.advance(now)

    def hold(self, upper: Level | None, victims: Sequence[Key], now: float) -> bool:
        """Whether these victims of a tier (None: primary) should not go yet, for their copies are under way. Where
        they go although they are not clean, they are counted."""
        pair = self._pairs.get(upper)
        return pair is not None and pair.hold(victims, now)

    def makes_room(self, upper: Level | None) -> bool:
        """Whether chunks of a tier (None: primary) are on their way down, so that there will be room."""
        pair = self._pairs.get(upper)
        return pair is not None and pair.moving

    def reset(self) -> None:
        """Every chunk is void: none is moved."""
        for pair in self._pairs.values():
            pair.reset()
