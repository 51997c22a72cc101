"""How bytes move between a device and the host: one copier for each kind of device."""

from typing import Protocol

__all__ = ["Copier"]


class Copier(Protocol):
    """Starts copies and says when they have ended."""
