"""How soon chunks come back, learned from those that did."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["ReuseModel"]

Floats = NDArray[np.float64]

_BUCKETS_AN_OCTAVE = 4
_CLASSES = np.array([[1.0], [20.0]])
"""How often chunks used once, and those used again, come back, as far as nothing is known."""
# What that and the other assumptions weigh, in chunks that came back.
_BY_AGE, _BY_CLASS, _BY_CELL = 30.0, 500.0, 200.0
_ROUNDS = 3
_MOST_RISK = 5.0  # of a bucket; keeps what is left of a class above zero


class ReuseModel:
    """The rate at which chunks that were used once, or again, come back, by the time since their last use.

    Time goes in ticks; an age is 0 .. `ages`, the last of which stands for all above. Ages are put into buckets
    that widen with the age. A rate is the chunks that came back over those that could have, times ticks. Chunks
    that were evicted and are remembered count too, so a rate is the workload's and does not depend on what the
    cache chose to keep.

    Few chunks come back at any one age, and those of one prompt do so together. So a rate is drawn towards a model
    of fewer parameters: one rate for each age, which both classes share but for a factor (proportional hazards).
    That one is drawn towards a rate that falls as 1 / age.
    """

    def __init__(self, ages: int) -> None:
        buckets = np.zeros(ages + 1, dtype=np.int64)
        buckets[2:] = np.log2(np.arange(2, ages + 1)) * _BUCKETS_AN_OCTAVE
        buckets[ages] = buckets[ages - 1] + 1
        _, self._starts, self._bucket_of = np.unique(buckets, return_index=True, return_inverse=True)
        self._width = np.diff(self._starts, append=2 * ages).astype(np.float64)
        self._middle = self._starts + self._width / 2
        self._buckets: list[int] = self._bucket_of.tolist()
        self._back = [[0] * len(self._starts) for _ in _CLASSES]
        self._exposed = np.zeros((len(_CLASSES), len(self._starts)))

    def came_back(self, again: int, age: int) -> None:
        """A chunk was used at this age; `again`: 1 where it had been used again before, else 0."""
        self._back[again][self._buckets[age]] += 1

    def tick(self, chunks: Sequence[Sequence[int]]) -> None:
        """A tick has gone by for so many chunks, by class and age, which could have come back in it."""
        self._exposed += np.add.reduceat(np.asarray(chunks, dtype=np.float64), self._starts, axis=1)

    def densities(self) -> Floats:
        """For each class and age the most hits a tick that keeping such a chunk can bring, over all times to give
        it up: its Gittins index."""
        rates = self._rates()
        risk = np.minimum(rates * self._width, _MOST_RISK)
        left = np.exp(risk - np.cumsum(risk, axis=1))
        back = left * -np.expm1(-risk)
        hits, ticks = _from_zero(back), _from_zero(back / rates)
        gain = hits[:, None, 1:] - hits[:, :-1, None]
        cost = ticks[:, None, 1:] - ticks[:, :-1, None]
        index: Floats = np.divide(gain, cost, out=np.zeros_like(gain), where=cost > 0).max(axis=2)
        return index[:, self._bucket_of]

    def _rates(self) -> Floats:
        back, exposed = np.asarray(self._back, dtype=np.float64), self._exposed
        factor = _CLASSES
        for _ in range(_ROUNDS):  # each of the two follows from the other
            scale = (back.sum() + 1e-3) / ((factor * exposed / self._middle).sum() + 1e-3)
            by_age = (back.sum(axis=0) + _BY_AGE) / (
                (factor * exposed).sum(axis=0) + _BY_AGE * self._middle / scale
            )
            factor = (back.sum(axis=1, keepdims=True) + _BY_CLASS) / (
                (by_age * exposed).sum(axis=1, keepdims=True) + _BY_CLASS / _CLASSES
            )
        rates: Floats = (back + _BY_CELL) / (exposed + _BY_CELL / (factor * by_age))
        return rates


def _from_zero(steps: Floats) -> Floats:
    """The running sums of each row, from 0."""
    return np.concatenate([np.zeros((len(steps), 1)), np.cumsum(steps, axis=1)], axis=1)
