"""Paths as settings give them."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

__all__ = ["FolderPath"]


def _absolute(path: str) -> str:
    if not path.strip():
        raise ValueError("is empty; expected a folder")
    if "\0" in path:
        raise ValueError("holds a zero byte; expected a folder")
    return str(Path(path).expanduser().absolute())


FolderPath = Annotated[str, Field(description="a folder"), AfterValidator(_absolute)]
"""A folder, which need not exist; made absolute."""
