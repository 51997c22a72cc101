"""Counters of the adapter. They only grow."""

from dataclasses import dataclass
from typing import Any

__all__ = ["AdapterStats"]


@dataclass(slots=True)
class AdapterStats:
    """What the adapter has decided so far, and what became of it."""

    stores: int = 0
    """Store jobs given to the workers."""
    loads: int = 0
    """Load jobs given to the workers."""
    refused_offers: int = 0
    """Offers that the manager had no room for; those of running requests were made again."""
    lost_chunks: int = 0
    """Chunks of the last offer of a finished request that the manager had no room for."""
    failed_stores: int = 0
    """Chunks that some worker could not copy to the host."""
    failed_loads: int = 0
    """Chunks that some worker could not copy to the device."""
    deferred: int = 0
    """Answers 'not known yet'."""
    flushed: int = 0
    """Jobs that workers had to wait for, since their blocks were given to somebody else."""
    late_reports: int = 0
    """Reports of jobs of before a reset that were over already."""
    manager: Any = None
    """The manager's own counters."""
