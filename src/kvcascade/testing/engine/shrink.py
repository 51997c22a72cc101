"""The shortest history that still fails: delta debugging."""

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["shrink"]

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], tries: int = 500) -> list[T]:
    """A part of `items`, in their order, that still fails, and of which no single one can be left out; or what
    that many tries come to."""
    items = list(items)
    size = max(1, len(items) // 2)
    while tries > 0:
        shorter = False
        start = 0
        while start < len(items) and tries > 0:
            rest = items[:start] + items[start + size :]
            tries -= 1
            if rest and fails(rest):
                items, shorter = rest, True
            else:
                start += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return items
