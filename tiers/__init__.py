"""Storage media. Bytes and keys; nothing of requests, engines or the manager.

The types that ship are found by entry point, as a third party's are; importing this loads none of them.
"""

from .base import OpenContext, Probe, Tier, TierSettings
from .stored import Holding, Reading, Removed, StoredChunk, StoredEpoch, StoredNamespace

__all__ = [
    "Holding",
    "OpenContext",
    "Probe",
    "Reading",
    "Removed",
    "StoredChunk",
    "StoredEpoch",
    "StoredNamespace",
    "Tier",
    "TierSettings",
]
