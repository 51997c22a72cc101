"""Chains of four tiers, drawn by seed with all policies mixed, over media that fail, hang, are slow and come back.

Longer with KVCASCADE_EXAMPLES: that many chains (40 by default).
"""

import os
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvcascade.configs import parse_stack
from kvcascade.configs.registry import EVICTION, known
from kvcascade.stack import build
from kvcascade.testing import Driver, FaultTier, GateTier, LatencyTier, buffer, fill, holds, key_for
from kvcascade.tiers import Tier
from kvcascade.types import Key, Namespace, RequestContext, StoreOffer

EXAMPLES = int(os.environ.get("KVCASCADE_EXAMPLES", "40"))
ACTIONS = 250
CHUNK = 4096
EVICTIONS = sorted(known(EVICTION))
RATES: list[dict[str, float]] = [
    {},
    {"failed": 0.1},
    {"failed": 0.05, "missing": 0.05, "corrupt": 0.05, "refused": 0.05, "raises": 0.05},
]


def _prompts(draw: random.Random) -> list[list[Key]]:
    """Prompts that share heads, as those of one system do."""
    numbers = iter(range(10**6))
    heads = [[key_for(next(numbers)) for _ in range(draw.randint(1, 6))] for _ in range(5)]
    return [draw.choice(heads) + [key_for(next(numbers)) for _ in range(draw.randint(1, 8))] for _ in range(30)]


def _settings(draw: random.Random, path: Path, weights: str) -> dict[str, Any]:
    host = {
        "type": "host",
        "capacity": (draw.choice([17, 25, 41])) * CHUNK,
        "watermarks": draw.choice([{"high": 0.95, "low": 0.9}, {"high": 0.8, "low": 0.5}]),
        "staging": draw.choice([5, 9]) * CHUNK,
        "eviction": draw.choice(EVICTIONS),
    }
    middle = {"type": "memory", "capacity": draw.choice([20, 60]) * CHUNK}
    if draw.random() < 0.5:
        middle = {"type": "fs", "path": str(path / "shared")}
    last = {"type": "memory", "name": "last"}
    if draw.random() < 0.5:
        last["capacity"] = draw.choice([40, 90]) * CHUNK
    disk = {"type": "disk", "path": str(path / "disk"), "capacity": draw.choice(["2MiB", "3MiB"])}
    tiers: list[dict[str, Any]] = [host, disk, middle, last]
    for above, tier in pairwise(tiers):
        tier |= _policies(draw, can_receive_evicted="capacity" in above)
        if "capacity" in tier:
            tier["eviction"] = draw.choice(EVICTIONS)
    return {"version": 1, "log_every": "0s", "weights_version": weights, "tiers": tiers}


def _policies(draw: random.Random, can_receive_evicted: bool) -> dict[str, Any]:
    return {
        "write": draw.choice(["through", "off"] + ["on_evict"] * 3 * can_receive_evicted),
        "fill": draw.random() < 0.5,
        "promote": draw.choice(["always", "always", "never", {"after": 2}]),
        "admit_after": draw.choice([1, 1, 2]),
        "ttl": draw.choice([None, None, "20s"]),
        "deadline": draw.choice(["200ms", "2s"]),
        "concurrency": draw.randint(1, 3),
        "queue": draw.choice([0.125, 1.0]),
        "retries": draw.choice([0, 1]),
        "breaker": {"failures": draw.randint(2, 5), "probe_every": "1s"},
    }


@dataclass
class Medium:
    """A tier with all that can be done to it."""

    inner: Tier
    fault: FaultTier
    gate: GateTier
    slow: bool = False

    def heal(self) -> None:
        self.fault.active = self.fault.down = self.slow = False
        self.gate.open()

    def trouble(self, draw: random.Random) -> None:
        """Something else is wrong from now on, or nothing."""
        self.heal()
        self.fault.active = draw.random() < 0.5
        self.fault.down = draw.random() < 0.2
        self.slow = draw.random() < 0.2
        if draw.random() < 0.2:
            self.gate.shut()


@dataclass
class Life:
    """A request, and what is open of it."""

    ctx: RequestContext
    prompt: list[Key]
    found: int | None = None
    load: tuple[list[Key], list[int], str] | None = None
    offer: StoreOffer | None = None
    computed: int = 0


class JumpingClock:
    """The real time, and what it was moved ahead."""

    def __init__(self) -> None:
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._ahead

    def jump(self, seconds: float) -> None:
        self._ahead += seconds


@dataclass
class World:
    """An engine that is restarted and reset, over media in trouble."""

    path: Path
    draw: random.Random
    clock: JumpingClock = field(default_factory=JumpingClock)
    lives: list[Life] = field(default_factory=list)
    begun: int = 0
    resets: int = 0
    weights: str = ""
    reset_unnamed: bool = False
    """Since the last start, and not named again."""

    def __post_init__(self) -> None:
        self.prompts = _prompts(self.draw)
        self.settings = _settings(self.draw, self.path, "")
        self.start()

    def start(self) -> None:
        self.reset_unnamed = False
        self.media: dict[str, Medium] = {}
        self.events: defaultdict[str, set[Key]] = defaultdict(set)
        self.settings["weights_version"] = self.weights
        manager = build(
            parse_stack(self.settings),
            Namespace.of(model="test"),
            CHUNK,
            events=True,
            clock=self.clock,
            wrap=self._wrap,
        )
        self.driver = Driver(manager, self.epoch)
        self.manager = manager

    def _wrap(self, name: str, tier: Tier) -> Tier:
        fault = FaultTier(tier, self.draw.randrange(100), self.draw.choice(RATES))
        slow = LatencyTier(
            fault, {"read": 0.002, "write": 0.002}, sleep=lambda seconds: self._sleep(name, seconds)
        )
        gate = GateTier(slow)
        self.media[name] = Medium(tier, fault, gate)
        self.media[name].heal()
        return gate

    def _sleep(self, name: str, seconds: float) -> None:
        if self.media[name].slow:
            time.sleep(seconds)

    @property
    def epoch(self) -> str:
        """What the bytes belong to: an unnamed reset has weights that nobody has had before."""
        return f"{self.resets} {self.weights}"

    # What happens

    def act(self) -> None:
        actions: list[tuple[float, Callable[[], None]]] = [
            (8, self.live),
            (4, self.step),
            (1, lambda: self.draw.choice(list(self.media.values())).trouble(self.draw)),
            (0.15, self.reset),
            (0.05, self.restart),
        ]
        (action,) = self.draw.choices([action for _, action in actions], [weight for weight, _ in actions])
        action()

    def step(self) -> None:
        self.manager.on_schedule_end()
        self.clock.jump(self.draw.choice([0.0, 0.0, 0.0, 0.1, 1.0]))
        self.check()

    def live(self) -> None:
        """Some request begins, or goes on."""
        if len(self.lives) < 4 and self.draw.random() < 0.4:
            self.begun += 1
            ctx = RequestContext(f"r{self.begun}")
            self.manager.on_new_request(ctx)
            self.lives.append(Life(ctx, self.draw.choice(self.prompts)))
        if self.lives:
            life = self.draw.choice(self.lives)
            if self.draw.random() < 0.05:
                self._end(life)
            else:
                self._go_on(life)

    def _go_on(self, life: Life) -> None:
        if life.load:
            self._loaded(life)
        elif life.offer:
            self._stored(life)
        elif life.found is None:
            self._look_up(life)
        elif life.computed < len(life.prompt):
            portion = life.prompt[life.computed : life.computed + self.draw.randint(1, 6)]
            life.offer = self.manager.prepare_store(portion, life.ctx)
            complete = life.offer is not None and not life.offer.refused
            life.computed += len(portion) if complete or self.draw.random() < 0.1 else 0
        else:
            self._end(life)

    def _look_up(self, life: Life) -> None:
        match = self.manager.match_prefix(life.prompt, life.ctx)
        if match.pending:
            return
        life.found = life.computed = match.hits
        found = life.prompt[: match.hits]
        self.manager.touch(found, life.ctx)
        if found:
            life.load = (found, self.manager.prepare_load(found, life.ctx), self.epoch)

    def _loaded(self, life: Life) -> None:
        assert life.load
        keys, slots, epoch = life.load
        for key, slot in zip(keys, slots, strict=True):
            assert holds(self.manager.pool.slot(slot), key, epoch), f"wrong bytes of {key.hex()}"
        self.manager.complete_load(keys, life.ctx, self.draw.random() < 0.95)
        life.load = None

    def _stored(self, life: Life) -> None:
        assert life.offer
        for key, slot in zip(life.offer.keys, life.offer.slots, strict=True):
            fill(self.manager.pool.slot(slot), key, self.epoch)
        self.manager.complete_store(life.offer.keys, life.ctx, self.draw.random() < 0.95)
        life.offer = None

    def _end(self, life: Life) -> None:
        """It is finished, or aborted; what is open of it ends before or after that."""
        finish_first = self.draw.random() < 0.5
        if finish_first:
            self.manager.on_request_finished(life.ctx)
        if life.load:
            self._loaded(life)
        if life.offer:
            self._stored(life)
        if not finish_first:
            self.manager.on_request_finished(life.ctx)
        self.lives.remove(life)

    def reset(self) -> None:
        if self.draw.random() < 0.3:
            self.manager.reset_cache("primary", timeout=0.05)
        else:
            self.weights = self.draw.choice(["", "v1", "v2"])
            self.resets += 1
            self.reset_unnamed = not self.weights
            self.manager.reset_cache("all", self.weights, timeout=0.05)
            self.driver.epoch = self.epoch
        for life in self.lives:
            life.found, life.computed = None, 0

    def restart(self) -> None:
        """A new process over what the media have kept. What it may find is of its own weights, if they have a name
        or there was no reset."""
        self.come_to_rest()
        self.manager.shutdown()
        if self.reset_unnamed:
            self.resets += 1
        self.start()

    # What must hold

    def check(self) -> None:
        stats = self.manager.get_stats()
        assert stats.free_slots + stats.tiers[0].chunks <= (stats.tiers[0].capacity or 0) // CHUNK
        for tier, medium in zip(stats.tiers[1:], self.media.values(), strict=True):
            assert tier.capacity is None or tier.bytes <= tier.capacity
            usage = medium.inner.usage()
            assert usage.capacity is None or usage.bytes <= usage.capacity
        shared = {level.name for level in self.manager._chain.levels if level.shared}
        for event in self.manager.take_events():
            if event.tier in shared:
                continue
            held = self.events[event.tier]
            assert held.isdisjoint(event.keys) is not event.removed or not event.keys, "told twice"
            held.symmetric_difference_update(event.keys)

    def come_to_rest(self) -> None:
        """All is well again, and what was begun ends."""
        for medium in self.media.values():
            medium.heal()
        while self.lives:
            self._end(self.lives[0])
        self.driver.until(self._is_up, "a tier does not come back")
        self.driver.check_at_rest()
        self.check()

    def _is_up(self) -> bool:
        stats = self.manager.get_stats()
        if all(tier.up for tier in stats.tiers):
            return not stats.pinned_slots and not self.manager.jobs_under_way
        self.clock.jump(0.01)
        return False

    def check_contents(self) -> None:
        """Events tell what is known, and what is known is there, with its bytes."""
        for level, medium in zip(self.manager._chain.levels, self.media.values(), strict=True):
            there = [entry.key for entry in medium.inner.entries()]
            for key in there:
                view = buffer(CHUNK)
                (outcome,) = medium.inner.read([key], [view])
                assert not outcome.ok or holds(view, key, self.epoch), f"{level.name} holds wrong bytes"
            if not level.shared:
                assert self.events[level.name] == set(level.residency._entries), level.name
                assert self.events[level.name] <= set(there), level.name

    def check_served(self) -> None:
        """Whatever has happened, a prompt that is stored now is found at once."""
        for number, prompt in enumerate(self.prompts):
            self._serve(f"first {number}", prompt)
            assert self._serve(f"again {number}", prompt) == len(prompt)

    def _serve(self, name: str, prompt: list[Key]) -> int:
        """A whole request. Returns how many chunks were found."""
        driver = self.driver
        ctx = driver.begin(name)
        hits = driver.match(ctx, prompt).hits
        driver.load(ctx, prompt[:hits])

        def stored() -> bool:
            offer = driver.offer(ctx, prompt[hits:])
            self.manager.complete_store(offer.keys if offer else [], ctx)
            return offer is not None and not offer.refused

        driver.until(stored, "the store stays refused")
        driver.finish(ctx)
        driver.step()
        driver.settle()
        return hits


@pytest.mark.parametrize("start", range(0, EXAMPLES, 10))
def test_every_byte_is_right_and_nothing_is_stuck_or_left(tmp_path: Path, start: int) -> None:
    for seed in range(start, min(start + 10, EXAMPLES)):
        world = World(tmp_path / str(seed), random.Random(seed))
        try:
            for _ in range(ACTIONS):
                world.act()
            world.come_to_rest()
            world.check_contents()
            world.check_served()
        except BaseException as error:
            error.add_note(f"seed {seed}: {world.settings}")
            raise
        finally:
            for medium in world.media.values():
                medium.heal()
            world.manager.shutdown()
