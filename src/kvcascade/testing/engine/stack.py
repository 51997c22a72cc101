"""The stack below a simulated engine: real tiers, with faults, on lanes that move when the simulation says so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcascade.configs.schema import StackSettings
from kvcascade.manager.jobs import Job, JobKind
from kvcascade.stack import build
from kvcascade.testing.driver import ManualClock
from kvcascade.testing.lanes import ManualLane, WatchedLane
from kvcascade.testing.wrappers import FaultTier
from kvcascade.tiers import Tier
from kvcascade.tiers.disk.settings import DiskSettings
from kvcascade.tiers.host import HostPool, HostSettings
from kvcascade.tiers.memory import MemorySettings, MemoryTier
from kvcascade.types import Buffer, Capabilities, Key, Namespace

__all__ = ["SimulatedStack", "StackShape", "TierShape"]

_STRIDE = 4096


@dataclass(frozen=True, slots=True)
class TierShape:
    """One secondary tier."""

    type: str = "memory"
    """"memory" or "disk"."""
    chunks: int = 20
    """Its capacity; a disk has more."""
    write: str = "through"
    shared: bool = False
    """Whether other engines use it, too."""


@dataclass(frozen=True, slots=True)
class StackShape:
    """What stack it is, and how bad its media are."""

    slots: int = 12
    tiers: tuple[TierShape, ...] = (TierShape(),)
    queue: float = 0.5
    concurrency: int = 2
    seed: int = 0
    faults: dict[str, float] = field(default_factory=dict)


class SimulatedStack:
    """A manager over real tiers.

    Args:
        folder: where disk tiers lie.

    Attributes:
        on_write: is told of each job just before a tier takes its bytes from the slots.
    """

    def __init__(self, shape: StackShape, chunk_bytes: int, folder: Path) -> None:
        self.shape = shape
        self.clock = ManualClock()
        self.media: list[ManualLane] = []
        self.lanes: list[WatchedLane] = []
        self.faults: list[FaultTier] = []
        self._shared: list[MemoryTier] = []
        self._taken: list[tuple[MemoryTier, int, Key, bytes]] = []
        """Chunks that other engines have removed from shared tiers."""
        self.on_submit: Callable[[Job], None] = lambda job: None
        self.on_write: Callable[[Job], None] = lambda job: None
        self.manager = build(
            _settings(shape, chunk_bytes, folder),
            Namespace.of(model="simulated"),
            chunk_bytes,
            events=True,
            clock=self.clock,
            wrap=self._wrap,
            lane=self._lane,
        )
        self.pool: HostPool = self.manager.pool
        self.switch_faults(True)

    def advance(self, picks: Sequence[int]) -> None:
        """Things happen on the media, one for each number."""
        for number, pick in enumerate(picks):
            if self.media:
                self.media[number % len(self.media)].advance(pick)

    def run_all(self) -> None:
        """Everything that the media have been given happens."""
        for lane in self.media:
            lane.run_all()

    def switch_faults(self, active: bool) -> None:
        for fault in self.faults:
            fault.active = active

    def others(self, pick: int) -> None:
        """Another engine removes a chunk from a shared tier, or brings one back, if it is of the tier's epoch."""
        if pick % 3 == 0 and self._taken:
            tier, epoch, key, payload = self._taken.pop(pick // 3 % len(self._taken))
            if epoch == tier._epoch:
                tier.write([key], [memoryview(payload)])
            return
        shared = [(tier, entry) for tier in self._shared for entry in tier.entries()]
        if shared:
            tier, entry = shared[pick % len(shared)]
            buffer = bytearray(entry.nbytes)
            tier.read([entry.key], [memoryview(buffer)])
            tier.delete([entry.key])
            self._taken.append((tier, tier._epoch, entry.key, bytes(buffer)))

    def be_patient(self, patient: bool) -> None:
        """Whether the media have the time that a reset gives them."""
        for lane in self.media:
            lane.patient = patient

    def close(self) -> None:
        self.manager.shutdown(timeout=0.0)

    def _wrap(self, name: str, tier: Tier) -> Tier:
        fault = FaultTier(tier, self.shape.seed, self.shape.faults)
        fault.active = False
        if self.shape.tiers[len(self.faults)].shared and isinstance(tier, MemoryTier):
            fault.capabilities = Capabilities(shared=True)
            self._shared.append(tier)
        self.faults.append(fault)
        return fault

    def _lane(
        self, name: str, tier: Tier, slot: Callable[[int], Buffer], concurrency: int, *others: Any
    ) -> WatchedLane:
        media = ManualLane(tier, slot, concurrency)
        media.on_transfer = self._transfers
        lane = WatchedLane(name, media)
        lane.on_submit = lambda job: self.on_submit(job)
        self.media.append(media)
        self.lanes.append(lane)
        return lane

    def _transfers(self, job: Job) -> None:
        if job.kind is JobKind.WRITE:
            self.on_write(job)


def _settings(shape: StackShape, chunk_bytes: int, folder: Path) -> StackSettings:
    tiers: list[Any] = [
        HostSettings(capacity=(shape.slots + 1) * max(_STRIDE, -(-chunk_bytes // _STRIDE) * _STRIDE))
    ]
    for place, tier in enumerate(shape.tiers):
        common = {"name": f"t{place}", "queue": shape.queue, "concurrency": shape.concurrency, "write": tier.write}
        if tier.type == "disk":
            path = str(folder / f"t{place}")
            tiers.append(DiskSettings.model_validate(common | {"path": path, "capacity": "2MiB"}))
        else:
            tiers.append(MemorySettings.model_validate(common | {"capacity": tier.chunks * chunk_bytes}))
    return StackSettings.model_validate({"version": 1, "log_every": "0s", "tiers": tuple(tiers)})
