"""How much of a request's prefix can be loaded."""

from collections.abc import Sequence
from typing import Protocol

from kvcascade.types import LookupResult

from .coverage import hit_unit, needed_chunks
from .groups import GroupSpec
from .protocols import Manager
from .requests import GroupState, RequestState

__all__ = ["Lookup"]


class Lookup:
    """Finds the last token up to which every group of a request can be loaded."""

    def __init__(self, manager: Manager, groups: Sequence[GroupSpec]) -> None:
        self._manager = manager
        self._unit = hit_unit(groups)
        self._windowed = any(group.window is not None for group in groups)
        self._least = max(group.tokens_per_chunk for group in groups)

    def boundary(self, state: RequestState) -> int | None:
        """Where the loaded prefix would end, in tokens; `state.local` where nothing is worth loading; None where
        that is not decided yet. Less than one chunk is not worth a load."""
        limit = self._limit(state)
        if limit - state.local < self._least:
            return state.local
        hits = [self._hits(group, state, limit) for group in state.groups]
        boundary, lowered = limit + 1, limit
        while lowered < boundary:
            boundary = lowered
            for found in hits:
                reach = found.reach(lowered)
                lowered = lowered if reach == lowered else reach // self._unit * self._unit
                if lowered - state.local < self._least:
                    return state.local
        return boundary if all(found.certain(boundary) for found in hits) else None

    def there(self, keys: Sequence[bytes], state: RequestState) -> bool:
        """Whether all of these are hits now."""
        return all(self._manager.lookup(key, state.context) is LookupResult.HIT for key in keys)

    def _limit(self, state: RequestState) -> int:
        """No load reaches beyond. With sliding windows the token that the engine computes again needs its own."""
        limit = state.request.num_tokens - self._windowed
        for cap in (state.load_limit, None if state.max_load is None else state.local + state.max_load):
            if cap is not None and cap < limit:
                limit = cap // self._unit * self._unit
        return limit

    def _hits(self, group: GroupState, state: RequestState, limit: int) -> "_Hits":
        if group.spec.window is None:
            return _FullHits(self._manager, group, state, limit)
        return _WindowHits(self._manager, group, state)


class _Hits(Protocol):
    def reach(self, limit: int) -> int:
        """A token, at most `limit`, beyond which the group can't go on; `limit` itself where it can go on there.
        What may become a hit is taken for one."""
        ...

    def certain(self, boundary: int) -> bool:
        """Whether all that it takes to go on there is a hit now."""
        ...


class _FullHits:
    """Full attention: every chunk of the prefix is needed. Of a draft model one more, which is not loaded: what
    its layers hold for a chunk's last token depends on the token after it."""

    def __init__(self, manager: Manager, group: GroupState, state: RequestState, limit: int) -> None:
        self._spec = group.spec
        self._margin = group.spec.tokens_per_chunk if group.spec.draft else 0
        wanted = needed_chunks(group.spec, state.local, limit, self._margin)
        keys = group.keys[wanted.start : wanted.stop]
        match_prefix = getattr(manager, "match_prefix", None)
        if match_prefix is not None:
            match = match_prefix(keys, state.context)
            hits, hopes = match.hits, len(keys) if match.pending else match.hits
        else:
            hits, hopes = _match(manager, keys, state)
        self._hits: int = (wanted.start + hits) * self._spec.tokens_per_chunk - self._margin
        self._hopes: int = (wanted.start + hopes) * self._spec.tokens_per_chunk - self._margin

    def reach(self, limit: int) -> int:
        return min(limit, self._hopes)

    def certain(self, boundary: int) -> bool:
        return boundary <= self._hits


class _WindowHits:
    """Sliding window: the chunks before the boundary that the window still covers are needed. Asked from the
    end."""

    def __init__(self, manager: Manager, group: GroupState, state: RequestState) -> None:
        self._manager = manager
        self._group = group
        self._state = state
        self._margin = group.spec.tokens_per_chunk if group.spec.draft else 0
        self._answers: dict[int, LookupResult] = {}

    def reach(self, limit: int) -> int:
        size = self._group.spec.tokens_per_chunk
        boundary = min(limit, len(self._group.keys) * size - self._margin)
        while boundary > self._state.local:
            missing = next((chunk for chunk in reversed(self._needed(boundary)) if self._missing(chunk)), None)
            if missing is None:
                return boundary
            boundary = missing * size - self._margin
        return self._state.local

    def certain(self, boundary: int) -> bool:
        return all(self._ask(chunk) is LookupResult.HIT for chunk in self._needed(boundary))

    def _needed(self, boundary: int) -> range:
        return needed_chunks(self._group.spec, self._state.local, boundary, self._margin)

    def _missing(self, chunk: int) -> bool:
        return self._ask(chunk) is LookupResult.MISS

    def _ask(self, chunk: int) -> LookupResult:
        """The manager's answer does not change within a step: each chunk is asked for once."""
        if chunk not in self._answers:
            self._answers[chunk] = self._manager.lookup(self._group.keys[chunk], self._state.context)
        return self._answers[chunk]


def _match(manager: Manager, keys: Sequence[bytes], state: RequestState) -> tuple[int, int]:
    """Leading hits; and leading chunks that are hits or may become some. All are asked for up to the first miss,
    so that what is further down comes up at once."""
    hits = hopes = 0
    for key in keys:
        answer = manager.lookup(key, state.context)
        if answer is LookupResult.MISS:
            break
        hopes += 1
        hits += answer is LookupResult.HIT and hits == hopes - 1
    return hits, hopes
