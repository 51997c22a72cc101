"""A fixture that fails a test which leaves file descriptors, threads or shared memory behind.

# conftest.py
from kvcascade.testing import no_leaks
__all__ = ["no_leaks"]
"""

import gc
import os
import threading
import time
from collections.abc import Iterator
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
    folder = Path("/proc/self/fd")
    for number in os.listdir(folder) if folder.exists() else ():
        try:
            found.add(("file descriptor", number, os.readlink(folder / number)))
        except FileNotFoundError:
            continue  # the one that listed the folder
    return found


def _threads() -> set[tuple[str, str, str]]:
    return {("thread", thread.name, str(thread.ident)) for thread in threading.enumerate()}


def _shared_memory() -> set[tuple[str, str, str]]:
    folder = Path("/dev/shm")
    found = (
        {("shared memory", name, "") for name in os.listdir(folder) if name.startswith(OURS)}
        if folder.exists()
        else set()
    )
    maps = Path("/proc/self/maps")
    if maps.exists():
        lines = [line for line in maps.read_text().splitlines() if f"/memfd:{OURS}" in line]
        found |= {("mapping", line.split(maxsplit=5)[-1], line.split()[0]) for line in lines}
    return found
