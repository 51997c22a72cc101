"""The connector's half in vLLM's workers."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcascade.connector.transfers import ConnectorMetadata, Direction, Transfer, WorkerReport
from kvcascade.errors import ProtocolError

from . import compat
from .scheduler_side import LostLoad
from .spec import KVCascadeSpec, WorkerTransfers

__all__ = ["WorkerSide"]

_NAMES = {Direction.LOAD: "vllm:kv_offload_load", Direction.STORE: "vllm:kv_offload_store"}


class _Running(NamedTuple):
    transfer: Transfer
    begun: float


class WorkerSide:
    """Our transfer worker, on the thread of one of vLLM's workers. What ends is told twice: to our scheduler's
    half, in a `WorkerReport`; and to vLLM, whose requests wait for their loads."""

    def __init__(self, spec: KVCascadeSpec, by_block: bool) -> None:
        """`by_block`: vLLM is told which blocks were not loaded, and computes from the first of them on; else
        which requests, and it computes all of their tokens."""
        self._spec = spec
        self._by_block = by_block
        self._own: WorkerTransfers | None = None
        self._running: dict[int, _Running] = {}
        self._report = WorkerReport()
        self._lost: list[LostLoad] = []
        self._invalid: set[int] = set()
        self._stats = compat.ConnectorStats()

    def register(self, caches: Any) -> None:
        """The KV tensors are there. `caches`: vLLM's `CanonicalKVCaches`."""
        self._own = self._spec.join(caches)

    def before_forward(self, plan: ConnectorMetadata, lost: Sequence[LostLoad] = ()) -> None:
        """The fence: copies whose blocks are given to somebody else end before anything is computed.

        Args:
            lost: loads of earlier steps that vLLM is to be told of now.
        """
        self._lost += lost
        for transfer in (*plan.loads, *plan.stores):
            self._running[transfer.job] = _Running(transfer, time.monotonic())
        self._joined.transfers.handle_preemptions(plan)

    def start_loads(self, plan: ConnectorMetadata) -> None:
        self._joined.transfers.start_load_kv(plan)

    def note_stores(self, plan: ConnectorMetadata) -> None:
        self._joined.transfers.wait_for_save(plan)

    def take_results(self) -> Any:
        """The requests whose loads have ended since the last call, as vLLM's `KVConnectorTransferResults`.

        Which of them have not brought all, on whatever rank, only the scheduler's half knows: it takes those out,
        and has them told once more as failed.
        """
        results = compat.TransferResults()
        report = self._joined.transfers.get_finished()
        for job in report.ended:
            running = self._running.pop(job)
            self._count(running)
            if running.transfer.direction is Direction.LOAD:
                results.finished_recving.add(running.transfer.req_id)
        self._report.merge(report)
        self._tell_lost(results)
        return results

    def take_invalid_blocks(self) -> set[int]:
        """Device blocks that were to be loaded and were not."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> WorkerReport:
        report, self._report = self._report, WorkerReport()
        return report

    def take_stats(self) -> Any:
        """vLLM's own numbers of what was copied; None where nothing was."""
        stats, self._stats = self._stats, compat.ConnectorStats()
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        if self._own is not None:
            self._own.transfers.shutdown()
            self._own.pool.close()

    @property
    def _joined(self) -> WorkerTransfers:
        if self._own is None:
            raise ProtocolError("a step has come before register_kv_caches")
        return self._own

    def _tell_lost(self, results: Any) -> None:
        for load in self._lost:
            results.finished_recving.add(load.req_id)
            if self._by_block:
                self._invalid.update(load.blocks)
            else:
                results.failed_recving.add(load.req_id)
        self._lost.clear()

    def _count(self, running: _Running) -> None:
        name, sizes = _NAMES[running.transfer.direction], self._joined.block_bytes
        nbytes = sum(sizes[chunk.group] * len(chunk.blocks) for chunk in running.transfer.chunks)
        self._stats.increase_counter(f"{name}_bytes", nbytes)
        self._stats.increase_counter(f"{name}_time", time.monotonic() - running.begun)
        self._stats.observe_histogram(f"{name}_size", nbytes)
