"""What a stack costs a real engine where nothing ever returns: throughput and time to first token.

    .venv-vllm/bin/python -m benchmarks.miss_tax               # the table
    .venv-vllm/bin/python -m benchmarks.miss_tax --pairs 40

Two engines of vLLM's CPU platform, each in a process of its own, with the same model of twelve small layers: one
as it is, one with a stack of host memory and disk under its OffloadingConnector. In each pair both compute the
same prompts, which nobody has seen, one engine after the other, in an order drawn anew; so every chunk is looked
up in vain, stored, cascaded to disk, and, once host memory is full, evicted. Reported is the median over pairs of
what the stack adds, with its 95 % interval by bootstrap, for

- last: the seconds until the last token of all requests;
- first: the seconds until a request's first token, the mean of its batch;
- rest: the seconds until nothing is on its way any more, stores included;
- processor: the seconds of processor time, of all threads and of the system for them.
"""

import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .harness import argument_parser, written

MEASURES = ("last", "first", "rest", "processor")
_RESAMPLES = 4000


@dataclass
class Sample:
    """What one engine took for its half of a pair."""

    case: dict[str, Any]
    """The pair's number, and what was measured."""
    contender: str
    seconds: float


def engine_settings(model: Path, stack: dict[str, Any] | None) -> dict[str, Any]:
    from kvcascade.testing.vllm import SPEC, transfer_config

    settings = {"model": str(model), "max_model_len": 2048, "max_num_batched_tokens": 2048}
    return settings if stack is None else settings | {"kv_transfer_config": transfer_config(SPEC, stack)}


def pairs(folder: Path, count: int, batch: int, length: int, tokens: int) -> list[dict[str, dict[str, float]]]:
    """For each pair what both engines took."""
    from kvcascade.testing.vllm import Engine, make_model, on_disk, prompt

    (folder / "model").mkdir()
    model = make_model(folder / "model", seed=0, layers=12, hidden=512)
    stacks = {"plain": None, "stack": on_disk(folder / "disk", "128MiB")}
    found = []
    with ExitStack() as ends:
        engines = {}
        for name, stack in stacks.items():
            engines[name] = Engine(engine_settings(model, stack), folder / f"{name}.log")
            ends.callback(engines[name].kill)
        for engine in engines.values():
            engine.wait_ready()
        for number in range(-2, count):  # the first two only warm up
            prompts = [prompt(length, (number + 2) * batch + place) for place in range(batch)]
            pair = {
                name: engines[name].timed(prompts=prompts, tokens=tokens)
                for name in random.sample(list(engines), 2)
            }
            if number >= 0:
                found.append(pair)
    return found


def samples(found: Sequence[dict[str, dict[str, float]]]) -> list[Sample]:
    return [
        Sample({"pair": number, "measure": measure}, name, pair[name][measure])
        for number, pair in enumerate(found)
        for measure in MEASURES
        for name in pair
    ]


def table(found: Sequence[dict[str, dict[str, float]]]) -> str:
    lines = [f"{'':10}{'seconds':>9}{'added':>8}{'95 % interval':>20}"]
    for measure in MEASURES:
        seconds = statistics.median(pair["plain"][measure] for pair in found)
        added, low, high = interval([pair["stack"][measure] / pair["plain"][measure] - 1 for pair in found])
        lines.append(f"{measure:10}{seconds:9.3f}{added:+8.1%}{f'{low:+.1%} to {high:+.1%}':>20}")
    return "\n".join(lines)


def interval(shares: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the bounds of its 95 % interval."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(shares, k=len(shares))) for _ in range(_RESAMPLES))
    return statistics.median(shares), medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4, help="requests at once")
    parser.add_argument("--length", type=int, default=500, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = pairs(Path(folder), options.pairs, options.batch, options.length, options.tokens)
    if not written(samples(found), options.json, options.out, options.plot):
        sys.stdout.write(table(found) + "\n")


if __name__ == "__main__":
    main()
