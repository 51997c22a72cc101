"""Who does the jobs in the benchmarks of disks and directories: a tier of ours behind its lane, vLLM's file tier,
and bare loops over a slab or over files."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvcascade.manager.jobs import Job, JobKind
from kvcascade.manager.lane import ThreadLane
from kvcascade.tiers.base import OpenContext, TierSettings
from kvcascade.tiers.blocks import DIRECT, allocate, direct_works, open_blocks
from kvcascade.tiers.envelope import checksum
from kvcascade.types import Buffer, Key, Namespace

from .storage import Batch, Contender, Memory, Shape, say

__all__ = ["Files", "Lanes", "Slab", "VllmFiles", "vllm_files"]

HANG = 600.0
POLL = 0.0005
"""Seconds between two questions for what has ended."""


def until_ended(jobs: int, ended: Callable[[], list[bool]]) -> None:
    """Asks again and again, as an engine does in its steps, what has ended, and whether well."""
    while jobs:
        time.sleep(POLL)
        found = ended()
        if not all(found):
            raise ValueError("a job has failed")
        jobs -= len(found)


class Lanes:
    """A tier of ours, behind a lane of threads, as the manager drives it. A bounded one is full: what comes brings
    its victims, the oldest, along."""

    def __init__(self, settings: TierSettings, shape: Shape, memory: Memory) -> None:
        self._tier = settings.open(OpenContext(Namespace.of(model="benchmark"), shape.nbytes))
        self._lane = ThreadLane("benchmark", self._tier, memory.pool.slot, settings.concurrency)
        self._room = shape.held * shape.chunks if self._tier.capabilities.bounded else None
        self._there: deque[Key] = deque()

    def store(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._submit(JobKind.WRITE, batch, self._victims(batch))
        until_ended(len(batches), self._ended)

    def load(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._submit(JobKind.READ, batch, [])
        until_ended(len(batches), self._ended)

    def _victims(self, batch: Batch) -> list[Key]:
        if self._room is None:
            return []
        self._there += batch.keys
        return [self._there.popleft() for _ in range(len(self._there) - self._room)]

    def _submit(self, kind: JobKind, batch: Batch, victims: list[Key]) -> None:
        self._lane.submit(Job(kind, batch.keys, batch.slots, victims, "", _Nobody(), HANG))

    def _ended(self) -> list[bool]:
        return [all(outcome.ok for outcome in report.outcomes) for report in self._lane.poll(0.0)]

    def close(self) -> None:
        self._lane.close(HANG)
        self._tier.close()


class _Nobody:
    """The flow of a job about which nobody is told."""

    def ended(self, level: Any, report: Any, now: float) -> None: ...


class VllmFiles:
    """vLLM's file tier, with the threads that it has by default: 16 for loads, 16 for stores, each of which does
    the other's work, too. It writes a file a chunk, past the page cache, without a checksum, and removes none.

    Raises:
        ImportError: there is no vLLM here.
    """

    def __init__(self, folder: Path, memory: Memory) -> None:
        from vllm.v1.kv_offload.tiering.base import TransferJob
        from vllm.v1.kv_offload.tiering.fs.io import _HAS_FSIO_C
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        if not _HAS_FSIO_C:
            raise ImportError("vLLM's file tier is without its C extension")
        self._job = TransferJob
        self._ids = 0
        self._tier: Any = FileSystemTierManager(_spec(), memory.rows, "fs", str(folder))

    def store(self, batches: Sequence[Batch]) -> None:
        self._do(self._tier.submit_store, batches, False)

    def load(self, batches: Sequence[Batch]) -> None:
        self._do(self._tier.submit_load, batches, True)

    def _do(self, submit: Callable[[Any], None], batches: Sequence[Batch], promotion: bool) -> None:
        for batch in batches:
            self._ids += 1
            submit(self._job(self._ids, batch.keys, np.asarray(batch.slots), promotion, None))
        until_ended(len(batches), lambda: [result.success for result in self._tier.get_finished_jobs()])

    def close(self) -> None:
        self._tier.shutdown()


def _spec() -> Any:
    """What vLLM's file tier wants to know of an engine."""
    sizes = dict.fromkeys(("tp_size", "pp_size", "pcp_size", "dcp_size"), 1)
    config = SimpleNamespace(
        groups=(),
        parallel=SimpleNamespace(**sizes, rank=0, is_parallelism_agnostic=True),
        model=SimpleNamespace(name="benchmark", dtype="bfloat16"),
        cache=SimpleNamespace(tokens_per_hash=16),
        canonical_layout=False,
        replicated_layout=False,
    )
    events = SimpleNamespace(enable_kv_cache_events=False)
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=events)


class Loop:
    """A bare loop in as many threads as our lane has: nothing but the system calls, and checksums where they are
    asked for."""

    def __init__(self, memory: Memory, threads: int, sums: bool) -> None:
        self._memory = memory
        self._threads = ThreadPoolExecutor(threads)
        self._count = threads
        self._sums: dict[Key, int] | None = {} if sums else None

    def _share(self, act: Callable[[Batch], None], batches: Sequence[Batch]) -> None:
        def do(share: Sequence[Batch]) -> None:
            for batch in share:
                act(batch)

        list(self._threads.map(do, [batches[n :: self._count] for n in range(self._count)]))

    def _note_sums(self, batch: Batch, views: Sequence[Buffer]) -> None:
        if self._sums is not None:
            self._sums.update(zip(batch.keys, map(checksum, views), strict=True))

    def _check_sums(self, batch: Batch, views: Sequence[Buffer]) -> None:
        if self._sums is not None:
            for one, view in zip(batch.keys, views, strict=True):
                if checksum(view) != self._sums[one]:
                    raise ValueError("wrong bytes")

    def close(self) -> None:
        self._threads.shutdown()


class Slab(Loop):
    """Chunks in one preallocated file: a vectored call a job, over places that lie one after the other."""

    def __init__(self, folder: Path, shape: Shape, memory: Memory, threads: int, sums: bool = False) -> None:
        super().__init__(memory, threads, sums)
        self._job_bytes = shape.nbytes * shape.chunks
        self._places = shape.held
        self._next = 0
        self._place: dict[Key, int] = {}
        folder.mkdir()
        self._fd = open_blocks(folder / "slab", direct_works(folder, 4096), create=True)
        allocate(self._fd, self._places * self._job_bytes)

    def store(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self._place[batch.keys[0]] = self._next
            self._next = (self._next + 1) % self._places
        self._share(self._store, batches)

    def load(self, batches: Sequence[Batch]) -> None:
        self._share(self._load, batches)

    def _store(self, batch: Batch) -> None:
        views = self._memory.views(batch)
        self._note_sums(batch, views)
        self._whole(os.pwritev(self._fd, views, self._place[batch.keys[0]] * self._job_bytes))

    def _load(self, batch: Batch) -> None:
        views = self._memory.views(batch)
        self._whole(os.preadv(self._fd, views, self._place[batch.keys[0]] * self._job_bytes))
        self._check_sums(batch, views)

    def _whole(self, moved: int) -> None:
        if moved != self._job_bytes:
            raise ValueError(f"{moved} of {self._job_bytes} bytes were moved")

    def close(self) -> None:
        super().close()
        os.close(self._fd)


class Files(Loop):
    """A file a chunk: written under another name and renamed."""

    def __init__(self, folder: Path, shape: Shape, memory: Memory, threads: int, sums: bool = False) -> None:
        super().__init__(memory, threads, sums)
        for number in range(256):
            (folder / f"{number:02x}").mkdir(parents=True)
        self._folder = str(folder)
        self._flags = os.O_CLOEXEC | (DIRECT if direct_works(folder, 4096) else 0)
        self._nbytes = shape.nbytes

    def store(self, batches: Sequence[Batch]) -> None:
        self._share(self._store, batches)

    def load(self, batches: Sequence[Batch]) -> None:
        self._share(self._load, batches)

    def _store(self, batch: Batch) -> None:
        views = self._memory.views(batch)
        self._note_sums(batch, views)
        for one, view in zip(batch.keys, views, strict=True):
            path = self._path(one)
            fd = os.open(path + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags, 0o600)
            self._whole(os.pwrite(fd, view, 0))
            os.close(fd)
            os.rename(path + ".tmp", path)  # noqa: PTH104 - as bare as it gets

    def _load(self, batch: Batch) -> None:
        views = self._memory.views(batch)
        for one, view in zip(batch.keys, views, strict=True):
            fd = os.open(self._path(one), os.O_RDONLY | self._flags)
            self._whole(os.preadv(fd, [view], 0))
            os.close(fd)
        self._check_sums(batch, views)

    def _path(self, one: Key) -> str:
        name = one.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def _whole(self, moved: int) -> None:
        if moved != self._nbytes:
            raise ValueError(f"{moved} of {self._nbytes} bytes were moved")


def vllm_files(folder: Path, memory: Memory) -> dict[str, Contender]:
    """vLLM's file tier under its name, where it can be measured."""
    try:
        return {"vllm": VllmFiles(folder, memory)}
    except ImportError as error:
        say(f"vLLM's file tier is not measured: {error}")
        return {}
