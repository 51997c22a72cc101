"""How fast chunks come to and from a shared directory, beside vLLM's file tier and a bare loop.

    .venv-vllm/bin/python -m benchmarks.fs_tier --quick     # 256 KiB and 1 MiB, 1 and 8 chunks a job
    .venv-vllm/bin/python -m benchmarks.fs_tier             # 64 KiB to 16 MiB, 1 to 64 chunks a job
    .venv/bin/python -m benchmarks.fs_tier --quick          # without vLLM

Contenders, each of which writes a new file for each chunk under another name, and renames it:

- tier: this package's fs tier behind a lane of its default threads: a chunk comes with a checksum and an envelope,
  and is looked for before it is written; a read is verified;
- vllm: vLLM's file tier with its default threads: the same, without checksum and envelope;
- files: a bare loop with as many threads as ours: the limit;
- files+sum: the same with the checksums that ours computes.
"""

from pathlib import Path
from typing import Any

from kvcascade.tiers.fs.settings import FsSettings

from .contenders import Files, Lanes, vllm_files
from .storage import Contender, Memory, Shape, run


def contenders(folder: Path, shape: Shape, memory: Memory, options: Any) -> dict[str, Contender]:
    settings = FsSettings(path=str(folder / "tier"), durability=options.durability)
    threads = settings.concurrency
    return {
        "tier": Lanes(settings, shape, memory),
        **vllm_files(folder / "vllm", memory),
        "files": Files(folder / "files", shape, memory, threads),
        "files+sum": Files(folder / "files-sum", shape, memory, threads, sums=True),
    }


if __name__ == "__main__":
    run(__doc__, contenders)
