"""Where the tokens of a load come from, in vLLM's terms."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from . import compat

__all__ = ["hits_by_source"]


def hits_by_source(chunks: Iterable[tuple[int, int, Any]], start: int, end: int) -> dict[Any, int]:
    """How many of the tokens from `start` to `end` come from where; the sum is all of them.

    Args:
        chunks: of each its first token, the token after its last one, and its source.

    Tokens that several cache groups load from different places come from the outermost of them; those that none
    loads, since a sliding window has passed them, from nowhere in particular.
    """
    changes: dict[int, Counter[Any]] = defaultdict(Counter)
    for first, last, source in chunks:
        changes[max(first, start)][source] += 1
        changes[last][source] -= 1
    edges = sorted({start, end} | {edge for edge in changes if start < edge < end})
    active: Counter[Any] = Counter()
    tokens: Counter[Any] = Counter()
    for edge, following in pairwise(edges):
        active.update(changes[edge])
        found = [source for source, number in active.items() if number]
        source = compat.CacheHitSource.outermost(found) if found else compat.CacheHitSource.EXTERNAL_UNSPECIFIED
        tokens[source] += following - edge
    return dict(tokens)
