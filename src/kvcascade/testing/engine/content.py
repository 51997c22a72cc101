"""What the chunk of each key must hold."""

from typing import Any

import numpy as np

from kvcascade.connector.coverage import first_needed_block, hit_unit
from kvcascade.testing.invariants import BrokenInvariantError, require
from kvcascade.types import Key

from .engine import SimulatedEngine
from .model import NO_WORD, UNSETTLED, certain_bits, prefix_hashes, settled
from .requests import SimRequest

__all__ = ["Content"]


class Content:
    """What the chunk of each key must hold, and what a slot or a tier holds instead."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        self._shape = engine.shape
        self._groups = engine.shape.groups
        self._unit = hit_unit(self._groups)
        self._part = engine.part_bytes(engine.shape) // 8
        self._tokens: dict[Key, tuple[int, list[int]]] = {}
        """Key -> the chunk's place, and the prefixes of its tokens."""
        self._seen: dict[SimRequest, int] = {}
        self._expected: dict[tuple[Key, int], Any] = {}

    def learn(self, request: SimRequest) -> None:
        """Takes note of the chunks whose hashes the request has."""
        known, count = self._seen.get(request, 0), len(request.block_hashes)
        if count == known:
            return
        prefixes = prefix_hashes(request.all_token_ids[: count * self._shape.tokens_per_block])
        for group in self._groups:
            size, keys = group.tokens_per_chunk, self._shape.keys(request, group)
            for chunk in range(known // group.blocks_per_chunk, len(keys)):
                self._tokens[keys[chunk]] = chunk, prefixes[chunk * size : (chunk + 1) * size]
        self._seen[request] = count

    def forget(self, request: SimRequest) -> None:
        self._seen.pop(request, None)

    def check(self, key: Key, view: Any, where: str, weights: int | None = None) -> None:
        """Compares every byte that a load may read of a chunk.

        Raises:
            BrokenInvariantError: one is wrong.
        """
        weights = self._engine.model.weights if weights is None else weights
        words, matters = self._words(key, weights)
        found = np.frombuffer(view, np.uint64)
        wrong = np.flatnonzero((found ^ words) & matters)
        if not len(wrong):
            return
        held = found[wrong[0]]
        what = "what nobody has computed" if held == np.uint64(NO_WORD) else f"{int(held):#018x}"
        raise BrokenInvariantError(
            f"{where}: chunk {self._tokens[key][0]} of group {int.from_bytes(key[-4:], 'big')}, key "
            f"{key.hex()[:8]}: word {wrong[0]} of {len(words)} is {what}, and {len(wrong)} in all are wrong"
        )

    def check_settled(self, key: Key, view: Any, where: str) -> None:
        """What a chunk of a draft model holds for its last token was computed when the token after was known.

        Raises:
            BrokenInvariantError: it was not.
        """
        chunk, prefixes = self._tokens[key]
        group, count = int.from_bytes(key[-4:], "big"), len(prefixes)
        found = np.frombuffer(view, np.uint64)
        for rank in self._engine.workers.ranks:
            at = rank.device.rank * self._part
            last = found[at + count - 1 : at + count * len(rank.device.layers[group]) : count]
            require(bool(settled(last).all()), f"{where}: chunk {chunk} of group {group} will be written again")

    def _words(self, key: Key, weights: int) -> Any:
        found = self._expected.get((key, weights))
        if found is None:
            found = self._expected[key, weights] = self._build(key, weights)
        return found

    def _build(self, key: Key, weights: int) -> Any:
        chunk, prefixes = self._tokens[key]
        group = int.from_bytes(key[-4:], "big")
        spec, size = self._groups[group], self._shape.tokens_per_block
        first = first_needed_block(spec, chunk, self._unit) * size
        certain = certain_bits(0, len(prefixes), size, spec.draft)
        words = np.zeros(self._part * self._shape.ranks, np.uint64)
        matters = np.zeros_like(words)
        for rank in self._engine.workers.ranks:
            at = rank.device.rank * self._part
            for layer in rank.device.layers[group]:
                words[at : at + len(prefixes)] = self._engine.model.words(
                    prefixes, rank.device.rank, group, layer, weights, UNSETTLED if spec.draft else None
                )
                matters[at + first : at + len(prefixes)] = certain[first:]
                at += len(prefixes)
        return words, matters
