"""What I/O does to an engine that is busy in Python, and what that does to the I/O.

    python -m benchmarks.interference                  # the tables
    python -m benchmarks.interference --verb store

One thread is the engine: it makes steps of a few milliseconds, in which it computes in Python without pause
(`busy`) or sleeps as long (`idle`). At the begin of each step it takes in the jobs that have ended, and submits as
many again, as an engine's scheduler does: there is always enough to do for the medium until the next step.
Contenders, over one pool, four threads each for ours:

- thread: the disk tier with its lane in threads of the engine's process;
- process: the disk tier with its lane in an I/O process;
- vllm: vLLM's file tier with its default threads, where this Python has vLLM;
- none: the steps without any I/O.
"""

import os
import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvcascade.manager.io import IoProcess
from kvcascade.manager.jobs import Job, JobKind
from kvcascade.manager.lane import Lane, ThreadLane
from kvcascade.testing import fill, holds
from kvcascade.tiers import OpenContext
from kvcascade.tiers.disk import DiskSettings
from kvcascade.types import Key, Namespace

from .contenders import VllmFiles
from .harness import Cost, Result, argument_parser, others_busy, report, report_costs, spread, written
from .storage import KIB, MIB, Batch, Memory, Shape, key, say

_key = cache(key)

HANG = 60.0
THREADS = 4


class Worker(Protocol):
    """Does jobs in the background."""

    def submit(self, verb: str, batch: Batch) -> None: ...

    def start(self) -> None:
        """The step's last job was submitted."""

    def ended(self) -> list[range]:
        """The slots of the jobs that have ended since the last call. Raises where one has not ended well."""

    def cpu(self) -> float:
        """Seconds of processor time used so far in other processes."""

    def close(self) -> None: ...


class Ours:
    """A lane of the disk tier, full: what comes brings its victims, the oldest, along."""

    def __init__(self, lane: Lane, close: Callable[[], Any], room: int, pid: int = 0) -> None:
        """`pid`: of the process where the lane's threads are, if it is another one."""
        self._lane = lane
        self._clock = _clock_of(pid) if pid else None
        self._close = close
        self._room = room
        self._there: deque[Key] = deque()

    def submit(self, verb: str, batch: Batch) -> None:
        victims: list[Key] = []
        if verb == "store":
            self._there += batch.keys
            victims = [self._there.popleft() for _ in range(len(self._there) - self._room)]
        kind = JobKind.WRITE if verb == "store" else JobKind.READ
        self._lane.submit(Job(kind, batch.keys, batch.slots, victims, "", _Nobody(), time.monotonic() + HANG))

    def start(self) -> None:
        self._lane.start()

    def ended(self) -> list[range]:
        slots = []
        for one in self._lane.poll(time.monotonic()):
            for outcome in one.outcomes:
                if not outcome.ok:
                    raise ValueError(f"{one.job.kind}: {outcome}")
            slots.append(range(one.job.slots[0], one.job.slots[-1] + 1))
        return slots

    def cpu(self) -> float:
        return time.clock_gettime(self._clock) if self._clock else 0.0

    def close(self) -> None:
        self._lane.close(HANG)
        self._close()


def _clock_of(pid: int) -> int:
    """Of the processor time of a process, as clock_getcpuclockid(3) makes it on Linux."""
    return ~pid << 3 | 2


class _Nobody:
    """The flow of a job about which nobody is told."""

    def ended(self, level: Any, report: Any, now: float) -> None: ...


class Theirs(VllmFiles):
    """vLLM's file tier, without waiting for it."""

    def __init__(self, folder: Path, memory: Memory) -> None:
        super().__init__(folder, memory)
        self._slots: dict[int, range] = {}

    def submit(self, verb: str, batch: Batch) -> None:
        self._ids += 1
        self._slots[self._ids] = batch.slots
        submit = self._tier.submit_store if verb == "store" else self._tier.submit_load
        submit(self._job(self._ids, batch.keys, np.asarray(batch.slots), verb == "load", None))

    def start(self) -> None:
        """Jobs begin when they are submitted."""

    def ended(self) -> list[range]:
        results = list(self._tier.get_finished_jobs())
        if not all(result.success for result in results):
            raise ValueError("a job of vLLM's file tier failed")
        return [self._slots.pop(result.job_id) for result in results]

    def cpu(self) -> float:
        return 0.0


def workers(folder: Path, shape: Shape, memory: Memory) -> dict[str, Worker]:
    """All contenders that can be had here."""
    context = OpenContext(Namespace.of(model="benchmark"), shape.nbytes)
    room = shape.held * shape.chunks
    capacity = 2 * shape.held_bytes + (256 << 20)
    settings = [
        DiskSettings(path=str(folder / name), capacity=capacity, durability="none", concurrency=THREADS)
        for name in ("thread", "process")
    ]
    tier = settings[0].open(context)
    process = IoProcess(memory.pool, settings[1:], context)
    remote = process.tiers[0]
    remote.wait_until_open()

    def close() -> None:
        remote.close()
        process.close()

    found: dict[str, Worker] = {
        "thread": Ours(ThreadLane("thread", tier, memory.pool.slot, THREADS), tier.close, room),
        "process": Ours(remote.lane, close, room, process.pid or 0),
    }
    try:
        found["vllm"] = Theirs(folder / "vllm", memory)
    except ImportError as error:
        say(f"vLLM's file tier is not measured: {error}")
    return found


class Steps(NamedTuple):
    """What a round has seen."""

    moved: int
    seconds: float
    cpu: float
    """Processor time of all, in seconds."""
    times: list[float]
    cpu_times: list[float]
    """Of the engine's thread."""
    others: float
    """The share of the machine's processors that other processes took."""


class Engine:
    """Makes steps."""

    def __init__(self, shape: Shape, depth: int, step: float) -> None:
        self.shape = shape
        self.depth = depth
        self._step = step
        self._loops = _calibrated(step)
        self._next = shape.held
        self._free = [range(n * shape.chunks, (n + 1) * shape.chunks) for n in range(depth)]

    def run(self, verb: str, worker: Worker | None, busy: bool, seconds: float) -> Steps:
        """Steps for so many seconds, with I/O at full rate."""
        times, cpu_times, jobs = [], [], 0
        child = worker.cpu() if worker else 0.0
        began, cpu, others = time.perf_counter(), _cpu(worker), others_busy()
        while (begin := time.perf_counter()) - began < seconds:
            own = time.thread_time()
            if worker:
                ended = worker.ended()
                jobs += len(ended)
                self._free += ended
                while self._free:
                    worker.submit(verb, self.batch(self._number(verb)))
                worker.start()
            if busy:
                _compute(self._loops)
            else:
                time.sleep(self._step)
            times.append(time.perf_counter() - begin)
            cpu_times.append(time.thread_time() - own)
        spent = time.perf_counter() - began
        used = _cpu(worker) - cpu
        processors = os.cpu_count() or 1
        others = (others_busy() - others - (worker.cpu() - child if worker else 0.0) / processors) / spent
        if worker:
            self.settle(worker)
        moved = jobs * self.shape.nbytes * self.shape.chunks
        return Steps(moved, spent, used, times, cpu_times, others)

    def settle(self, worker: Worker) -> None:
        """Waits for all jobs."""
        while len(self._free) < self.depth:
            self._free += worker.ended()
            time.sleep(0.001)

    def _number(self, verb: str) -> int:
        """Of a job: one that is held, or a new one."""
        if verb == "load":
            return random.randrange(self.shape.held)
        self._next += 1
        return self._next - 1

    def batch(self, number: int) -> Batch:
        """A job of these chunks, with slots of its own."""
        first = number * self.shape.chunks
        return Batch([_key(n) for n in range(first, first + self.shape.chunks)], self._free.pop())


def _cpu(worker: Worker | None) -> float:
    return time.process_time() + (worker.cpu() if worker else 0.0)


def _compute(loops: int) -> int:
    """What an engine's scheduler does: attributes, calls, small objects."""
    table: dict[int, int] = {}
    for number in range(loops):
        table[number & 1023] = table.get(number & 511, 0) + len(str(number))
    return len(table)


def _calibrated(step: float) -> int:
    """How many loops take that long here when nothing else runs."""
    loops = 1000
    while True:
        begin = time.thread_time()
        _compute(loops)
        spent = time.thread_time() - begin
        if spent > step / 2:
            return max(1, int(loops * step / spent))
        loops *= 2


def fill_up(worker: Worker, engine: Engine, memory: Memory) -> None:
    """Stores what is held, with bytes that follow from their keys, and checks that they come back."""
    shape = engine.shape
    for start in range(0, shape.held, engine.depth):
        numbers = range(start, min(shape.held, start + engine.depth))
        for number in numbers:
            batch = engine.batch(number)
            for view, one in zip(memory.views(batch), batch.keys, strict=True):
                fill(view, one)
            worker.submit("store", batch)
        engine.settle(worker)
    np.frombuffer(memory.rows, np.uint8)[:] = 0xAA
    batches = [engine.batch(number) for number in numbers]
    for batch in batches:
        worker.submit("load", batch)
    engine.settle(worker)
    for batch in batches:
        if not all(holds(view, one) for view, one in zip(memory.views(batch), batch.keys, strict=True)):
            raise ValueError("other bytes came back")


@dataclass
class Found:
    """All rounds of one contender in one case."""

    idle: list[Steps]
    busy: list[Steps]


def measure(shape: Shape, options: Any) -> dict[str, Found]:
    """All contenders of one case, in turn."""
    depth = max(2 * THREADS, options.depth_mib * MIB // (shape.nbytes * shape.chunks))
    engine = Engine(shape, depth, options.step_ms / 1000)
    room = Shape(shape.nbytes, shape.chunks, depth, shape.held)
    with TemporaryDirectory(dir=options.path, prefix="kvcascade-benchmark-") as folder, Memory(room) as memory:
        those = workers(Path(folder), shape, memory)
        for worker in those.values():
            fill_up(worker, engine, memory)
        turns: list[tuple[str, Worker | None, bool]] = [("none", None, True)]
        turns += [(name, worker, busy) for name, worker in those.items() for busy in (False, True)]
        found = {name: Found([], []) for name in ("none", *those)}
        for one in _quietest(engine, turns, options):
            for (name, busy), seen in one.items():
                (found[name].busy if busy else found[name].idle).append(seen)
        for worker in those.values():
            worker.close()
    os.sync()
    return found


def _quietest(
    engine: Engine, turns: list[tuple[str, Worker | None, bool]], options: Any
) -> list[dict[tuple[str, bool], Steps]]:
    """Rounds in which other processes were least busy, of those that were taken after one to warm up."""
    taken = []
    for _ in range(1 + options.rounds + options.spare):
        one = {}
        for name, worker, busy in random.sample(turns, len(turns)):
            time.sleep(options.pause)
            one[name, busy] = engine.run(options.verb, worker, busy, options.seconds)
        taken.append(one)
    taken[1:] = sorted(taken[1:], key=lambda one: sum(seen.others for seen in one.values()))
    return taken[1 : 1 + options.rounds]


def rates(case: dict[str, Any], found: dict[str, Found]) -> list[Result]:
    """GB/s of each contender, idle and busy."""
    results = []
    for name, rounds in found.items():
        for beside, some in (("idle", rounds.idle), ("busy", rounds.busy)):
            if not some or name == "none":
                continue
            speeds = [one.moved / one.seconds / 1e9 for one in some]
            cpu = statistics.median(one.cpu / max(1, one.moved) * 1e9 for one in some)
            others = statistics.median(one.others for one in some)
            rate, where = statistics.median(speeds), {**case, "beside": beside}
            results.append(Result(where, name, rate, spread(speeds), cpu, len(some), others))
    return results


def steps(case: dict[str, Any], found: dict[str, Found]) -> list[Cost]:
    """The busy steps: medians over the rounds of each round's median, 99th percentile and longest."""
    costs = []
    for name, rounds in found.items():
        for what, rank in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            walls = [1e6 * _ranked(one.times, rank) for one in rounds.busy]
            own = statistics.median(1e6 * _ranked(one.cpu_times, rank) for one in rounds.busy)
            costs.append(
                Cost({**case, "step": what}, name, statistics.median(walls), own, spread(walls), len(walls))
            )
    return costs


def _ranked(times: list[float], rank: float) -> float:
    return sorted(times)[min(len(times) - 1, int(rank * len(times)))]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.set_defaults(seconds=0.6)
    parser.add_argument("--verb", choices=["load", "store"], default="load")
    parser.add_argument("--kib", type=int, nargs="+", default=[256, 1024], help="sizes of a chunk")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 8], help="chunks a job")
    parser.add_argument("--step-ms", type=float, default=3.0, help="of processor time that a step computes")
    parser.add_argument("--path", type=Path, default=Path("/var/tmp"), help="a folder on the disk to measure")
    parser.add_argument("--held-mib", type=int, default=512, help="payload that is there to be loaded")
    parser.add_argument("--depth-mib", type=int, default=64, help="payload of the jobs that are under way")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds before each measurement")
    options = parser.parse_args()
    results: list[Result] = []
    costs: list[Cost] = []
    for nbytes in (kib * KIB for kib in options.kib):
        for chunks in options.chunks:
            case = {"verb": options.verb, "KiB": nbytes // KIB, "chunks": chunks}
            shape = Shape.of(nbytes, chunks, MIB, options.held_mib * MIB)
            found = measure(shape, options)
            results += rates(case, found)
            costs += steps(case, found)
    if written([*results, *costs], options.json, options.out, None):
        return
    report(results, "process", False, plot=options.plot)
    options.out = options.plot = None
    report_costs(costs, "none", "step", options)


if __name__ == "__main__":
    main()
