"""How long a stack with a disk tier takes to start, by how many chunks lie on the disk.

    python -m benchmarks.recovery               # the table: 1,000 to 1,000,000 chunks
    python -m benchmarks.recovery --quick       # up to 100,000
    python -m benchmarks.recovery --folder DIR  # on the file system of DIR; 8 GiB for 1,000,000 chunks

- trusted: the last run ended well, or the machine has not stopped since: the index says what there is. The
  time from `build` to a manager that answers look-ups: index, slots and all that the manager knows of each chunk.
- cold: the same, the index not in the page cache.
- tier only: opening the tier, without the manager's part.
- envelopes: the machine has stopped, the index is worth nothing: the time to a manager that answers (it finds
  nothing yet), and then until the last chunk has been found, by the envelope in its slot, in the background.

Chunks have one block. For a trusted index nothing is read of them, so nothing is written to them either.
"""

import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from kvcascade import SecondaryTierManager, build
from kvcascade.configs.schema import StackSettings
from kvcascade.testing import NAMESPACE, buffer
from kvcascade.tiers import OpenContext
from kvcascade.tiers.disk.index import Location, Use
from kvcascade.tiers.disk.marks import Session
from kvcascade.tiers.disk.settings import DiskSettings
from kvcascade.tiers.disk.tier import DiskTier
from kvcascade.tiers.host import HostSettings
from kvcascade.types import Key, LookupResult, RequestContext

from .harness import Cost, argument_parser, report_costs, spread

CHUNK_BYTES = 512
SLOT_BYTES = 8192
"""Of a chunk of one block where blocks have 4 KiB; where they are smaller there is more room than needed."""
INDEX_BYTES = 1400
BATCH = 512
"""Chunks a transaction, as a busy tier commits them."""
ENVELOPES_MOST = 10_000


class Disk:
    """A folder with so many chunks."""

    def __init__(self, folder: Path, chunks: int) -> None:
        self.chunks = chunks
        self._settings = DiskSettings(
            name="disk", path=str(folder), capacity=(64 << 20) + chunks * (SLOT_BYTES + INDEX_BYTES)
        )

    def open(self) -> DiskTier:
        tier = self._settings.open(OpenContext(NAMESPACE, CHUNK_BYTES))
        if not isinstance(tier, DiskTier):
            raise TypeError("the disk tier is another one")
        return tier

    def build(self) -> SecondaryTierManager:
        host = HostSettings(name="host", capacity=1 << 20)
        settings = StackSettings(version=1, log_every=0, tiers=(host, self._settings))
        return build(settings, NAMESPACE, CHUNK_BYTES)

    def keys(self) -> Iterator[Key]:
        numbers = random.Random(self.chunks)
        return (numbers.randbytes(32) + bytes(4) for _ in range(self.chunks))

    def list_chunks(self) -> None:
        """Puts the chunks into the index, each with a slot, as writes would have."""
        tier = self.open()
        for part in _batches(self.keys()):
            sequences = tier._sequences(len(part))
            slots = tier._slabs.take(tier.footprint(CHUNK_BYTES), sequences)
            now = time.time()
            places = [
                Location(slot, CHUNK_BYTES, number, now) for slot, number in zip(slots, sequences, strict=True)
            ]
            tier._index.commit([], list(zip(part, places, strict=True)))
            tier._index.note_used({key: Use(now, 1 + (key[1] < 64)) for key in part if key[0] < 128})
            tier._slabs.publish(slots)
        tier.close()

    def write_chunks(self) -> None:
        """Writes the chunks."""
        tier = self.open()
        payload = buffer(CHUNK_BYTES)
        for part in _batches(self.keys()):
            tier.write(part, [payload] * len(part))
        tier.close()

    def forget_index(self) -> None:
        """As after a power cut."""
        for path in self._files("session"):
            Session(boot="", clean=False, durability="none").write(path.parent)

    def cool(self) -> None:
        """Drops the index from the page cache."""
        for path in self._files("index.lmdb"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _files(self, name: str) -> list[Path]:
        found = [path for path in Path(self._settings.path).rglob("*") if path.stem == name or path.name == name]
        if not found:
            raise RuntimeError(f"there is no {name} in {self._settings.path}")
        return found


def _batches(keys: Iterator[Key]) -> Iterator[list[Key]]:
    while part := list(islice(keys, BATCH)):
        yield part


class Watch:
    """Seconds since it was made, and of processor time of this thread."""

    def __init__(self) -> None:
        gc.collect()
        self._begin, self._busy = time.perf_counter(), time.thread_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._begin, time.thread_time() - self._busy


def start(disk: Disk) -> tuple[float, float]:
    """Seconds from `build` to a manager that knows every chunk."""
    watch = Watch()
    manager = disk.build()
    seconds = watch.read()
    tier = manager.get_stats().tiers[1]
    request = RequestContext("r")
    manager.on_new_request(request)
    found = manager.lookup(next(disk.keys()), request)
    manager.on_request_finished(request)
    manager.shutdown()
    if tier.chunks != disk.chunks or found is not LookupResult.HIT_PENDING:
        raise RuntimeError(f"{tier.chunks} of {disk.chunks} chunks were found")
    return seconds


def start_cold(disk: Disk) -> tuple[float, float]:
    disk.cool()
    return start(disk)


def open_only(disk: Disk) -> tuple[float, float]:
    watch = Watch()
    tier = disk.open()
    seconds = watch.read()
    tier.close()
    return seconds


def rebuild(disk: Disk) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds to a manager, and until it knows every chunk, found by envelopes."""
    disk.forget_index()
    watch = Watch()
    manager = disk.build()
    opened = watch.read()
    while manager.get_stats().tiers[1].chunks < disk.chunks:
        time.sleep(0.005)
        manager.on_schedule_end()
    seconds = watch.read()
    manager.shutdown()
    return opened, seconds


def measure(folder: Path, chunks: int, rounds: int) -> Iterator[Cost]:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        disk = Disk(Path(place), chunks)
        disk.list_chunks()
        starts: dict[str, Callable[[Disk], tuple[float, float]]] = {
            "trusted": start,
            "cold": start_cold,
            "tier only": open_only,
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
        for _ in range(rounds):
            for name in random.sample(list(starts), len(starts)):
                found[name].append(starts[name](disk))
        yield from (_cost(chunks, name, seconds) for name, seconds in found.items())
    if chunks > ENVELOPES_MOST:
        return
    with tempfile.TemporaryDirectory(dir=folder) as place:
        disk = Disk(Path(place), chunks)
        disk.write_chunks()
        opened, whole = zip(*(rebuild(disk) for _ in range(rounds)), strict=True)
        yield _cost(chunks, "envelopes: opened", list(opened))
        yield _cost(chunks, "envelopes: all found", list(whole))


def _cost(chunks: int, name: str, seconds: list[tuple[float, float]]) -> Cost:
    wall, busy = ([each * 1e6 for each in kind] for kind in zip(*seconds, strict=True))
    return Cost(
        {"chunks": chunks}, name, statistics.median(wall), statistics.median(busy), spread(wall), len(wall)
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where the chunks lie; default: the temporary folder")
    parser.add_argument("--quick", action="store_true", help="up to 100,000 chunks, three rounds")
    options = parser.parse_args()
    costs: list[Cost] = []
    for chunks in (1000, 10_000, 100_000, 1_000_000):
        if chunks <= 100_000 or not options.quick:
            costs += measure(options.folder, chunks, 3 if options.quick else options.rounds)
    report_costs(costs, "", "start", options)


if __name__ == "__main__":
    main()
