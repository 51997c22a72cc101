"""Our `TransferWorker` as vLLM's `OffloadingWorker`."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcascade.connector.transfers import ChunkCopy, ConnectorMetadata, Direction, Transfer
from kvcascade.connector.worker import GroupLayout, TransferWorker
from kvcascade.errors import KVCascadeError

from . import compat
from .pool import WorkerPool
from .slots import SlotSpec

if TYPE_CHECKING:
    import torch

__all__ = ["CascadeWorker", "chunk_copies", "layout_of"]

logger = logging.getLogger("kvcascade")

_LOAD_TRIES = 3


@dataclass(slots=True)
class _Running:
    transfer: Transfer
    begun: float
    nbytes: int
    tries: int = 1


class CascadeWorker(compat.OffloadingWorker):
    """Runs in one of vLLM's workers, on its thread. It marks the end of every copy in the pool, and there also
    which have failed, since vLLM's protocol has no word for that: a failed store is reported as ended, and the
    manager drops the chunk. A failed load is tried again; vLLM has no way to go on without it.
    """

    def __init__(
        self,
        transfers: TransferWorker,
        pool: WorkerPool,
        rank: int,
        blocks_per_chunk: int,
        block_bytes: Sequence[int],
    ) -> None:
        """`block_bytes`: of one block of each group."""
        self._transfers = transfers
        self._pool = pool
        self._marks = pool.pool.marks
        self._rank = rank
        self._blocks_per_chunk = blocks_per_chunk
        self._block_bytes = block_bytes
        self._running: dict[int, _Running] = {}
        self._refused: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: SlotSpec) -> bool:
        if len(src_spec.block_ids) != len(dst_spec.slots) * self._blocks_per_chunk:
            self._refuse(job_id, dst_spec)
            return True
        transfer = self._begin(job_id, Direction.STORE, src_spec, dst_spec)
        self._transfers.wait_for_save(ConnectorMetadata(stores=[transfer]))
        self._transfers.handle_preemptions(
            ConnectorMetadata()
        )  # starts it, after what the device was given so far
        return True

    def submit_load(self, job_id: int, src_spec: SlotSpec, dst_spec: Any) -> bool:
        transfer = self._begin(job_id, Direction.LOAD, dst_spec, src_spec)
        self._transfers.start_load_kv(ConnectorMetadata(loads=[transfer]))
        return True

    def get_finished(self) -> list[Any]:
        report = self._transfers.get_finished()
        results = [self._end(job, report.failed.get(job, set())) for job in report.ended]
        refused, self._refused = self._refused, []
        return refused + [result for result in results if result is not None]

    def wait(self, job_ids: set[int]) -> None:
        self._transfers.handle_preemptions(ConnectorMetadata(flush=set(job_ids)))

    def shutdown(self) -> None:
        self._transfers.shutdown()
        self._pool.close()

    def _begin(self, job_id: int, direction: Direction, device: Any, host: SlotSpec) -> Transfer:
        chunks = chunk_copies(device, host.slots, self._blocks_per_chunk)
        transfer = Transfer(job_id, "", direction, chunks)
        nbytes = sum(len(chunk.blocks) * self._block_bytes[chunk.group] for chunk in chunks)
        self._running[job_id] = _Running(transfer, time.monotonic(), nbytes)
        return transfer

    def _refuse(self, job_id: int, host: SlotSpec) -> None:
        """A store without all blocks of its chunks: vLLM leaves out those that a sliding window has passed, and
        does not say which. All of it has failed, since nobody can tell what belongs where."""
        logger.warning("a store of %d chunks lacks blocks, and is left out", len(host.slots))
        self._marks.end(self._rank, host.slots, set(host.slots))
        self._refused.append(
            compat.TransferResult(job_id=job_id, success=True, transfer_size=0, transfer_time=0.0)
        )

    def _end(self, job_id: int, failed: set[int]) -> Any:
        running = self._running[job_id]
        transfer = running.transfer
        if failed and transfer.direction is Direction.LOAD:
            self._load_again(running)
            return None
        del self._running[job_id]
        slots = [chunk.slot for chunk in transfer.chunks]
        self._marks.end(self._rank, slots, {slots[place] for place in failed})
        return compat.TransferResult(
            job_id=job_id,
            success=True,
            transfer_size=running.nbytes,
            transfer_time=time.monotonic() - running.begun,
        )

    def _load_again(self, running: _Running) -> None:
        """
        Raises:
            KVCascadeError: it has failed too often. The engine ends: a request would read blocks without content.
        """
        if running.tries == _LOAD_TRIES:
            raise KVCascadeError(
                f"a copy from host memory to the device has failed {_LOAD_TRIES} times; vLLM's "
                f"OffloadingConnector has no way to compute those tokens instead"
            )
        running.tries += 1
        self._transfers.start_load_kv(ConnectorMetadata(loads=[running.transfer]))


def chunk_copies(device: Any, slots: Sequence[int], blocks_per_chunk: int) -> tuple[ChunkCopy, ...]:
    """The chunks of one of vLLM's transfers.

    Args:
        device: vLLM's `GPULoadStoreSpec`: blocks of each group, one after the other; the first and the last
            chunk of a group may be partial.
        slots: one for each chunk, in the same order.
    """
    chunks = []
    blocks = [int(block) for block in device.block_ids]
    start, place = 0, 0
    for group, (size, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
        end = start + size
        first = index % blocks_per_chunk
        while start < end:
            stop = min(end, start + blocks_per_chunk - first)
            chunks.append(ChunkCopy(group, slots[place], first, tuple(blocks[start:stop])))
            start, place, first = stop, place + 1, 0
    if place != len(slots) or start != len(blocks):
        raise KVCascadeError(f"vLLM's transfer of {len(blocks)} blocks has {place} chunks and {len(slots)} slots")
    return tuple(chunks)


def layout_of(caches: Any, blocks_per_chunk: int) -> "tuple[list[torch.Tensor], list[GroupLayout]]":
    """The KV tensors and groups of vLLM's `CanonicalKVCaches`, without the padding of their pages."""
    places: dict[tuple[int, int], int] = {}
    groups = []
    for refs in caches.group_data_refs:
        used = [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
        for use in used:
            places.setdefault(use, len(places))
        groups.append(GroupLayout(blocks_per_chunk, tuple(places[use] for use in used)))
    return [caches.tensors[tensor].tensor[:, :nbytes] for tensor, nbytes in places], groups
