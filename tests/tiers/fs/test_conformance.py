"""The fs tier does what every tier must, shared and exclusive."""

import os
from pathlib import Path

from hypothesis import settings

from kvcascade.testing import TierConformance, TierStateMachine, key_for
from kvcascade.testing.conformance import Opener
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.fs import FsSettings
from kvcascade.tiers.fs.layout import BLOCK, place
from kvcascade.tiers.fs.tier import FsTier
from kvcascade.types import Key

HOUR = 3600.0


class TestShared(TierConformance):
    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        return FsSettings(path=str(path / "kv"), capacity=capacity).open(context)

    def raw_corrupt(self, tier: Tier, key: Key) -> None:
        with path_of(tier, key).open("r+b") as file:
            file.seek(BLOCK)
            (byte,) = file.read(1)
            file.seek(BLOCK)
            file.write(bytes([byte ^ 1]))

    def raw_truncate(self, tier: Tier, key: Key) -> None:
        path = path_of(tier, key)
        os.truncate(path, path.stat().st_size - 1)

    def raw_remove(self, tier: Tier, key: Key) -> None:
        path_of(tier, key).unlink()

    def test_recency_outlives_a_close(self, opener: Opener) -> None:
        """Recency is as fine as an hour: only then does a hit set a file's mtime."""
        tier = opener()
        keys = [key_for(number) for number in range(6)]
        tier.write(keys, [memoryview(bytes(4096))] * 6)
        for age, key in enumerate(keys, 2):
            past = path_of(tier, key).stat().st_mtime - age * HOUR
            os.utime(path_of(tier, key), (past, past))
        tier.close()
        again = opener()
        again.touch(keys[3:5])
        again.maintain(60.0)
        again.close()
        by_use = [entry.key for entry in sorted(opener().entries(), key=lambda entry: entry.used)]
        assert by_use[:4] == [keys[5], keys[2], keys[1], keys[0]]
        assert set(by_use[4:]) == set(keys[3:5])


class TestExclusive(TestShared):
    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        return FsSettings(path=str(path / "kv"), capacity=capacity or 128 << 20, exclusive=True).open(context)


class SharedMachine(TierStateMachine):
    persists = True

    def open(self, path: Path, context: OpenContext) -> Tier:
        return FsSettings(path=str(path), capacity=64 << 20).open(context)


class ExclusiveMachine(TierStateMachine):
    persists = True

    def open(self, path: Path, context: OpenContext) -> Tier:
        return FsSettings(path=str(path), capacity=96 << 10, exclusive=True).open(context)


FEW = settings(max_examples=15, stateful_step_count=25, deadline=None)  # a move to another epoch is synced


TestSharedMachine = SharedMachine.TestCase
TestSharedMachine.settings = FEW
TestExclusiveMachine = ExclusiveMachine.TestCase
TestExclusiveMachine.settings = FEW


def path_of(tier: Tier, key: Key) -> Path:
    assert isinstance(tier, FsTier)
    assert tier._era is not None
    return Path(place(tier._era.folder, key))
