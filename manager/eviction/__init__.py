"""Eviction policies: which chunk of a full tier goes next. Found by entry point (`kvcascade.eviction`)."""

from .base import EvictionPolicy
from .lru import LruPolicy

__all__ = ["EvictionPolicy", "LruPolicy"]
