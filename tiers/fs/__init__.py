"""A directory that many engines share, on a network file system or a local one."""

from .settings import FsSettings

__all__ = ["FsSettings"]
