"""A tier hangs, fails, lies and comes back while a trace is replayed: the replay ends, every byte is right, and
the report tells what happened."""

import io
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from rich.console import Console

from kvcascade.configs import StackSettings, parse_stack
from kvcascade.replay.playback import Playback, replay
from kvcascade.replay.report import Report, render, to_json
from kvcascade.replay.trace import Request, Trace
from kvcascade.testing import FaultTier, GateTier, TierWrapper
from kvcascade.tiers import Tier
from kvcascade.types import Buffer, Key, MissReason, OutcomeKind

CHUNK = 4096
PROMPTS, LENGTH, ROUNDS = 40, 16, 6
"""More than the first tier holds, again and again: from the second round on everything comes from below."""
REQUESTS = PROMPTS * ROUNDS
TROUBLE, WELL = 80, 140
"""Before which requests the trouble begins and ends."""


class Rounds(Trace):
    """The same prompts again and again. Something happens before some requests, when they are played."""

    def __init__(self, path: Path, script: Mapping[int, Callable[[], object]] = MappingProxyType({})) -> None:
        with path.open("w") as file:
            for number in range(REQUESTS):
                first = 100 * (number % PROMPTS)
                ids = [0, 1, *range(first + 2, first + LENGTH)]
                line = {"timestamp": number, "input_length": 512 * LENGTH, "output_length": 1, "hash_ids": ids}
                file.write(json.dumps(line) + "\n")
        super().__init__(path)
        self._script = script
        self._passes = 0

    def __iter__(self) -> Iterator[Request]:
        self._passes += 1
        for number, request in enumerate(super().__iter__()):
            if self._passes == 2 and number in self._script:  # the first pass only looks for what is wrong with it
                self._script[number]()
            yield request


class Liar(TierWrapper):
    """Damages what lies on the medium just before it is read, below all that the tier can see of it."""

    def __init__(self, inner: Tier, folder: Path, lie: Callable[[Path, int, int, random.Random], None]) -> None:
        super().__init__(inner)
        self.told: Counter[OutcomeKind] = Counter()
        self._folder = folder
        self._lie = lie
        self._draw = random.Random(0)

    def around(self, verb: str, keys: Sequence[Key], buffers: Sequence[Buffer], call: Callable[[], Any]) -> Any:
        if verb != "read" or self._draw.random() < 0.7:
            return call()
        victim = self._draw.randrange(len(keys))
        for place in self._places(keys[victim]):
            self._lie(*place, self._draw)
        outcomes = call()
        assert not outcomes[victim].ok, "a lie was believed"
        self.told[outcomes[victim].kind] += 1
        return outcomes

    def _places(self, key: Key) -> Iterator[tuple[Path, int, int]]:
        """Where chunks of this key lie, or have lain once: file, offset, size."""
        for file in self._folder.rglob(key.hex()):
            yield file, 0, file.stat().st_size
        for file in self._folder.rglob("*.slab"):
            size = int(file.stem.rpartition("-")[2])
            content = file.read_bytes()
            found = content.find(key)
            while found >= 0:
                yield file, found // size * size, size
                found = content.find(key, found + 1)


def flip(file: Path, offset: int, size: int, draw: random.Random) -> None:
    """One bit of the chunk, in the envelope's first fields or in the payload."""
    with file.open("r+b") as chunk:
        place = offset + draw.choice([draw.randrange(64), size - 1 - draw.randrange(CHUNK)])
        chunk.seek(place)
        (byte,) = chunk.read(1)
        chunk.seek(place)
        chunk.write(bytes([byte ^ 1 << draw.randrange(8)]))


def cross(file: Path, offset: int, size: int, draw: random.Random) -> None:
    """Another chunk, whole and right, where this one was."""
    if file.suffix == ".slab":
        slots = [slot for slot in range(0, file.stat().st_size, size) if slot != offset]
        other, source = file, draw.choice(slots)
    else:
        chunks = [other for other in file.parent.parent.glob("??/*") if other != file]
        other, source = draw.choice(chunks), 0
    with other.open("rb") as chunk:
        chunk.seek(source)
        content = chunk.read(size)
    with file.open("r+b") as chunk:
        chunk.seek(offset)
        chunk.write(content)


def cut(file: Path, offset: int, size: int, draw: random.Random) -> None:
    """The file ends within the chunk."""
    os.truncate(file, offset + draw.choice([0, 17, size - CHUNK, size - 512]))


def stack_of(tmp_path: Path, kind: str, **more: Any) -> StackSettings:
    """Little host memory, and below it the tier that gets into trouble, so that much is read from there."""
    tier = {"type": kind, "path": str(tmp_path / kind), "retries": 0, **more}
    if kind == "disk":
        tier["capacity"] = "64MiB"
    return parse_stack({"version": 1, "log_every": "0s", "tiers": [{"type": "host", "capacity": "2MiB"}, tier]})


def shown(report: Report) -> str:
    out = io.StringIO()
    render(report, Console(file=out, width=100))
    return out.getvalue()


def hits_below(report: Report, start: int, end: int) -> int:
    """Chunks that the lower tier gave to these requests."""
    by_request = {sample.requests: sample.hits[2] for sample in report.samples}
    return by_request[end] - by_request[start]


@pytest.mark.parametrize("lie", [flip, cross, cut], ids=lambda lie: str(lie.__name__))
@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_a_tier_that_lies_is_never_believed(tmp_path: Path, kind: str, lie: Any) -> None:
    liars: list[Liar] = []

    def wrap(name: str, tier: Tier) -> Tier:
        liars.append(Liar(tier, tmp_path / kind, lie))
        return liars[-1]

    report = replay(Rounds(tmp_path / "trace"), stack_of(tmp_path, kind), Playback(CHUNK), wrap)
    (liar,) = liars
    tier = report.tiers[1]
    assert report.tally.requests == REQUESTS
    assert liar.told.total() > 20
    assert tier.failed_reads >= liar.told.total()
    assert tier.corrupt >= liar.told[OutcomeKind.CORRUPT]
    assert tier.hits > 0
    told = to_json(report)
    assert (told["wrong_bytes"], told["tiers"][1]["failed_reads"]) == (0, tier.failed_reads)
    assert "failed reads" in shown(report)


@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_a_tier_that_hangs_costs_its_deadlines_and_comes_back(tmp_path: Path, kind: str) -> None:
    gates: list[GateTier] = []

    def wrap(name: str, tier: Tier) -> Tier:
        gates.append(GateTier(tier, hold=("exists", "read", "write")))
        gates[-1].open()
        return gates[-1]

    stack = stack_of(tmp_path, kind, deadline="200ms", breaker={"failures": 2, "probe_every": "50ms"})
    trace = Rounds(tmp_path / "trace", {TROUBLE: lambda: gates[0].shut(), WELL: lambda: gates[0].open()})
    report = replay(trace, stack, Playback(CHUNK), wrap)
    tier = report.tiers[1]
    assert report.tally.requests == REQUESTS
    assert tier.timed_out > 0
    assert tier.up
    assert tier.misses[MissReason.TIER_DOWN] > 0
    assert hits_below(report, TROUBLE, WELL) == 0
    assert hits_below(report, WELL, REQUESTS) > 0
    for told in ("timed out", "missed: tier down"):
        assert told in shown(report)


@pytest.mark.parametrize("concurrency", [1, 8])
@pytest.mark.parametrize("kind", ["disk", "fs"])
def test_a_tier_that_fails_is_left_alone_and_comes_back(tmp_path: Path, kind: str, concurrency: int) -> None:
    faults: list[FaultTier] = []

    def wrap(name: str, tier: Tier) -> Tier:
        faults.append(FaultTier(tier, 0, {"failed": 0.002}))
        return faults[-1]

    def down(is_down: bool) -> None:
        faults[0].down = is_down

    stack = stack_of(tmp_path, kind, breaker={"failures": 3, "probe_every": "50ms"})
    trace = Rounds(tmp_path / "trace", {TROUBLE: lambda: down(True), WELL: lambda: down(False)})
    report = replay(trace, stack, Playback(CHUNK, concurrency=concurrency), wrap)
    tier = report.tiers[1]
    assert report.tally.requests == REQUESTS
    assert tier.failed_writes > 0
    assert tier.failed_reads > 0
    assert tier.misses[MissReason.TIER_DOWN] > 0
    assert hits_below(report, TROUBLE + concurrency, WELL - concurrency) == 0
    assert hits_below(report, WELL, REQUESTS) > 0
    for told in ("failed writes", "failed reads", "missed: tier down"):
        assert told in shown(report)


def test_a_tier_that_is_down_at_the_end_is_said_to_be(tmp_path: Path) -> None:
    faults: list[FaultTier] = []

    def wrap(name: str, tier: Tier) -> Tier:
        faults.append(FaultTier(tier, 0, {}))
        return faults[-1]

    def down() -> None:
        faults[0].down = True

    report = replay(
        Rounds(tmp_path / "trace", {20: down}), stack_of(tmp_path, "disk"), Playback(CHUNK, limit=60), wrap
    )
    assert not to_json(report)["tiers"][1]["up"]
    assert "Down at the end: disk." in shown(report)
