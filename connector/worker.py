"""`TransferWorker`: moves chunks between device blocks and host slots. The half that lives in each worker."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcascade.types import Buffer

from .transfers import ConnectorMetadata, WorkerReport

if TYPE_CHECKING:
    import torch

    from .copies import Copier

__all__ = ["GroupLayout", "TransferWorker"]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where the blocks of one group lie in this worker's KV tensors."""

    blocks_per_chunk: int
    tensors: tuple[int, ...]
    """Which tensors hold a part of each block: usually one a layer."""


class TransferWorker:
    """Moves chunks between this worker's KV tensors and the slots of the host pool. In each step, in this order:

        handle_preemptions   before the engine computes: stores of the step before start, the flush list is awaited
        start_load_kv        loads start
        wait_for_save        after the engine has computed: stores are noted, to start in the next step
        get_finished         what has ended

    All calls come from one thread, the engine's. Only `handle_preemptions` waits, and only for the flush list.
    A copy that fails is reported, with its chunks; nothing is raised for it.
    """

    def __init__(
        self,
        tensors: Sequence["torch.Tensor"],
        groups: Sequence[GroupLayout],
        slot: Callable[[int], Buffer],
        *,
        offset: int = 0,
        copier: "Copier | None" = None,
    ) -> None:
        """Args:
        tensors: the KV memory, each of shape (blocks, ...), one block contiguous; all on one device.
        groups: as the adapter's groups, in their order.
        slot: the bytes of a slot; `HostPool.slot`.
        offset: where in a slot this worker's part begins: rank times `part_bytes`.
        copier: by default one for the tensors' device.
        """
        raise NotImplementedError

    @staticmethod
    def part_bytes(tensors: Sequence["torch.Tensor"], groups: Sequence[GroupLayout]) -> int:
        """Bytes of a slot that one worker takes: a chunk of its largest group."""
        raise NotImplementedError

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        raise NotImplementedError

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        raise NotImplementedError

    def wait_for_save(self, metadata: ConnectorMetadata) -> None:
        raise NotImplementedError

    def get_finished(self) -> WorkerReport:
        """What has ended since the last call, each job once. Never waits."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """Ends the copies that have started, forgets the others, releases the device's resources. Idempotent."""
        raise NotImplementedError
