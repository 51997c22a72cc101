"""`SecondaryTierManager`, and what it is made of: slots, residency, eviction, jobs, lanes, request states."""

from .events import Event
from .manager import ResetReport, SecondaryTierManager
from .stats import Histogram, StackStats, TierStats

__all__ = ["Event", "Histogram", "ResetReport", "SecondaryTierManager", "StackStats", "TierStats"]
