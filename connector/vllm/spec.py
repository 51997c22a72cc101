"""The first way in: an `OffloadingSpec` under vLLM's own OffloadingConnector.

--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
    "kv_connector_extra_config": {"spec_name": "KVCascade", "stack": "stack.yaml"}}'
"""

import logging
from typing import Any, NamedTuple

from kvcascade.connector.worker import TransferWorker
from kvcascade.manager import SecondaryTierManager
from kvcascade.stack import build, pool_slots
from kvcascade.tiers.host import HostPool

from . import compat, identity
from .cache_groups import check_chunks
from .checks import check_engine
from .ledger import CopyLedger
from .logs import log_start, share_handlers
from .manager import CascadeManager
from .media import Place, place_of
from .metrics import definitions
from .options import replica_of, stack_of
from .pool import WorkerPool, join_as_scheduler, join_as_worker
from .worker import CascadeWorker, layout_of

__all__ = ["KVCascadeSpec", "WorkerTransfers"]

logger = logging.getLogger("kvcascade")


class WorkerTransfers(NamedTuple):
    """What a worker copies with."""

    transfers: TransferWorker
    pool: WorkerPool
    block_bytes: list[int]
    """Of one block of each group."""


class KVCascadeSpec(compat.OffloadingSpec):
    """Built in every process of the engine. The constructor only reads the settings; a worker makes or maps the
    pool in `get_worker`, and the scheduler, which comes last, maps it and opens the tiers in `get_manager`.

    Raises:
        ConfigError: the stack can't be used, or can't be used with this engine.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        share_handlers()
        compat.warn_if_untested()
        self._stack = stack_of(config.extra_config)
        self._manager: CascadeManager | None = None
        self._worker: CascadeWorker | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return definitions()

    def get_manager(self) -> CascadeManager:
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def get_worker(self, kv_caches: Any) -> CascadeWorker:
        if self._worker is None:
            self._worker = self._make_worker(kv_caches)
        return self._worker

    def open_stack(self) -> SecondaryTierManager:
        """Maps the pool, which the workers have made, and opens the tiers. In the scheduler's process."""
        shared = join_as_scheduler(self.config.engine_id)
        pool = shared.pool
        namespace = identity.namespace_of(shared.ranks[0]["engine"], [told["rank"] for told in shared.ranks])
        place = replica_of(self.config.parallel)
        stack = build(self._stack, namespace, pool.slot_bytes, place=place, pool=pool, events=self.tells_events)
        log_start("under vLLM", stack.get_stats(), stack.pool.slot_bytes, self.config, namespace)
        return stack

    @property
    def places(self) -> list[Place]:
        """The tiers in vLLM's terms."""
        return [place_of(tier) for tier in self._stack.tiers]

    @property
    def tells_events(self) -> bool:
        return bool(self.kv_events_config.enable_kv_cache_events)

    def join(self, kv_caches: Any) -> WorkerTransfers:
        """Makes or maps the pool, and checks the engine. In a worker's process; `kv_caches`: vLLM's
        `CanonicalKVCaches`."""
        engine, parallel = compat.current_config(), self.config.parallel
        check_engine(engine, self._stack)
        tensors, groups = layout_of(kv_caches, self.blocks_per_chunk)
        needed = TransferWorker.part_bytes(tensors, groups)
        told = {"rank": identity.rank_parts(engine, self.config, kv_caches)}
        if parallel.rank == 0:
            told["engine"] = identity.engine_parts(engine, compat.version)
        pool = join_as_worker(
            self.config.engine_id, parallel.rank, parallel.world_size, needed, told, self._make_pool
        )
        transfers = TransferWorker(tensors, groups, pool.pool, offset=parallel.rank * pool.part_bytes)
        block_bytes = [sum(tensors[tensor].shape[1] for tensor in group.tensors) for group in groups]
        return WorkerTransfers(transfers, pool, block_bytes)

    def _make_manager(self) -> CascadeManager:
        check_chunks(self.config)
        stack = self.open_stack()
        ledger = CopyLedger(stack.pool.marks, stack.pool.slots)
        return CascadeManager(stack, ledger, self.places, self.tells_events)

    def _make_worker(self, kv_caches: Any) -> CascadeWorker:
        own = self.join(kv_caches)
        return CascadeWorker(
            own.transfers, own.pool, self.config.parallel.rank, self.blocks_per_chunk, own.block_bytes
        )

    def _make_pool(self, part_bytes: int) -> HostPool:
        ranks = self.config.parallel.world_size
        slot_bytes = part_bytes * ranks
        return HostPool(pool_slots(self._stack, slot_bytes), slot_bytes, ranks=ranks)
