"""What the benchmarks share: contenders that take turns, medians, a table, JSON.

Figures of a shared machine drift from minute to minute, so contenders of one case run round by round, in an order
drawn anew each round, and only ratios within a case are compared.
"""

import gc
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["Result", "argument_parser", "child", "interleaved", "report"]

Work = Callable[[], int]
"""Does the work once, and returns the payload bytes that it has moved."""


@dataclass
class Result:
    """The median rate of one contender in one case."""

    case: dict[str, Any]
    contender: str
    gb_per_s: float
    spread: float
    """Half the distance between the quartiles, as a share of the median."""
    rounds: int


def interleaved(
    case: dict[str, Any], contenders: dict[str, Work], rounds: int = 7, seconds: float = 0.1
) -> list[Result]:
    """Each contender's median over `rounds` rounds of at least `seconds` seconds."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for work in contenders.values():
        work()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in random.sample(list(contenders), len(contenders)):
                rates[name].append(_rate(contenders[name], seconds))
    finally:
        gc.enable()
    return [Result(case, name, statistics.median(found), _spread(found), rounds) for name, found in rates.items()]


def _rate(work: Work, seconds: float) -> float:
    begin = time.perf_counter()
    moved = work()
    while (spent := time.perf_counter() - begin) < seconds:
        moved += work()
    return moved / spent / 1e9


def _spread(rates: list[float]) -> float:
    low, _, high = statistics.quantiles(rates, n=4)
    return (high - low) / 2 / statistics.median(rates)


def report(results: Sequence[Result], base: str, as_json: bool, out: Path | None = None) -> None:
    """Prints a line for each case: each contender's rate, and how `base` compares with it."""
    if as_json:
        text = json.dumps([asdict(result) for result in results], indent=1)
        if out is not None:
            out.write_text(text)
        else:
            sys.stdout.write(text + "\n")
        return
    cases: dict[str, dict[str, Result]] = {}
    for result in results:
        cases.setdefault(" ".join(map(str, result.case.values())), {})[result.contender] = result
    names = list(dict.fromkeys(result.contender for result in results))
    others = [name for name in names if name != base]
    width = max(len(case) for case in cases)
    header = f"{'':{width}}" + "".join(f"{name:>16}" for name in names)
    sys.stdout.write(header + "".join(f"{f'{base}/{name}':>24}" for name in others) + "\n")
    for case, found in cases.items():
        line = f"{case:{width}}"
        line += "".join(f"{found[name].gb_per_s:16.2f}" if name in found else f"{'-':>16}" for name in names)
        for name in others:
            ratio = f"{found[base].gb_per_s / found[name].gb_per_s:.2f}" if {name, base} <= set(found) else "-"
            line += f"{ratio:>24}"
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextmanager
def child(script: str, *arguments: str) -> Iterator[str]:
    """Runs a script in a process of its own; what it prints first (its port, say) is given. It is ended after."""
    command = [sys.executable, script, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def argument_parser(description: str | None) -> Any:
    """--rounds, --seconds, --json, --out, as every benchmark has them."""
    import argparse

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a round, at least")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="a file for the JSON")
    return parser
