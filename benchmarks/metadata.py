"""What the bookkeeping of a chunk costs the engine's scheduler thread, and how that compares with vLLM's.

    .venv-vllm/bin/python -m benchmarks.metadata               # the table, vLLM's manager in the same process
    .venv-vllm/bin/python -m benchmarks.metadata --slots 1000000 --rounds 5
    .venv/bin/python -m benchmarks.metadata --quick            # without vLLM

Contenders are this package's manager with each eviction policy, and vLLM's TieringOffloadingManager with its two,
all without secondary tiers and full, so that each new chunk evicts another. Requests have 64 chunks; every one
gets keys that are objects of their own, as from an engine's hashing. What is timed is the whole life of a request,
each verb in the order in which an engine calls it, divided by its chunks:

- new: a prompt that is not there is looked up, offered, stored, and evicts as much; the request finishes.
- hit: a prompt that is there is looked up by `match_prefix`, loaded, and used once more; the request finishes.
- hit by key: the same, with a `lookup` for each chunk. vLLM has no other way, and does that in both cases.
- miss: each of 64 chunks that are not there is looked up by itself; the request finishes.
- prefix: one look-up of 6,250 chunks (a prompt of 100,000 tokens) that are all there, and nothing else.
- worst call: the longest single call of any verb with 64 chunks, while a manager is filled from empty, turned over
  once, and read: its processor time, the median over the rounds of each round's worst.
"""

import gc
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count
from typing import Any, TypeAlias

from kvcascade.types import Key, LookupResult, RequestContext

from .harness import Cost, argument_parser, others_busy, report_costs, spread
from .managers import manager

CHUNKS = 64
PREFIX = 6250
POLICIES = ["lru", "arc", "s3fifo", "lhd"]
PEERS = ["lru", "arc"]
WORKS = {
    "new": ["begin", "look_up", "end_step", "offer", "end_step", "stored", "finish", "end_step"],
    "hit": ["begin", "look_up", "load", "end_step", "loaded", "finish", "end_step"],
    "hit by key": ["begin", "look_up_each", "load", "end_step", "loaded", "finish", "end_step"],
    "miss": ["begin", "ask_each", "end_step", "finish", "end_step"],
}
Keys: TypeAlias = Sequence[Key]
Round: TypeAlias = dict[str, tuple[float, float]]
"""What each contender took: microseconds a chunk, and of them processor time."""


class Contender:
    """A manager, one request at a time. Every verb takes the chunks of the request."""

    hit: Any

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._names = count()
        self._request: Any = None
        self.evicted: list[Sequence[Key]] = []
        """By offer: one list of all would now and then be moved as it grows, which is not the manager's time."""

    def look_up(self, keys: Keys) -> int:
        """How many leading chunks are there."""
        return self.look_up_each(keys)

    def look_up_each(self, keys: Keys) -> int:
        lookup, request, hit = self._manager.lookup, self._request, self.hit
        for place, key in enumerate(keys):
            if lookup(key, request) is not hit:
                return place
        return len(keys)

    def ask_each(self, keys: Keys) -> None:
        lookup, request = self._manager.lookup, self._request
        for key in keys:
            lookup(key, request)

    def stored(self, keys: Keys) -> None:
        self._manager.complete_store(keys, self._request)

    def load(self, keys: Keys) -> None:
        self._manager.prepare_load(keys, self._request)

    def loaded(self, keys: Keys) -> None:
        self._manager.complete_load(keys, self._request)

    def finish(self, keys: Keys) -> None:
        self._manager.on_request_finished(self._request)


class Ours(Contender):
    """This package's manager, as an engine's adapter uses it."""

    hit = LookupResult.HIT

    def __init__(self, slots: int, policy: str) -> None:
        super().__init__(manager(slots, policy))

    def begin(self, keys: Keys) -> None:
        self._request = RequestContext(str(next(self._names)))
        self._manager.on_new_request(self._request)

    def look_up(self, keys: Keys) -> int:
        hits: int = self._manager.match_prefix(keys, self._request).hits
        return hits

    def offer(self, keys: Keys) -> None:
        self.evicted.append(self._manager.prepare_store(keys, self._request).evicted)

    def end_step(self, keys: Keys) -> None:
        self._manager.on_schedule_end()


class Peer(Contender):
    """vLLM's tiering manager, as its scheduler uses it."""

    def __init__(self, slots: int, policy: str) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

        primary = CPUPrimaryTierOffloadingManager(slots, _Region(slots), cache_policy=policy)
        super().__init__(TieringOffloadingManager(primary))
        self._base = base
        self.hit = base.LookupResult.HIT

    def begin(self, keys: Keys) -> None:
        self._request = self._base.ReqContext(str(next(self._names)))
        self._manager.on_new_request(self._request)

    def offer(self, keys: Keys) -> None:
        self.evicted.append(self._manager.prepare_store(keys, self._request).evicted_keys)

    def end_step(self, keys: Keys) -> None:
        self._manager.on_schedule_end(self._base.ScheduleEndContext([self._request.req_id], ()))


class _Region:
    """Stands in for vLLM's shared memory, of which the manager only asks how it is laid out."""

    def __init__(self, slots: int) -> None:
        self._slots = slots

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(self._slots)).cast("B", (self._slots, 1))

    def cleanup(self) -> None:
        pass


class Bench:
    """A contender, and the prompts that it holds."""

    def __init__(self, name: str, contender: Contender) -> None:
        self.name = name
        self._contender = contender
        self._numbers = count()
        self._prompts: dict[int, list[Key]] = {}
        self._prompt_of: dict[Key, int] = {}

    def prompts(self, work: str, number: int) -> list[list[Key]]:
        """Prompts for so many requests of this kind: absent ones, or any that are there."""
        if not work.startswith("hit"):
            return [prompt_keys(next(self._numbers)) for _ in range(number)]
        there = random.choices(list(self._prompts.values()), k=number)
        return [_copied(keys) for keys in there]

    def run(self, work: str, prompts: Sequence[Keys]) -> tuple[float, float]:
        """Microseconds a chunk, and microseconds of processor time, of these requests."""
        verbs = [getattr(self._contender, verb) for verb in WORKS[work]]
        begin, busy = time.perf_counter(), time.thread_time()
        for keys in prompts:
            for verb in verbs:
                verb(keys)
        chunks = len(prompts) * CHUNKS
        costs = (time.perf_counter() - begin) / chunks * 1e6, (time.thread_time() - busy) / chunks * 1e6
        self._settle(work, prompts)
        return costs

    def worst(self, work: str, prompts: Sequence[Keys]) -> tuple[float, str]:
        """Microseconds of processor time of the longest call of these requests, and which verb it was."""
        worst = 0, ""
        verbs = [(verb, getattr(self._contender, verb)) for verb in WORKS[work]]
        for keys in prompts:
            for name, verb in verbs:
                begin = time.thread_time_ns()
                verb(keys)
                worst = max(worst, (time.thread_time_ns() - begin, name))
        self._settle(work, prompts)
        return worst[0] / 1e3, worst[1]

    def prefix(self) -> tuple[float, float]:
        """As `run`, a key, of the look-up of a long prompt that is there."""
        some = random.choices(list(self._prompts.values()), k=-(-PREFIX // CHUNKS))
        keys = _copied([key for prompt in some for key in prompt][:PREFIX])
        verbs = {verb: getattr(self._contender, verb) for verb in ("begin", "look_up", "finish", "end_step")}
        verbs["begin"](keys)
        begin, busy = time.perf_counter(), time.thread_time()
        hits = verbs["look_up"](keys)
        costs = (time.perf_counter() - begin) / PREFIX * 1e6, (time.thread_time() - busy) / PREFIX * 1e6
        verbs["finish"](keys)
        verbs["end_step"](keys)
        if hits != PREFIX:
            raise RuntimeError(f"{hits} of {PREFIX} chunks were found")
        return costs

    def _settle(self, work: str, prompts: Sequence[Keys]) -> None:
        """Brings what is known to be there up to date."""
        if work == "new":
            for keys in prompts:
                number = self._prompt_of[keys[0]] = next(self._numbers)
                self._prompt_of.update(dict.fromkeys(keys, number))
                self._prompts[number] = list(keys)
        for key in chain.from_iterable(self._contender.evicted):
            self._prompts.pop(self._prompt_of.pop(key), None)
        self._contender.evicted.clear()


def prompt_keys(prompt: int) -> list[Key]:
    """The keys of a prompt that no other one has: hashes, and the index of a cache group."""
    hashes = random.Random(prompt).randbytes(32 * CHUNKS)
    return [hashes[start : start + 32] + bytes(4) for start in range(0, len(hashes), 32)]


def _copied(keys: Keys) -> list[Key]:
    """The same keys as other objects: no hash of theirs is known, no comparison is by identity."""
    return [key[:1] + key[1:] for key in keys]


def makers(peers: bool) -> dict[str, Callable[[int], Contender]]:
    """Contenders by name, each to be made for a number of slots."""
    ours = {policy: partial(Ours, policy=policy) for policy in POLICIES}
    return ours | ({f"vLLM {policy}": partial(Peer, policy=policy) for policy in PEERS} if peers else {})


def rates(slots: int, rounds: int, spare: int, peers: bool) -> Iterator[Cost]:
    """What a chunk costs, in each kind of work, in full managers; of all rounds those count in which other
    processes were least busy."""
    requests = max(5000, slots // 4) // CHUNKS
    benches = [Bench(name, make(slots)) for name, make in makers(peers).items()]
    for bench in benches:
        bench.run("new", bench.prompts("new", 2 * slots // CHUNKS))
    works = [*WORKS, "prefix"] if slots > PREFIX else list(WORKS)
    if "prefix" not in works:
        sys.stderr.write(f"{slots} slots: no look-up of {PREFIX} chunks, which do not fit\n")
    taken: dict[str, list[tuple[float, Round]]] = {work: [] for work in works}
    for _ in range(rounds + spare):
        for work in works:
            begin, before = time.perf_counter(), others_busy()
            found = {}
            for bench in random.sample(benches, len(benches)):
                found[bench.name] = (
                    bench.run(work, bench.prompts(work, requests)) if work in WORKS else bench.prefix()
                )
            taken[work].append(((others_busy() - before) / (time.perf_counter() - begin), found))
    for work in works:
        counted = [found for _, found in sorted(taken[work], key=lambda one: one[0])[:rounds]]
        case = {"work": work, "slots": slots}
        for bench in benches:
            wall, busy = zip(*(found[bench.name] for found in counted), strict=True)
            yield Cost(case, bench.name, statistics.median(wall), statistics.median(busy), spread(busy), rounds)


def stalls(slots: int, rounds: int, peers: bool) -> Iterator[Cost]:
    """The longest single call in the life of a manager."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        made = list(makers(peers).items())
        for name, make in random.sample(made, len(made)):
            bench = Bench(name, make(slots))
            worst = [
                bench.worst(work, bench.prompts(work, int(share * slots) // CHUNKS))
                for work, share in (("new", 2), ("hit", 0.5), ("miss", 0.1))
            ]
            longest, verb = max(worst)
            found[name].append(longest)
            sys.stderr.write(f"{slots} slots, {name}: the worst call was {verb}, {longest:.0f} µs\n")
    for name in makers(peers):
        worst_us = statistics.median(found[name])
        yield Cost({"work": "worst call", "slots": slots}, name, worst_us, worst_us, spread(found[name]), rounds)


def _peers_here() -> bool:
    try:
        import vllm.v1.kv_offload.tiering.manager  # noqa: F401
    except ImportError as error:
        sys.stderr.write(f"vLLM's manager is not measured, for it is not here ({error}): .venv-vllm has it\n")
        return False
    return True


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--slots", nargs="+", type=int, default=[1000, 10_000, 100_000])
    parser.add_argument("--quick", action="store_true", help="10,000 slots only, and five rounds")
    parser.add_argument("--only", choices=["rates", "stalls"], help="leave the other part out")
    options = parser.parse_args()
    rounds = 5 if options.quick else options.rounds
    peers = _peers_here()
    costs: list[Cost] = []
    gc.disable()
    for slots in [10_000] if options.quick else options.slots:
        costs += rates(slots, rounds, options.spare, peers) if options.only != "stalls" else []
        costs += stalls(slots, rounds, peers) if options.only != "rates" else []
    report_costs(costs, "lru", "chunk", options)


if __name__ == "__main__":
    main()
