"""Corrupt chunks, kept for inspection."""

import contextlib
import secrets
from pathlib import Path

from .layout import Access

__all__ = ["Quarantine"]

KEPT = 16


class Quarantine:
    """The latest few corrupt chunks of a namespace, of all engines together."""

    def __init__(self, folder: Path, access: Access) -> None:
        self._folder = folder
        self._access = access

    def keep(self, path: str) -> None:
        """Moves the file there. A medium that fails here has no say."""
        with contextlib.suppress(OSError):
            self._access.make_folder(self._folder)
            Path(path).replace(self._folder / f"{Path(path).name}-{secrets.token_hex(4)}.chunk")
            kept = sorted(self._folder.glob("*.chunk"), key=lambda file: file.stat().st_mtime)
            for file in kept[:-KEPT]:
                file.unlink(missing_ok=True)
