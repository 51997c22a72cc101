"""How long a returning prompt waits for its first token: loaded from host memory, from disk, and computed again.

    .venv-vllm/bin/python -m benchmarks.ttft            # the table
    .venv-vllm/bin/python -m benchmarks.ttft --json

One run on the real engine, vLLM's CPU platform, with a stack of host memory and disk under its
OffloadingConnector, and a model of twelve small layers. In each round, in an order drawn anew:

- computed: a prompt that nobody has seen;
- host: one that was seen, with the device's cache cleared;
- disk: the same with host memory cleared, too. The disk tier reads past the page cache where it can.

How many tokens were loaded is checked in every round, and that the first token is the one that was computed.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcascade.testing.vllm import full_blocks, make_model, on_disk, prompt, transfer_config
from kvcascade.testing.vllm.runner import Runner
from kvcascade.testing.vllm.stacks import SPEC

from .harness import argument_parser, written

TOKENS = 1500
SOURCES = ("computed", "host", "disk")


@dataclass
class Result:
    """The time to the first token of a prompt, from one source."""

    case: dict[str, int]
    """Tokens of the prompt."""
    contender: str
    """The source."""
    loaded_tokens: int
    seconds: float
    """The median."""
    spread: float
    """Half the distance between the quartiles, as a share of the median."""
    rounds: int


class Bench:
    """An engine, and the prompt that returns to it."""

    def __init__(self, folder: Path) -> None:
        (folder / "model").mkdir()
        stack = on_disk(folder / "disk", "256MiB") | {"log_every": "0s"}
        self.runner = Runner(
            {
                "model": str(make_model(folder / "model", seed=0, layers=12, hidden=512)),
                "max_model_len": 2048,
                "max_num_batched_tokens": 2048,
                "kv_transfer_config": transfer_config(SPEC, stack),
            }
        )
        self.seen = prompt(TOKENS, seed=0)
        self._new = 1
        self._first = self.ask(self.seen)[1]

    def ask(self, tokens: list[int]) -> tuple[float, Any]:
        """Seconds until the first token, and the output."""
        from vllm import SamplingParams

        engine = self.runner.engine
        begin = time.perf_counter()
        engine.add_request(f"{begin}", {"prompt_token_ids": tokens}, SamplingParams(max_tokens=1, temperature=0))
        finished: list[Any] = []
        while not finished:
            finished = [output for output in engine.step() if output.finished]
            time.sleep(0 if finished else 0.0005)  # as vLLM's core, which waits for what is on its way
        seconds = time.perf_counter() - begin
        self.runner.settle()
        return seconds, finished[0]

    def measure(self, source: str) -> float:
        """One time to the first token.

        Raises:
            RuntimeError: it did not come from there, or is another one.
        """
        self.runner.reset()
        if source == "disk":
            self.runner._inside().stack.reset_cache("primary")
        self._new += source == "computed"
        seconds, output = self.ask(prompt(TOKENS, self._new) if source == "computed" else self.seen)
        if output.num_cached_tokens != loaded(source):
            raise RuntimeError(f"{source}: {output.num_cached_tokens} tokens were loaded, not {loaded(source)}")
        if source != "computed" and output.outputs[0].token_ids != self._first.outputs[0].token_ids:
            raise RuntimeError(f"{source}: another first token than the one that was computed")
        return seconds


def loaded(source: str) -> int:
    return 0 if source == "computed" else full_blocks(TOKENS)


def run(folder: Path, rounds: int) -> list[Result]:
    bench = Bench(folder)
    times: dict[str, list[float]] = {source: [] for source in SOURCES}
    for source in SOURCES:
        bench.measure(source)
    for _ in range(rounds):
        for source in random.sample(SOURCES, len(SOURCES)):
            times[source].append(bench.measure(source))
    bench.runner.engine.engine_core.shutdown()
    results = []
    for source, found in times.items():
        low, median, high = statistics.quantiles(found, n=4)
        results.append(
            Result({"tokens": TOKENS}, source, loaded(source), median, (high - low) / 2 / median, rounds)
        )
    return results


def table(results: list[Result]) -> str:
    computed = next(result.seconds for result in results if result.contender == "computed")
    lines = [f"{'':10}{'loaded':>8}{'ms':>9}{'spread':>8}{'computed/it':>13}"]
    lines += [
        f"{result.contender:10}{result.loaded_tokens:8}{result.seconds * 1e3:9.1f}{result.spread:8.0%}"
        f"{computed / result.seconds:13.1f}"
        for result in results
    ]
    return "\n".join(lines)


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    with tempfile.TemporaryDirectory() as folder:
        results = run(Path(folder), arguments.rounds)
    if not written(results, arguments.json, arguments.out, arguments.plot):
        sys.stdout.write(table(results) + "\n")


if __name__ == "__main__":
    main()
