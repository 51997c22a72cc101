"""Stacks for the manager's tests: small pools, tiers that can be gated and made to fail, a clock of their own."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import pytest

from kvcascade.configs import parse_stack
from kvcascade.manager import SecondaryTierManager
from kvcascade.stack import build
from kvcascade.testing import Driver, FaultTier, GateTier, ManualClock, forbid_io
from kvcascade.tiers import Tier
from kvcascade.types import Capabilities, Key, Namespace, RequestContext

CHUNK = 512
STRIDE = 4096


class Stack(Driver):
    """A manager over a pool of `slots` and gated, faulty memory tiers.

    `options` are settings of all of them; `each` adds some for each one; `shared` names the places of those that
    others write to as well."""

    def __init__(
        self,
        slots: int,
        tiers: int,
        each: Sequence[Mapping[str, Any]] = (),
        shared: Container[int] = (),
        host: Mapping[str, Any] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self._shared = shared
        self.clock = ManualClock()
        self.gates: list[GateTier] = []
        self.faults: list[FaultTier] = []
        settings = parse_stack(
            {
                "version": 1,
                "log_every": "0s",
                "tiers": [
                    {"type": "host", "capacity": (slots + 1) * STRIDE, "eviction": "lru", **host},
                    *(
                        {
                            "type": "memory",
                            "name": f"t{place}",
                            "capacity": 1 << 20,
                            "queue": 1.0,
                            **options,
                            **more,
                        }
                        for place, more in zip_longest(range(tiers), each, fillvalue={})
                    ),
                ],
            }
        )
        namespace = Namespace.of(model="test")
        super().__init__(build(settings, namespace, CHUNK, events=True, clock=self.clock, wrap=self._wrap))
        for slot in range(slots):
            self.manager.pool.slot(slot)[:] = b"\xaa" * CHUNK

    def insist(self, req_id: str, keys: Sequence[Key]) -> None:
        """A request whose store is offered until it is granted."""
        ctx = self.begin(req_id)
        self.until(lambda: self.stored(ctx, keys), "the store stays refused")
        self.finish(ctx)
        self.settle()

    def stored(self, ctx: RequestContext, keys: Sequence[Key]) -> bool:
        """Offers these chunks once; whether all were granted, and are stored now."""
        offer = self.offer(ctx, keys)
        if offer is not None:
            self.manager.complete_store(offer.keys, ctx)
        return offer is not None and not offer.refused

    def later(self, seconds: float) -> None:
        """The step ends, and the next one begins so much later."""
        self.step()
        self.clock.advance(seconds)
        self.step()

    def _wrap(self, name: str, tier: Tier) -> Tier:
        fault = FaultTier(tier, seed=0, rates={})
        gate = GateTier(fault)
        if len(self.gates) in self._shared:
            gate.capabilities = Capabilities(shared=True)
        gate.open()
        self.faults.append(fault)
        self.gates.append(gate)
        return gate


@pytest.fixture
def stack() -> Iterator[Callable[..., Stack]]:
    """Makes a stack. Its verbs run under the guard against I/O; at the end nothing may be left over."""
    made: list[Stack] = []

    def make(slots: int = 8, tiers: int = 1, **options: Any) -> Stack:
        made.append(Stack(slots, tiers, **options))
        return made[-1]

    yield make
    for one in made:
        for gate in one.gates:
            gate.open()
        one.check_at_rest()
        one.manager.shutdown()


@pytest.fixture(autouse=True)
def _scheduler_does_no_io(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every verb that may not wait runs under `forbid_io`."""
    waits = {"reset_cache", "shutdown", "get_stats"}
    for name, verb in list(vars(SecondaryTierManager).items()):
        if not name.startswith("_") and name not in waits and callable(verb):
            monkeypatch.setattr(SecondaryTierManager, name, _guarded(verb))
    with forbid_io(thread=0):  # patches once for the whole test; no thread has this ident
        yield


def _guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        with forbid_io():
            return verb(*arguments, **named)

    return call
