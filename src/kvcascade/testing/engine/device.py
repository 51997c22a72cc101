"""The KV memory of one worker, in real bytes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcascade.connector import GroupLayout

from .model import NO_WORD, UNSETTLED, Model, certain_bits
from .shape import EngineShape

__all__ = ["Device"]

_WORD = 8


class Device:
    """One tensor for each layer, of all blocks; a token has 8 bytes in each. Groups share the tensors, as their
    blocks are never the same; a group has one layer less than the group before it, so that sizes differ.

    Attributes:
        tensors: what a `TransferWorker` gets.
        layers: for each group, which of them it uses.
        layouts: the same, as a `TransferWorker` is told.
    """

    def __init__(self, shape: EngineShape, rank: int, model: Model) -> None:
        import torch

        self.rank = rank
        self.model = model
        self.layers = [tuple(range(max(1, shape.layers - group))) for group in range(len(shape.windows))]
        self._size = shape.tokens_per_block
        self._drafts = shape.draft_groups
        self.tensors = [
            torch.full((shape.blocks, self._size * _WORD), NO_WORD & 0xFF, dtype=torch.uint8)
            for _ in range(shape.layers)
        ]
        self.layouts = [
            GroupLayout(group.blocks_per_chunk, layers)
            for group, layers in zip(shape.groups, self.layers, strict=True)
        ]
        self._words = [tensor.numpy().view(np.uint64).reshape(-1) for tensor in self.tensors]

    def write(self, group: int, table: Sequence[int], start: int, prefixes: Sequence[int], after: int) -> None:
        """Computes the tokens of these prefixes, which stand at `start` and after in a request's blocks.

        Args:
            after: the prefix of the token that follows them, or `UNSETTLED`.
        """
        where = self._places(table, start, len(prefixes))
        for layer in self.layers[group]:
            self._words[layer][where] = self._right(group, layer, prefixes, after)

    def spoil(self, group: int, table: Sequence[int], start: int, count: int) -> None:
        """What was computed here belongs to no token of any request."""
        where = self._places(table, start, count)
        for layer in self.layers[group]:
            self._words[layer][where] = np.uint64(NO_WORD)

    def wrong(self, group: int, table: Sequence[int], start: int, prefixes: Sequence[int]) -> list[int]:
        """Places, in the request, of the tokens whose KV is not right."""
        where = self._places(table, start, len(prefixes))
        certain = certain_bits(start, len(prefixes), self._size, group in self._drafts)
        bad = np.zeros(len(prefixes), bool)
        for layer in self.layers[group]:
            right = self._right(group, layer, prefixes, UNSETTLED)
            bad |= (self._words[layer][where] ^ right) & certain != 0
        return [start + int(place) for place in np.flatnonzero(bad)]

    def _right(self, group: int, layer: int, prefixes: Sequence[int], after: int) -> Any:
        return self.model.words(prefixes, self.rank, group, layer, after=after if group in self._drafts else None)

    def _places(self, table: Sequence[int], start: int, count: int) -> Any:
        tokens = np.arange(start, start + count)
        return np.asarray(table, np.int64)[tokens // self._size] * self._size + tokens % self._size
