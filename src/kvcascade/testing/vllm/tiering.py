"""vLLM's TieringOffloadingSpec on a CPU, for tests: it refuses to build a worker there, so it is given one that
copies within host memory. All else, the scheduler's half above all, is vLLM's own."""

import time
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvcascade.connector.transfers import ConnectorMetadata, Direction, Transfer
from kvcascade.connector.vllm import compat
from kvcascade.connector.vllm.worker import chunk_copies, layout_of
from kvcascade.connector.worker import TransferWorker
from kvcascade.types import Buffer

__all__ = ["HostCopySpec"]


class HostCopySpec(TieringOffloadingSpec):
    """Overrides `get_worker`; and takes the name of the shared memory away when all have mapped it, so that an
    engine that a test kills leaves nothing in /dev/shm."""

    _worker: Any

    def get_manager(self) -> Any:
        manager = super().get_manager()  # the scheduler comes after the workers
        Path(self._scheduler_mmap.mmap_path).unlink(missing_ok=True)
        return manager

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            tensors, groups = layout_of(kv_caches, self.blocks_per_chunk)
            offset = self.config.parallel.rank * self.cpu_page_size_per_worker
            transfers = TransferWorker(tensors, groups, _Region(region), offset=offset)
            self._worker = _HostCopyWorker(transfers, region, self.blocks_per_chunk)
        return self._worker


class _Region:
    """vLLM's shared memory as the slots that our copies go to."""

    def __init__(self, region: SharedOffloadRegion) -> None:
        view: memoryview = region.create_kv_memoryview()
        self.slots = len(view)
        self._row = view.nbytes // self.slots
        self._bytes = view.cast("B")

    def slot(self, index: int) -> Buffer:
        return self._bytes[index * self._row : (index + 1) * self._row]


class _HostCopyWorker(compat.OffloadingWorker):
    def __init__(self, transfers: TransferWorker, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._transfers = transfers
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._begun: dict[int, float] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        transfer = self._transfer(job_id, Direction.STORE, src_spec, dst_spec)
        self._transfers.wait_for_save(ConnectorMetadata(stores=[transfer]))
        self._transfers.handle_preemptions(ConnectorMetadata())
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        transfer = self._transfer(job_id, Direction.LOAD, dst_spec, src_spec)
        self._transfers.start_load_kv(ConnectorMetadata(loads=[transfer]))
        return True

    def get_finished(self) -> list[Any]:
        report = self._transfers.get_finished()
        if any(report.failed.values()):
            raise RuntimeError(f"a copy within host memory has failed: {report.failed}")
        return [
            compat.TransferResult(
                job_id=job,
                success=True,
                transfer_size=0,
                transfer_time=time.monotonic() - self._begun.pop(job),
            )
            for job in report.ended
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._transfers.handle_preemptions(ConnectorMetadata(flush=set(job_ids)))

    def shutdown(self) -> None:
        self._transfers.shutdown()
        self._region.cleanup()

    def _transfer(self, job_id: int, direction: Direction, device: Any, host: Any) -> Transfer:
        self._begun[job_id] = time.monotonic()
        slots = [int(chunk) for chunk in host.chunk_ids]
        return Transfer(job_id, "", direction, chunk_copies(device, slots, self._blocks_per_chunk))
