"""What a step costs the scheduler thread as requests, tiers and stored chunks grow.

    python -m benchmarks.scale             # the table
    python -m benchmarks.scale --quick     # up to 100,000 chunks

Prompts have 64 chunks, managers have no medium below them, so that only their bookkeeping is timed, in processor
time of the calling thread, a chunk touched; the least of the rounds, for what others do on the machine only adds.
It should be the same in every row of a kind: the cost of a step is linear in the chunks that it touches, and
depends on nothing else but the tiers that are to be told.

- new: prompts that are not there are looked up, offered, stored (and cascade, where there are tiers), and evict as
  much.
- hit: prompts that are in primary are looked up and loaded.
- promote: prompts that are in a tier below only are looked up, read into primary, and loaded.
- worst call: where one prompt comes at a time, the longest single call of any verb, in microseconds.

Kinds of rows: requests that do so at once, in one step; requests that run meanwhile and do nothing; tiers below;
chunks that primary holds, above a tier three times as large that receives `through`, or `on_evict`.
"""

import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, TypeAlias

from kvcascade import SecondaryTierManager
from kvcascade.types import Key, RequestContext

from .harness import Cost, argument_parser, report_costs, spread
from .managers import manager, memory_tier
from .metadata import CHUNKS, prompt_keys

Prompt: TypeAlias = list[Key]
STEPS = 20
"""Steps a round in which prompts come, where there is one at a time."""


class Engine:
    """Serves several prompts at a time, each verb for all of them, and times every call."""

    def __init__(self, stack: SecondaryTierManager) -> None:
        self.stack = stack
        self.worst = 0.0
        """Seconds of processor time of the longest call."""
        self.spent = 0.0
        """Of all calls."""
        self._names = count()
        self._primary: dict[Key, None] = {}
        self._numbers = count()
        self._prompts: dict[Key, Prompt] = {}
        """The head of each prompt that was stored -> the prompt."""

    def idle(self, requests: int) -> None:
        """So many requests begin, find their prompt, and do nothing from here on."""
        for prompt in self.stored(requests):
            ctx = RequestContext(str(next(self._names)))
            self.stack.on_new_request(ctx)
            self.stack.match_prefix(prompt, ctx)
        self.stack.on_schedule_end()

    def fresh(self, number: int) -> list[Prompt]:
        return [prompt_keys(next(self._numbers)) for _ in range(number)]

    def stored(self, number: int, primary: bool = True) -> list[Prompt]:
        """Any prompts that are in primary, or that are not."""
        heads = list(self._prompts)
        found: list[Prompt] = []
        for head in random.sample(heads, len(heads)):
            prompt = self._prompts[head]
            if all((key in self._primary) is primary for key in prompt):
                found.append([key[:1] + key[1:] for key in prompt])
            if len(found) == number:
                break
        return found

    def new(self, prompts: Sequence[Prompt]) -> None:
        contexts = self._begin(prompts)
        self._end_step()
        left = dict(zip(contexts, prompts, strict=True))
        while left:  # with `on_evict`, room may have to be made first
            granted = {ctx: self._timed(self.stack.prepare_store, keys, ctx) for ctx, keys in left.items()}
            self._end_step()
            for ctx, offer in granted.items():
                if offer is not None:
                    self._timed(self.stack.complete_store, offer.keys, ctx)
            refused = {ctx: left[ctx] if offer is None else offer.refused for ctx, offer in granted.items()}
            left = {ctx: list(keys) for ctx, keys in refused.items() if keys}
        self._finish(contexts)
        self._prompts.update((prompt[0], prompt) for prompt in prompts)

    def hit(self, prompts: Sequence[Prompt]) -> None:
        self._load(self._begin(prompts), prompts)

    def promote(self, prompts: Sequence[Prompt]) -> None:
        contexts = self._begin(prompts)
        self._end_step()
        found = [
            self._timed(self.stack.match_prefix, keys, ctx).hits
            for ctx, keys in zip(contexts, prompts, strict=True)
        ]
        self._load(contexts, [keys[:hits] for keys, hits in zip(prompts, found, strict=True)])

    def settle(self) -> None:
        """Takes in what has come to primary and gone from it."""
        for event in self.stack.take_events():
            if event.tier == "host" and event.removed:
                for key in event.keys:
                    del self._primary[key]
            elif event.tier == "host":
                self._primary.update(dict.fromkeys(event.keys))

    def _begin(self, prompts: Sequence[Prompt]) -> list[RequestContext]:
        contexts = [RequestContext(str(next(self._names))) for _ in prompts]
        for ctx, keys in zip(contexts, prompts, strict=True):
            self._timed(self.stack.on_new_request, ctx)
            self._timed(self.stack.match_prefix, keys, ctx)
        return contexts

    def _load(self, contexts: Sequence[RequestContext], prompts: Sequence[Prompt]) -> None:
        pairs = list(zip(prompts, contexts, strict=True))
        for keys, ctx in pairs:
            self._timed(self.stack.prepare_load, keys, ctx)
        self._end_step()
        for keys, ctx in pairs:
            self._timed(self.stack.complete_load, keys, ctx)
        self._finish(contexts)

    def _finish(self, contexts: Sequence[RequestContext]) -> None:
        for ctx in contexts:
            self._timed(self.stack.on_request_finished, ctx)
        self._end_step()

    def _end_step(self) -> None:
        self._timed(self.stack.on_schedule_end)

    def _timed(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.thread_time()
        result = verb(*arguments)
        spent = time.thread_time() - begin
        self.spent += spent
        self.worst = max(self.worst, spent)
        return result


def measure(kind: str, size: int, engine: Engine, at_once: int, rounds: int) -> Iterator[Cost]:
    """Microseconds a chunk of each work, in steps with `at_once` prompts."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        engine.worst = 0.0
        for work in ("new", "hit", "promote"):
            engine.settle()
            prompts: Callable[[], list[Prompt]] = {
                "new": lambda: engine.fresh(at_once),
                "hit": lambda: engine.stored(at_once),
                "promote": lambda: engine.stored(at_once, primary=False),
            }[work]
            chunks, engine.spent = 0, 0.0
            for _ in range(max(1, STEPS // at_once)):
                if some := prompts():
                    getattr(engine, work)(some)
                    engine.settle()
                    chunks += len(some) * CHUNKS
            if chunks:
                found[work].append(engine.spent / chunks * 1e6)
        if at_once == 1:
            found["worst call"].append(engine.worst * 1e6)
    for work, us in found.items():
        median = statistics.median(us)
        yield Cost({"kind": kind, "number": size}, work, median, median, spread(us), len(us))


def filled(slots: int, below: Sequence[Any]) -> Engine:
    """An engine whose primary is full, and has evicted as much again."""
    engine = Engine(manager(slots, below=below, events=True))
    for _ in range(2 * slots // CHUNKS // 8 + 1):
        engine.new(engine.fresh(8))
        engine.settle()
    return engine


def rows(most: int, rounds: int) -> Iterator[Cost]:
    for requests in (1, 10, 100):
        engine = filled(100_000, [memory_tier("below", 300_000)])
        yield from measure("requests at once", requests, engine, requests, rounds)
    for requests in (1, 10, 100, 500):
        engine = filled(50_000, [memory_tier("below", 150_000)])
        engine.idle(requests)
        yield from measure("requests idle", requests, engine, 1, rounds)
    for tiers in (0, 1, 2, 3, 4):
        engine = filled(10_000, [memory_tier(f"tier-{number}", 30_000) for number in range(tiers)])
        yield from measure("tiers below", tiers, engine, 1, rounds)
    for write in ("through", "on_evict"):
        for slots in (1000, 10_000, 100_000, 1_000_000):
            if slots <= most:
                engine = filled(slots, [memory_tier("below", 3 * slots, write=write)])
                yield from measure(f"chunks, {write}", slots, engine, 1, rounds)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="no more than 100,000 chunks, five rounds")
    options = parser.parse_args()
    gc.disable()
    costs = list(rows(100_000 if options.quick else 1_000_000, 5 if options.quick else options.rounds))
    report_costs(costs, "", "chunk", options)


if __name__ == "__main__":
    main()
