"""How fast chunks come to and from the disk tier, and how that compares with vLLM's file tier and a bare loop.

    .venv-vllm/bin/python -m benchmarks.disk_tier --quick     # 256 KiB and 1 MiB, 1 and 8 chunks a job
    .venv-vllm/bin/python -m benchmarks.disk_tier             # 64 KiB to 16 MiB, 1 to 64 chunks a job
    .venv/bin/python -m benchmarks.disk_tier --quick          # without vLLM

Contenders:

- tier: this package's disk tier, full, behind a lane of its default threads: a chunk comes with a checksum, an
  envelope, and a victim that makes room for it; a read is verified;
- vllm: vLLM's file tier with its default threads: a new file for each chunk, no checksum, nothing is ever removed;
- slab: as many threads as ours over one preallocated file, one vectored call a job: the limit;
- slab+sum: the same with the checksums that ours computes.
"""

from pathlib import Path
from typing import Any

from kvcascade.tiers.disk.plan import footprint
from kvcascade.tiers.disk.settings import DiskSettings

from .contenders import Lanes, Slab, vllm_files
from .storage import Contender, Memory, Shape, run


def contenders(folder: Path, shape: Shape, memory: Memory, options: Any) -> dict[str, Contender]:
    chunks = shape.held * shape.chunks
    capacity = chunks * (footprint(shape.nbytes, 4096) + 4096) * 17 // 16 + (32 << 20)
    settings = DiskSettings(path=str(folder / "tier"), capacity=capacity, durability=options.durability)
    threads = settings.concurrency
    return {
        "tier": Lanes(settings, shape, memory),
        **vllm_files(folder / "vllm", memory),
        "slab": Slab(folder / "slab", shape, memory, threads),
        "slab+sum": Slab(folder / "slab-sum", shape, memory, threads, sums=True),
    }


if __name__ == "__main__":
    run(__doc__, contenders)
