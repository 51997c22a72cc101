"""The state machine finds faults that need a sequence of calls."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvcascade.testing import TierStateMachine
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.memory import MemoryTier
from kvcascade.types import Buffer, Key, Outcome

QUICK = settings(max_examples=200, deadline=None, derandomize=True, database=None, phases=[Phase.generate])


class ForgetsToCountVictims(MemoryTier):
    def write(self, keys: Sequence[Key], buffers: Sequence[Buffer], victims: Sequence[Key] = ()) -> list[Outcome]:
        before = self._bytes
        self.delete(victims)
        self._bytes = before
        return super().write(keys, buffers)


class RefusesWhatItHasWhenFull(MemoryTier):
    def _put(self, key: Key, payload: bytes, epoch: int) -> Outcome:
        if self._bytes + len(payload) > (self._capacity or 0):
            return Outcome.REFUSED
        return super()._put(key, payload, epoch)


class KeepsTheOnlyChunkInAMove(MemoryTier):
    def move_to(self, epoch: str) -> None:
        if not self._chunks or len(self._chunks) > 1:
            super().move_to(epoch)


@pytest.mark.parametrize("faulty", [ForgetsToCountVictims, RefusesWhatItHasWhenFull, KeepsTheOnlyChunkInAMove])
def test_a_fault_is_found(faulty: type[MemoryTier]) -> None:
    class Machine(TierStateMachine):
        def open(self, path: Path, context: OpenContext) -> Tier:
            return faulty(32 << 10)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=QUICK)
