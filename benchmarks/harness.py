"""What the benchmarks share: contenders that take turns, medians, a table, JSON.

Figures of a shared machine drift from minute to minute, so contenders of one case run round by round, in an order
drawn anew each round, and only ratios within a case are compared.
"""

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = [
    "Cost",
    "Result",
    "argument_parser",
    "child",
    "interleaved",
    "others_busy",
    "report",
    "report_costs",
    "spread",
    "written",
]

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
    cpu_s_per_gb: float
    """The median processor time of this thread, or all threads, the system's work for it included."""
    rounds: int
    others: float = 0.0
    """The share of the machine's processors that other processes took meanwhile, at the median."""


@dataclass
class Cost:
    """What one contender takes for a unit of work in one case, in microseconds: medians over the rounds."""

    case: dict[str, Any]
    contender: str
    us: float
    cpu_us: float
    """Processor time of this thread, the system's work for it included."""
    spread: float
    """As in `Result`."""
    rounds: int


def interleaved(
    case: dict[str, Any],
    contenders: dict[str, Work],
    rounds: int = 7,
    seconds: float = 0.1,
    *,
    pause: float = 0.0,
    clock: Callable[[], float] = time.thread_time,
    spare: int = 0,
) -> list[Result]:
    """Each contender's median over `rounds` rounds of at least `seconds` seconds.

    `pause`: seconds of rest before each measurement, the same for all: for a medium that is throttled. `clock`: of
    processor time; `time.process_time` where contenders work in threads of their own. `spare`: so many rounds more
    are taken, and of all those count in which other processes were least busy.
    """
    for work in contenders.values():
        work()
    taken: list[tuple[float, dict[str, tuple[float, float]]]] = []
    gc.disable()
    try:
        for _ in range(rounds + spare):
            begin, before = time.perf_counter(), others_busy()
            found = {}
            for name in random.sample(list(contenders), len(contenders)):
                time.sleep(pause)
                found[name] = _measure(contenders[name], seconds, clock)
            taken.append(((others_busy() - before) / (time.perf_counter() - begin), found))
    finally:
        gc.enable()
    counted = sorted(taken, key=lambda one: one[0])[:rounds]
    others = statistics.median(share for share, _ in counted)
    results = []
    for name in contenders:
        rates, costs = zip(*(found[name] for _, found in counted), strict=True)
        rate, cost = statistics.median(rates), statistics.median(costs)
        results.append(Result(case, name, rate, spread(rates), cost, rounds, others))
    return results


def others_busy() -> float:
    """Seconds of each processor's time, on average, that other processes have taken so far; 0 where the system
    does not say."""
    try:
        user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().partition("\n")[0].split()[1:9])
    except OSError:
        return 0.0
    busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    return (busy - time.process_time()) / (os.cpu_count() or 1)


def _measure(work: Work, seconds: float, clock: Callable[[], float]) -> tuple[float, float]:
    """GB/s, and seconds of processor time a GB."""
    begin, busy = time.perf_counter(), clock()
    moved = work()
    while (spent := time.perf_counter() - begin) < seconds:
        moved += work()
    return moved / spent / 1e9, (clock() - busy) / moved * 1e9


def spread(rates: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    low, _, high = statistics.quantiles(rates, n=4)
    return (high - low) / 2 / statistics.median(rates)


def report(
    results: Sequence[Result], base: str, as_json: bool, out: Path | None = None, plot: Path | None = None
) -> None:
    """Prints a line for each case: each contender's rate, and how `base` compares with it. On a machine that is
    busy with other things the processor time tells more than the rate: it follows in a table of its own."""
    if written(results, as_json, out, plot):
        return
    others = statistics.median(result.others for result in results)
    title = f"GB/s (other processes took {others:.0%} of the machine; {_spreads(results)})"
    _table(title, results, base, lambda one: one.gb_per_s)
    _table("GB per second of processor time", results, base, lambda result: 1 / result.cpu_s_per_gb)


def report_costs(costs: Sequence[Cost], base: str, unit: str, options: Any) -> None:
    """As `report`, of microseconds a `unit`: the ratio says how many times cheaper `base` is. `options`: of
    `argument_parser`."""
    if written(costs, options.json, options.out, options.plot):
        return
    _table(f"microseconds a {unit} ({_spreads(costs)})", costs, base, lambda cost: cost.us, cheaper=True)
    _table(f"microseconds of processor time a {unit}", costs, base, lambda cost: cost.cpu_us, cheaper=True)


def _spreads(results: Sequence[Any]) -> str:
    """What the medians of the rounds hide."""
    spreads = sorted(result.spread for result in results)
    return (
        f"half of the rounds within ±{statistics.median(spreads):.0%} of the median, ±{spreads[-1]:.0%} at worst"
    )


def written(results: Sequence[Any], as_json: bool, out: Path | None, plot: Path | None) -> bool:
    """Writes plot and JSON, where they are wanted; whether it is JSON instead of a table."""
    rows = [asdict(result) for result in results]
    if plot is not None:
        import_module(".plots" if __package__ else "plots", __package__).draw(rows, plot)
    text = json.dumps(rows, indent=1)
    if out is not None:
        out.write_text(text)
    elif as_json:
        sys.stdout.write(text + "\n")
    return as_json


def _table(
    title: str, results: Sequence[Any], base: str, value: Callable[[Any], float], cheaper: bool = False
) -> None:
    cases: dict[str, dict[str, float]] = {}
    for result in results:
        cases.setdefault(" ".join(map(str, result.case.values())), {})[result.contender] = value(result)
    names = list(dict.fromkeys(result.contender for result in results))
    others = [name for name in names if name != base] if base in names else []
    width = max(map(len, cases))
    ratios = [f"{name}/{base}" if cheaper else f"{base}/{name}" for name in others]
    lines = [title, f"{'':{width}}" + "".join(f"{name:>{_width(name)}}" for name in names)]
    lines[1] += "".join(f"{ratio:>{_width(ratio)}}" for ratio in ratios)
    for case, found in cases.items():
        line = f"{case:{width}}" + "".join(
            f"{found[name] if name in found else float('nan'):{_width(name)}.2f}" for name in names
        )
        for name, ratio in zip(others, ratios, strict=True):
            both = {name, base} <= set(found)
            share = found[base] / found[name] if both else float("nan")
            line += f"{1 / share if cheaper else share:{_width(ratio)}.2f}"
        lines.append(line.replace(" nan", "   -"))
    sys.stdout.write("\n".join(lines) + "\n\n")
    sys.stdout.flush()


def _width(title: str) -> int:
    return max(12, len(title) + 2)


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
    """--rounds, --seconds, --json, --out, --plot, as every benchmark has them."""
    import argparse

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--spare", type=int, default=0, help="rounds more, of which those count that others disturbed least"
    )
    parser.add_argument("--seconds", type=float, default=0.1, help="of a round, at least")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="a file for the JSON")
    parser.add_argument("--plot", type=Path, help="a file for a plot")
    return parser
