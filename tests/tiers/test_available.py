"""How much memory there is, read from files as the kernel writes them."""

from pathlib import Path

import pytest

from kvcascade.tiers.available import available_memory

GIB = 1 << 30
MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MACHINE = {"proc/meminfo": f"MemTotal: {64 * MIB} kB\nMemFree: 7 kB\nMemAvailable:    {16 * MIB} kB\n"}


def test_without_cgroups_it_is_what_the_machine_has_left(tmp_path: Path) -> None:
    available = available_memory(write(tmp_path, MACHINE))
    assert available is not None
    assert available.bytes == 16 * GIB
    assert available.bound == "what the machine has left"


def test_where_the_system_says_nothing_nothing_is_known(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"a": f"{4 * GIB}", "a/b": "max"}, 3 * GIB),
        ({"a": "max", "a/b": f"{2 * GIB}"}, GIB),
        ({"a": f"{8 * GIB}", "a/b": f"{5 * GIB}"}, 4 * GIB),
        ({"a": "max", "a/b": "max"}, 16 * GIB),
        ({"a": f"{GIB // 2}", "a/b": "max"}, 0),
    ],
)
def test_every_cgroup_above_the_process_binds(limits: dict[str, str], left: int, tmp_path: Path) -> None:
    """Of what a cgroup uses, file cache that can be dropped does not count."""
    files = MACHINE | {"proc/self/cgroup": "0::/a/b\n"}
    for folder, limit in limits.items():
        files[f"sys/fs/cgroup/{folder}/memory.max"] = f"{limit}\n"
        files[f"sys/fs/cgroup/{folder}/memory.current"] = f"{3 * GIB}\n"
        files[f"sys/fs/cgroup/{folder}/memory.stat"] = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 5\n"
    available = available_memory(write(tmp_path, files))
    assert available is not None
    assert available.bytes == left


def test_in_a_container_the_limit_stands_at_the_mount(tmp_path: Path) -> None:
    """The process's path is that of the host, and is not there."""
    files = MACHINE | {
        "proc/self/cgroup": "0::/kubepods/pod1/abc\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}",
        "sys/fs/cgroup/memory.current": f"{GIB}",
        "sys/fs/cgroup/memory.stat": "",
    }
    available = available_memory(write(tmp_path, files))
    assert available is not None
    assert available.bytes == GIB
    assert available.bound == f"the cgroup's limit, {tmp_path}/sys/fs/cgroup/memory.max"


def test_cgroups_of_version_1_bind_too(tmp_path: Path) -> None:
    files = MACHINE | {
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{6 * GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/docker/abc/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
    }
    available = available_memory(write(tmp_path, files))
    assert available is not None
    assert available.bytes == 4 * GIB
