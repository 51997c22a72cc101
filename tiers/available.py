"""How much memory this process may still take."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Available", "available_memory"]

_ROOT = Path("/")


class Available(NamedTuple):
    """Memory that can be taken now without swapping or being killed."""

    bytes: int
    bound: str
    """What sets the bound, in words."""


def available_memory(root: Path = _ROOT) -> Available | None:
    """The least of what the machine has left and what each cgroup above this process allows; None where the
    system does not say. Page cache that can be dropped counts as available. `root` holds `proc` and `sys`."""
    return min([*_machine(root), *_cgroup_v2(root), *_cgroup_v1(root)], default=None)


def _machine(root: Path) -> Iterator[Available]:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield Available(int(line.split()[1]) * 1024, "what the machine has left")
            return
    if root == _ROOT and "SC_PHYS_PAGES" in os.sysconf_names:
        yield Available(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), "the machine's memory")


def _cgroup_v2(root: Path) -> Iterator[Available]:
    for folder in _folders(root, root / "sys/fs/cgroup", controllers=""):
        yield from _left(folder, "memory.max", "memory.current", "inactive_file")


def _cgroup_v1(root: Path) -> Iterator[Available]:
    for folder in _folders(root, root / "sys/fs/cgroup/memory", controllers="memory"):
        yield from _left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _folders(root: Path, mount: Path, controllers: str) -> Iterator[Path]:
    """The cgroup of this process and those above it. In a container the path may be the host's, of which only the
    part from the mount on is there: folders that are missing are left out by who reads them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names == controllers or (controllers and controllers in names.split(",")):
            folder = mount / path.lstrip("/")
            yield folder
            yield from (parent for parent in folder.parents if parent.is_relative_to(mount))


def _left(folder: Path, limit_file: str, usage_file: str, cache: str) -> Iterator[Available]:
    limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
    if not (limit.isdigit() and usage.isdigit()):  # "max", or not there
        return
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    reclaimable = next((int(value) for name, value in pairs if name == cache), 0)
    left = int(limit) - max(0, int(usage) - reclaimable)
    yield Available(max(0, left), f"the cgroup's limit, {folder / limit_file}")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
