"""How fast a worker moves blocks between the device and the host pool, and how that compares with a plain copy.

    .venv/bin/python -m benchmarks.worker --quick     # 1,000 blocks of 64 KiB
    .venv/bin/python -m benchmarks.worker             # 1 to 1,000 blocks of 16 KiB to 2 MiB

The device is a CUDA device where there is one, else memory of this machine. Contenders, over the same tensors and
pools, each until the last byte has arrived:

- worker: `TransferWorker`, from the step's metadata to the report of the job's end; a chunk is one block;
- worker x16: the same, a chunk is 16 blocks;
- memcpy: the same pieces of memory, block by block, in a loop of nothing else;
- one copy: as many bytes in one piece: the limit.

Blocks lie anywhere (`scattered`), or one after the other, as in an engine that has just begun (`in order`).
"""

import ctypes
import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch

from kvcascade.connector import ChunkCopy, ConnectorMetadata, GroupLayout, Transfer, TransferWorker
from kvcascade.connector.transfers import Direction
from kvcascade.tiers.host import HostPool

from .harness import Result, Work, argument_parser, interleaved, report

KIB, MIB = 1 << 10, 1 << 20
SIZES = [16 * KIB, 64 * KIB, 256 * KIB, 2 * MIB]
COUNTS = [1, 10, 100, 1000]
BLOCKS_A_CHUNK = 16
MEMORY = 512 * MIB
"""Bytes of the tensor, and of the pool, at least: much larger than the processor's caches."""


class Case:
    """A device tensor and pools, and `count` blocks that everyone moves between them, others at each turn."""

    def __init__(self, nbytes: int, count: int, scattered: bool, device: str) -> None:
        self.nbytes, self.count = nbytes, count
        self._step = -(-count // BLOCKS_A_CHUNK) * BLOCKS_A_CHUNK
        self.turns = max(1, MEMORY // nbytes // self._step)
        total = self.turns * self._step
        words = torch.arange((total + 1) * nbytes // 8, device=device) * 0x1E3779B97F4A7C15  # all differ
        self.tensor = words.view(torch.uint8).view(total + 1, nbytes)
        self._blocks = list(range(1, total + 1))  # block 0 is the one that holds nothing
        if scattered:
            random.shuffle(self._blocks)
        self.pools = {size: HostPool(total // size, nbytes * size) for size in (1, BLOCKS_A_CHUNK)}

    @property
    def moved(self) -> int:
        return self.nbytes * self.count

    def places(self, turn: int) -> list[tuple[int, int]]:
        """Block, and number of its place in the pools, of all that move in a turn."""
        first = turn * self._step
        return [(self._blocks[place], place) for place in range(first, first + self.count)]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


class Ours:
    """The worker, as an engine's process drives it. Jobs are made beforehand: that is the scheduler's work."""

    def __init__(self, case: Case, blocks_a_chunk: int) -> None:
        self._case = case
        self._size = blocks_a_chunk
        self._job = 0
        pool = case.pools[blocks_a_chunk]
        self._worker = TransferWorker([case.tensor], [GroupLayout(blocks_a_chunk, (0,))], pool)
        self._turns = [tuple(self._chunks(case.places(turn))) for turn in range(case.turns)]

    def _chunks(self, places: Sequence[tuple[int, int]]) -> Iterator[ChunkCopy]:
        for start in range(0, len(places), self._size):
            part = places[start : start + self._size]
            yield ChunkCopy(0, part[0][1] // self._size, 0, tuple(block for block, _ in part))

    def move(self, direction: Direction, turn: int) -> None:
        self._job += 1
        transfer = Transfer(self._job, "", direction, self._turns[turn])
        if direction is Direction.LOAD:
            self._worker.start_load_kv(ConnectorMetadata(loads=[transfer]))
            self._worker.handle_preemptions(ConnectorMetadata(flush={self._job}))
        else:
            self._worker.handle_preemptions(ConnectorMetadata(stores=[transfer], flush={self._job}))
        report = self._worker.get_finished()
        if report.ended != {self._job: 1} or report.failed:
            raise ValueError(f"{report}")

    def close(self) -> None:
        self._worker.shutdown()


class Plain:
    """The same blocks, each by one plain copy; or as many bytes at once."""

    def __init__(self, case: Case, whole: bool) -> None:
        pool = case.pools[1]
        start = torch.frombuffer(pool.slot(0), dtype=torch.uint8).data_ptr()
        host = torch.frombuffer(pool.slot(0).obj, dtype=torch.uint8)
        host = host[start - host.data_ptr() :][: pool.slots * case.nbytes].view(-1, case.nbytes)
        self._copy: Any = _copy_with_device if case.tensor.is_cuda else _memmove
        self._turns: list[Any] = []
        for places in map(case.places, range(case.turns)):
            first = places[0][1]
            if whole:
                pieces = [(case.tensor[first : first + case.count], host[first : first + case.count])]
            else:
                pieces = [(case.tensor[block], host[place]) for block, place in places]
            self._turns.append(pieces if case.tensor.is_cuda else [_addresses(*piece) for piece in pieces])

    def move(self, direction: Direction, turn: int) -> None:
        self._copy(self._turns[turn], direction is Direction.STORE)

    def close(self) -> None:
        pass


def _addresses(device: torch.Tensor, host: torch.Tensor) -> tuple[int, int, int]:
    return device.data_ptr(), host.data_ptr(), host.numel()


def _memmove(pieces: Sequence[tuple[int, int, int]], store: bool) -> None:
    memmove = ctypes.memmove
    for device, host, nbytes in pieces:
        if store:
            memmove(host, device, nbytes)
        else:
            memmove(device, host, nbytes)


def _copy_with_device(pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], store: bool) -> None:
    for device, host in pieces:
        if store:
            host.copy_(device, non_blocking=True)
        else:
            device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()


def check(name: str, contender: Any, case: Case) -> None:
    """What it stores it brings back."""
    blocks = torch.tensor([block for block, _ in case.places(0)])
    before = case.tensor[blocks].clone()
    contender.move(Direction.STORE, 0)
    case.tensor[blocks] = 0xAA
    contender.move(Direction.LOAD, 0)
    if not torch.equal(before, case.tensor[blocks]):
        raise ValueError(f"{name} brings other bytes")


def turns(contender: Any, direction: Direction, case: Case) -> Work:
    """The work that moves the next blocks at each call."""
    left = cycle(range(case.turns))

    def work() -> int:
        contender.move(direction, next(left))
        return case.moved

    return work


def measure(nbytes: int, count: int, order: str, options: Any) -> list[Result]:
    results: list[Result] = []
    case = Case(nbytes, count, order == "scattered", options.device)
    contenders: dict[str, Any] = {"worker": Ours(case, 1)}
    if count > 1:
        contenders["worker x16"] = Ours(case, BLOCKS_A_CHUNK)
    contenders |= {"memcpy": Plain(case, whole=False), "one copy": Plain(case, whole=True)}
    for name, one in contenders.items():
        if name != "one copy":
            check(name, one, case)
    for direction in Direction:
        named = {"order": order, "verb": direction.value, "KiB": nbytes // KIB, "blocks": count}
        works = {name: turns(one, direction, case) for name, one in contenders.items()}
        terms = {"clock": time.process_time, "spare": options.spare}
        results += interleaved(named, works, options.rounds, options.seconds, **terms)
    for one in contenders.values():
        one.close()
    case.close()
    return results


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 blocks of 64 KiB")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.device == "cpu":
        sys.stderr.write("copies with a CUDA device are not measured: there is none\n")
    results: list[Result] = []
    for order in ("scattered", "in order"):
        for nbytes in [64 * KIB] if options.quick else SIZES:
            for count in [1000] if options.quick else COUNTS:
                results += measure(nbytes, count, order, options)
    report(results, "worker", options.json, options.out, options.plot)


if __name__ == "__main__":
    main()
