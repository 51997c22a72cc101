"""Engines: what stands between an engine and the manager, in two halves. `SchedulerAdapter` lives in the engine's
scheduler, a `TransferWorker` in each of its workers. Importing this loads no torch."""

from .groups import GroupSpec
from .protocols import NO_BLOCK
from .scheduler import SchedulerAdapter
from .transfers import ChunkCopy, ConnectorMetadata, Direction, EndedLoad, Transfer, WorkerReport
from .worker import GroupLayout, TransferWorker

__all__ = [
    "NO_BLOCK",
    "ChunkCopy",
    "ConnectorMetadata",
    "Direction",
    "EndedLoad",
    "GroupLayout",
    "GroupSpec",
    "SchedulerAdapter",
    "Transfer",
    "TransferWorker",
    "WorkerReport",
]
