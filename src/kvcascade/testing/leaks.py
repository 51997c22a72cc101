"""A fixture that fails a test which leaves file descriptors, threads or shared memory behind.

# conftest.py
from kvcascade.testing import no_leaks
__all__ = ["no_leaks"]
"""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

__all__ = ["no_leaks"]

GRACE = 3.0  # seconds in which threads and processes that were told to end may do so
OURS = "kvcascade"


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Compares what is open before and after each test; on Linux files and shared memory, elsewhere threads only.

    Shared memory counts by name: files in /dev/shm and mappings of memfds whose name begins with "kvcascade".
    """
    before = _open_things()
    yield
    left = _open_things() - before
    if left:
        gc.collect()
    deadline = time.monotonic() + GRACE
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = _open_things() - before
    if left:
        pytest.fail("left behind: " + ", ".join(sorted(map(str, left))))


def _open_things() -> set[tuple[str, str, str]]:
    return _descriptors() | _threads() | _shared_memory()


def _descriptors() -> set[tuple[str, str, str]]:
    found = set()
    for link in _listed("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor that lists the folder is gone by now
            found.add(("file descriptor", link.name, str(link.readlink())))
    return found


def _threads() -> set[tuple[str, str, str]]:
    return {("thread", thread.name, str(thread.ident)) for thread in threading.enumerate()}


def _shared_memory() -> set[tuple[str, str, str]]:
    found = {("shared memory", file.name, "") for file in _listed("/dev/shm") if file.name.startswith(OURS)}
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        if f"/memfd:{OURS}" in line:
            found.add(("mapping", line.split(maxsplit=5)[-1], line.split()[0]))
    return found


def _listed(folder: str) -> list[Path]:
    return list(Path(folder).iterdir()) if Path(folder).exists() else []
