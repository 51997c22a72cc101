"""Storage media. Bytes and keys; nothing of requests, engines or the manager.

The types that ship are found by entry point, as a third party's are; importing this loads none of them.
"""

from .base import Holding, OpenContext, Probe, Tier, TierSettings

__all__ = ["Holding", "OpenContext", "Probe", "Tier", "TierSettings"]
