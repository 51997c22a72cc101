"""The disk tier against a dict, and under threads that want everything at once."""

import random
import threading
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings

from kvcascade.testing import TierStateMachine, buffer, bytes_for, holds, key_for
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.disk import DiskSettings
from kvcascade.tiers.disk.tier import DiskTier
from kvcascade.types import Key, Namespace, OutcomeKind

CHUNK = 16 << 10


class DiskMachine(TierStateMachine):
    persists: ClassVar[bool] = True

    def open(self, path: Path, context: OpenContext) -> Tier:
        return DiskSettings(path=str(path), capacity=2 << 20).open(context)


class TestDiskMachine(DiskMachine.TestCase):
    settings = settings(
        max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )


class Worker(threading.Thread):
    """Does what a lane and a resident table would do, on a full tier, with keys of its own and shared ones."""

    def __init__(self, tier: DiskTier, seed: int, room: int, together: threading.Barrier) -> None:
        super().__init__()
        self.tier = tier
        self.choose = random.Random(seed)
        self.seed = seed
        self.room = room
        self.together = together
        self.mine: list[Key] = []
        self.wrong: list[str] = []
        self.read = 0

    def run(self) -> None:
        self.together.wait(60)
        for number in range(120):
            self.replace(number)
            self.load([key_for(self.choose.randrange(8) * 10_000 + self.choose.randrange(480)) for _ in range(4)])
            self.load(self.choose.sample(self.mine, min(3, len(self.mine))))
            if self.choose.random() < 0.2:
                gone = [self.mine.pop() for _ in range(min(2, len(self.mine)))]
                self.expect(self.tier.delete(gone), ("OK",))
            if self.choose.random() < 0.1:
                self.tier.touch(self.mine)
                self.tier.maintain(0.001)

    def replace(self, number: int) -> None:
        fresh = [key_for(self.seed * 10_000 + number * 4 + place) for place in range(4)]
        excess = max(0, len(self.mine) + len(fresh) - self.room)
        victims, self.mine = self.mine[:excess], self.mine[excess:]
        payloads = [memoryview(bytes_for(key, CHUNK)) for key in fresh]
        self.expect(self.tier.write(fresh, payloads, victims), ("OK",))
        self.mine += fresh

    def load(self, keys: list[Key]) -> None:
        targets = [buffer(CHUNK) for _ in keys]
        outcomes = self.tier.read(keys, targets)
        self.expect(outcomes, ("OK", "MISSING"))
        for key, target, outcome in zip(keys, targets, outcomes, strict=True):
            if outcome.kind is OutcomeKind.OK and not holds(target, key):
                self.wrong.append(f"wrong bytes for {key.hex()}")
            self.read += outcome.ok

    def expect(self, outcomes: list, allowed: tuple[str, ...]) -> None:  # type: ignore[type-arg]
        self.wrong += [str(outcome) for outcome in outcomes if outcome.kind.name not in allowed]


def test_threads_that_share_a_full_tier(tmp_path: Path) -> None:
    """Who keeps to the capacity is never refused, and nobody ever gets another chunk's bytes
    (kvcache-ai/Mooncake#1374, LMCache/LMCache#3022)."""
    settings = DiskSettings(path=str(tmp_path), capacity=2 << 20)
    with settings.open(OpenContext(Namespace.of(model="m"), CHUNK)) as tier:
        assert isinstance(tier, DiskTier)
        room = (tier.usage().capacity or 0) // tier.footprint(CHUNK)
        together = threading.Barrier(8)
        workers = [Worker(tier, seed, room // 8, together) for seed in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
        assert [worker.wrong for worker in workers] == [[]] * 8
        assert all(worker.read for worker in workers)
        kept = {key for worker in workers for key in worker.mine}
        assert {entry.key for entry in tier.entries()} == kept
        assert tier.usage().chunks == len(kept)
        free = sum(extent.free for extent in tier._slabs.extents)
        assert free + len(kept) == sum(extent.slots for extent in tier._slabs.extents)
        assert tier._slabs._pins == {}
        assert tier._ledger.doomed == {}
        assert tier._ledger.charged == tier.usage().bytes
