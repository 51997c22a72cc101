"""What the benchmarks of disks and directories share: the cases, memory and jobs, and the order of events.

All contenders of a case work from and into the same memory, a `HostPool`, past the page cache where that works.
Nothing is synced to the medium, unless `--durability` asks our tier for it. A round is some jobs, all submitted at
once. Contenders take turns in a random order, with the same pause before each: a throttled disk earns credit in
pauses.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvcascade.testing import fill, holds, key_for
from kvcascade.tiers.blocks import address
from kvcascade.tiers.host import HostPool
from kvcascade.types import Buffer, Key

from .harness import Result, Work, argument_parser, interleaved, report

__all__ = ["Batch", "Contender", "Contenders", "Memory", "Shape", "run", "say"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = [64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB]
CHUNKS = [1, 8, 64]
QUICK_SIZES = [256 * KIB, MIB]
QUICK_CHUNKS = [1, 8]
LARGEST_JOB = 256 * MIB


def key(number: int) -> Key:
    """As an engine's keys, but that they begin with one of 256 numbers: the folders that file tiers make from a
    key's first digits are few, and all there before the first round, as in a directory that has been in use."""
    return bytes([number % 256, 0, 0]) + key_for(number)[3:]


class Batch(NamedTuple):
    """One job."""

    keys: list[Key]
    slots: range


@dataclass(frozen=True)
class Shape:
    """Of one case."""

    nbytes: int
    """Of a chunk."""
    chunks: int
    """A job."""
    jobs: int
    """A round, all submitted at once."""
    held: int
    """Jobs whose chunks are on the medium when the rounds begin."""

    @classmethod
    def of(cls, nbytes: int, chunks: int, round_bytes: int, held_bytes: int) -> "Shape":
        job = nbytes * chunks
        jobs = max(4, round_bytes // job)
        return cls(nbytes, chunks, jobs, max(2 * jobs, held_bytes // job))

    @property
    def round_bytes(self) -> int:
        return self.nbytes * self.chunks * self.jobs

    @property
    def held_bytes(self) -> int:
        return self.nbytes * self.chunks * self.held


class Memory:
    """The host pool: chunks of a round."""

    def __init__(self, shape: Shape) -> None:
        self.nbytes = shape.nbytes
        self.slots = shape.chunks * shape.jobs
        self.pool = HostPool(self.slots, shape.nbytes)
        whole = memoryview(self.pool.slot(0).obj)
        start = address(self.pool.slot(0)) - address(whole)
        self.rows = whole[start : start + self.slots * shape.nbytes].cast("B", (self.slots, shape.nbytes))
        """As vLLM wants it. A chunk is whole pages, so slots follow one another."""

    def __enter__(self) -> "Memory":
        return self

    def __exit__(self, *raised: object) -> None:
        self.pool.close()

    def views(self, batch: Batch) -> list[Buffer]:
        return [self.pool.slot(slot) for slot in batch.slots]


class Traffic:
    """The jobs of all rounds, made before the first one. Rounds of stores bring new chunks, rounds of loads want
    those that are held, at random."""

    def __init__(self, shape: Shape, rounds: int) -> None:
        self.shape = shape
        places = [range(n * shape.chunks, (n + 1) * shape.chunks) for n in range(shape.jobs)]
        fresh = (self._batch(n, places[n % shape.jobs]) for n in range(shape.held + rounds * shape.jobs))
        held = [next(fresh) for _ in range(shape.held)]
        self.held = [held[start : start + shape.jobs] for start in range(0, shape.held, shape.jobs)]
        self.stores = [[next(fresh) for _ in range(shape.jobs)] for _ in range(rounds)]
        picked = [random.sample(held, shape.jobs) for _ in range(rounds)]
        self.loads = [[Batch(one.keys, at) for one, at in zip(some, places, strict=True)] for some in picked]

    def _batch(self, number: int, slots: range) -> Batch:
        first = number * self.shape.chunks
        return Batch([key(n) for n in range(first, first + self.shape.chunks)], slots)


class Contender(Protocol):
    """Does jobs; returns when all of them have ended, well. Raises where one has not."""

    def store(self, batches: Sequence[Batch]) -> None: ...

    def load(self, batches: Sequence[Batch]) -> None: ...

    def close(self) -> None: ...


Contenders = Callable[[Path, Shape, Memory, Any], dict[str, Contender]]
"""Makes the contenders of a case in a folder; is given the command line's options, too."""


def turns(act: Callable[[Sequence[Batch]], None], rounds: Sequence[Sequence[Batch]], moved: int) -> Work:
    """The work that does the next round at each call."""
    left = iter(rounds)

    def work() -> int:
        act(next(left))
        return moved

    return work


def fill_up(contender: Contender, traffic: Traffic, memory: Memory) -> None:
    """Stores the chunks that are held, with bytes that follow from their keys."""
    for batches in traffic.held:
        for batch in batches:
            for view, one in zip(memory.views(batch), batch.keys, strict=True):
                fill(view, one)
        contender.store(batches)


def check(name: str, contender: Contender, traffic: Traffic, memory: Memory) -> None:
    """It really brings the bytes."""
    np.frombuffer(memory.rows, np.uint8)[:] = 0xAA
    contender.load(traffic.loads[0])
    for batch in traffic.loads[0]:
        for view, one in zip(memory.views(batch), batch.keys, strict=True):
            if not holds(view, one):
                raise ValueError(f"{name} brings other bytes")


def run(description: str | None, make: Contenders) -> None:
    """Does what the command line asks for."""
    parser = argument_parser(description)
    parser.add_argument("--quick", action="store_true", help="256 KiB and 1 MiB, 1 and 8 chunks a job")
    parser.add_argument("--path", type=Path, default=Path("/var/tmp"), help="a folder on the disk to measure")
    parser.add_argument("--round-mib", type=int, default=256, help="payload of a round")
    parser.add_argument("--held-mib", type=int, default=1024, help="payload that is there to be loaded")
    parser.add_argument("--pause", type=float, default=0.2, help="seconds before each measurement")
    parser.add_argument("--durability", choices=["none", "flush", "fsync"], default="none", help="of our tier")
    parser.add_argument("--fio", action=BooleanOptionalAction, default=True, help="say, too, what fio finds")
    options = parser.parse_args()
    say("not measured: LMCache's disk backend, which the environments here do not install")
    results: list[Result] = []
    for shape in shapes(options):
        results += measure(shape, make, options)
    report(results, "tier", options.json, options.out, options.plot)


def shapes(options: Any) -> Iterator[Shape]:
    for nbytes in QUICK_SIZES if options.quick else SIZES:
        for chunks in QUICK_CHUNKS if options.quick else CHUNKS:
            if nbytes * chunks <= LARGEST_JOB:
                yield Shape.of(nbytes, chunks, options.round_mib * MIB, options.held_mib * MIB)
            else:
                say(f"not measured: {chunks} chunks of {nbytes // MIB} MiB, above {LARGEST_JOB // MIB} MiB a job")


def measure(shape: Shape, make: Contenders, options: Any) -> list[Result]:
    """Both verbs of one case. Loads first: they want what is held, and stores evict it."""
    results: list[Result] = []
    traffic = Traffic(shape, options.rounds + options.spare + 1)
    with TemporaryDirectory(dir=options.path, prefix="kvcascade-benchmark-") as folder, Memory(shape) as memory:
        contenders = make(Path(folder), shape, memory, options)
        for name, one in contenders.items():
            fill_up(one, traffic, memory)
            check(name, one, traffic, memory)
        for verb, rounds in (("load", traffic.loads), ("store", traffic.stores)):
            case = {"verb": verb, "KiB": shape.nbytes // KIB, "chunks": shape.chunks}
            works = {
                name: turns(getattr(one, verb), rounds, shape.round_bytes) for name, one in contenders.items()
            }
            terms = {"pause": options.pause, "clock": time.process_time, "spare": options.spare}
            results += interleaved(case, works, options.rounds, 0.0, **terms)
        for one in contenders.values():
            one.close()
        if options.fio:
            say_fio(Path(folder), shape)
    os.sync()  # what was removed is gone from the medium, too, when the next case begins
    return results


def say_fio(folder: Path, shape: Shape) -> None:
    """What fio says of stores and loads of whole chunks by four threads, each for two seconds."""
    if not (program := shutil.which("fio")):
        say("fio is not installed")
        return
    common = [f"--directory={folder}", f"--bs={shape.nbytes}", f"--size={shape.held_bytes // 4}", "--numjobs=4"]
    common += ["--thread", "--direct=1", "--ioengine=psync", "--overwrite=1", "--time_based", "--runtime=2"]
    common += ["--group_reporting", "--output-format=json", "--name=chunks"]
    for verb, kind in (("store", "write"), ("load", "read")):
        command = [program, f"--rw={kind}", *common]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rate = json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"] / 1e9
        say(f"fio: {verb} {shape.nbytes // KIB} KiB: {rate:.2f} GB/s")


def say(text: str) -> None:
    """A remark beside the tables."""
    sys.stderr.write(text + "\n")
