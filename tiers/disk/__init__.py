"""The local disk: slabs of chunks, with an LMDB index. Bounded and private to one engine."""

from .settings import DiskSettings

__all__ = ["DiskSettings"]
