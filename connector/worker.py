"""`TransferWorker`: moves chunks between device blocks and host slots. The half that lives in each worker."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcascade.errors import ConfigError, ProtocolError

from .copies import Copier, Piece, Slots, Ticket, copier_for, rows
from .protocols import NO_BLOCK
from .transfers import ChunkCopy, ConnectorMetadata, Transfer, WorkerReport

if TYPE_CHECKING:
    import torch

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

    Stores start late so that they do not compete with the sampling of the step that has computed their blocks. All
    calls come from one thread, the engine's. Only `handle_preemptions` waits, and only for the flush list. A copy
    that fails is reported, with its chunks; nothing is raised for it.

    A chunk lies in this worker's part of its slot tensor by tensor, each with its blocks one after the other.
    """

    def __init__(
        self,
        tensors: Sequence["torch.Tensor"],
        groups: Sequence[GroupLayout],
        pool: Slots,
        *,
        offset: int = 0,
        copier: Copier | None = None,
    ) -> None:
        """Args:
            tensors: the KV memory, each of shape (blocks, ...), the bytes of a block together; all on one device.
            groups: as the adapter's groups, in their order.
            pool: the slots; a `HostPool`.
            offset: where in a slot this worker's part begins: rank times `part_bytes`.
            copier: by default one for the tensors' device.

        Raises:
            ConfigError: tensors and groups that do not fit each other or the slots.
        """
        _check_layout(tensors, groups)
        memory = [rows(tensor) for tensor in tensors]
        self._block_bytes = [tensor.shape[1] for tensor in memory]
        self._blocks = min(tensor.shape[0] for tensor in memory)
        self._groups = tuple(groups)
        self._slots = pool.slots
        self._offset = offset
        end, size = offset + self.part_bytes(tensors, groups), len(pool.slot(0))
        if offset < 0 or end > size:
            raise ConfigError(
                f"bytes {offset} to {end} of a slot: slots have {size} bytes; all ranks' parts must fit"
            )
        self._copier: Copier = copier or copier_for(memory, pool)
        self._deferred: deque[tuple[Transfer, Any]] = deque()
        self._running: dict[int, Ticket] = {}

    @staticmethod
    def part_bytes(tensors: Sequence["torch.Tensor"], groups: Sequence[GroupLayout]) -> int:
        """Bytes of a slot that one worker takes: a chunk of its largest group."""
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in tensors]
        return max(group.blocks_per_chunk * sum(sizes[tensor] for tensor in group.tensors) for group in groups)

    def handle_preemptions(self, metadata: ConnectorMetadata) -> None:
        """Before the engine computes: starts the stores of the step before, and those that must be flushed; waits
        for all that must be."""
        self._start_deferred()
        urgent = [transfer for transfer in metadata.stores if transfer.job in metadata.flush]
        fence = self._copier.fence() if urgent else None
        for transfer in urgent:
            self._start(transfer, fence)
        for job in metadata.flush:
            if job in self._running:
                self._running[job].wait()

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """Starts the step's loads, after all that has been given to the device before."""
        self._start_deferred()
        fence = self._copier.fence() if metadata.loads else None
        for transfer in metadata.loads:
            self._start(transfer, fence)

    def wait_for_save(self, metadata: ConnectorMetadata) -> None:
        """The step has been given to the device: its stores will run after it, and start in the next step."""
        later = [transfer for transfer in metadata.stores if transfer.job not in metadata.flush]
        fence = self._copier.fence() if later else None
        self._deferred += [(transfer, fence) for transfer in later]

    def get_finished(self) -> WorkerReport:
        """What has ended since the last call, each job once. Never waits."""
        report = WorkerReport()
        for job in [job for job, ticket in self._running.items() if ticket.done()]:
            report.add(job, self._running.pop(job).failed())
        return report

    def shutdown(self) -> None:
        """Ends the copies that have started, forgets the others, releases the device's resources. Idempotent."""
        self._deferred.clear()
        self._running.clear()
        self._copier.close()

    def _start_deferred(self) -> None:
        while self._deferred:
            self._start(*self._deferred.popleft())

    def _start(self, transfer: Transfer, fence: Any) -> None:
        if transfer.job in self._running:
            raise ProtocolError(f"job {transfer.job} is running already")
        pieces = [self._pieces(chunk) for chunk in transfer.chunks]
        self._running[transfer.job] = self._copier.start(pieces, transfer.direction, fence)

    def _pieces(self, chunk: ChunkCopy) -> list[Piece]:
        """The copies that make up a chunk: for each tensor, runs of consecutive blocks."""
        group = self._check(chunk)
        runs = _runs(chunk.blocks)
        start = self._offset
        pieces = []
        for tensor in group.tensors:
            nbytes = self._block_bytes[tensor]
            for place, block, count in runs:
                pieces.append(Piece(tensor, block, count, chunk.slot, start + (chunk.first + place) * nbytes))
            start += group.blocks_per_chunk * nbytes
        return pieces

    def _check(self, chunk: ChunkCopy) -> GroupLayout:
        """Nothing outside the tensors and the slots is ever touched."""
        number, slot, first, blocks = chunk
        if not 0 <= number < len(self._groups):
            raise ProtocolError(f"{chunk}: groups are 0 to {len(self._groups) - 1}")
        group = self._groups[number]
        if not 0 <= slot < self._slots or not 0 <= first <= group.blocks_per_chunk - len(blocks):
            raise ProtocolError(
                f"{chunk}: slots are 0 to {self._slots - 1}, chunks of {group.blocks_per_chunk} blocks"
            )
        if blocks and not 0 <= min(blocks) <= max(blocks) < self._blocks:
            raise ProtocolError(f"{chunk}: blocks are 0 to {self._blocks - 1}")
        return group


def _runs(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Place, first block and number of each run of consecutive blocks; `NO_BLOCK` is in none."""
    if len(blocks) == 1:
        return [(0, blocks[0], 1)] if blocks[0] != NO_BLOCK else []
    runs = []
    place = 0
    while place < len(blocks):
        end = place + 1
        if blocks[place] != NO_BLOCK:
            while end < len(blocks) and blocks[end] == blocks[end - 1] + 1:
                end += 1
            runs.append((place, blocks[place], end - place))
        place = end
    return runs


def _check_layout(tensors: Sequence["torch.Tensor"], groups: Sequence[GroupLayout]) -> None:
    if not tensors or not groups:
        raise ConfigError("a worker needs at least one KV tensor and one group")
    for number, group in enumerate(groups):
        if group.blocks_per_chunk < 1 or not group.tensors or not set(group.tensors) <= set(range(len(tensors))):
            raise ConfigError(
                f"groups[{number}]: {group}; at least 1 block a chunk, and tensors out of 0 to {len(tensors) - 1}"
            )
