"""A tier that fails is tried again within bounds, is left alone when it is down, and comes back by itself."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvcascade.configs import parse_stack
from kvcascade.errors import TierUnavailable
from kvcascade.stack import build
from kvcascade.testing import Driver, ManualClock, buffer, fill, key_for
from kvcascade.testing.wrappers import TierWrapper
from kvcascade.tiers import OpenContext
from kvcascade.tiers.memory import MemorySettings, MemoryTier
from kvcascade.types import Buffer, Key, MissReason, Namespace, Outcome

from .conftest import Stack

KEYS = [key_for(number) for number in range(400)]
Make = Callable[..., Stack]


def _calls(s: Stack, verb: str) -> int:
    return sum(call.verb == verb for call in s.gates[0].calls)


def test_a_tier_that_fails_again_and_again_is_left_alone_and_comes_back(
    stack: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """vllm-project/vllm#56828: lookups of a tier that is down are misses at once; one line a change in the log."""
    s = stack(slots=8, breaker={"failures": 3, "probe_every": "5s"})
    s.serve("a", KEYS[:4])
    s.serve("b", KEYS[4:8])
    s.serve("c", KEYS[8:12])
    s.faults[0].down = True
    with caplog.at_level(logging.WARNING, "kvcascade"):
        for number in range(10):
            assert s.serve(f"down {number}", KEYS[20 + number : 21 + number]) == 0
        s.step()
        assert not s.manager.get_stats().tiers[1].up
        writes, reads = _calls(s, "write"), _calls(s, "read")
        for number in range(100):
            ctx = s.begin(f"miss {number}")
            assert not s.manager.match_prefix(KEYS[:4], ctx).pending
            s.finish(ctx)
            s.step()
        assert (_calls(s, "write"), _calls(s, "read"), _calls(s, "exists")) == (writes, reads, 0)
        assert s.manager.get_stats().misses[MissReason.TIER_DOWN] >= 100
        s.clock.advance(5.1)
        s.until(lambda: _calls(s, "exists") == 1, "no probe is let through")
        assert not s.manager.get_stats().tiers[1].up
        s.faults[0].down = False
        s.settle()
        s.step()
        s.clock.advance(5.1)
        s.until(lambda: s.manager.get_stats().tiers[1].up, "the tier does not come back")
        s.step()
    assert [record.getMessage() for record in caplog.records] == [
        "tier 't0' is down: its lookups are misses",
        "tier 't0' is up again",
    ]
    assert s.serve("and serves", KEYS[:4]) == 4


def test_jobs_that_wait_for_a_tier_that_goes_down_fail_at_once(stack: Make) -> None:
    s = stack(slots=16, concurrency=1, breaker={"failures": 1})
    s.gates[0].shut()
    ctx = s.begin("r")
    for key in KEYS[:6]:
        s.store(ctx, [key])
    write = s.gates[0].wait_for("write")
    assert s.manager.get_stats().tiers[1].queue == 6
    s.faults[0].down = True
    write.release()
    s.until(lambda: not s.manager.get_stats().tiers[1].up, "the tier does not go down")
    s.gates[0].open()
    s.settle()
    assert _calls(s, "write") <= 2, "the one that failed, and at most one that had begun"
    s.faults[0].down = False
    s.finish(ctx)


def test_a_failed_operation_is_tried_again_within_its_deadline(stack: Make) -> None:
    s = stack(slots=8, retries=2, deadline="30s")
    s.faults[0]._rates = {"failed": 0.4}
    for number in range(4):
        s.serve(f"r{number}", KEYS[4 * number : 4 * number + 4])
    assert s.manager.get_stats().tiers[1].written >= 14
    s.faults[0]._rates = {}


def test_retries_stay_within_their_budget(stack: Make) -> None:
    s = stack(slots=8, retries=10, deadline="30s", breaker={"failures": 1000})
    s.faults[0].down = True
    for number in range(40):
        s.serve(f"r{number}", KEYS[number : number + 1])
    assert _calls(s, "write") <= 40 + 8 + 40 * 0.2 + 1
    s.faults[0].down = False


def test_what_a_failed_write_left_behind_does_not_fill_the_tier(stack: Make) -> None:
    """A write that failed may have been stored; unknown chunks must not take room for good."""
    s = stack(slots=16, capacity=12 * 512, breaker={"failures": 1000})
    s.faults[0]._rates = {"failed": 0.5}
    for number in range(60):
        s.serve(f"r{number}", KEYS[2 * number : 2 * number + 2])
    s.faults[0]._rates = {}
    for number in range(60, 90):
        s.serve(f"r{number}", KEYS[2 * number : 2 * number + 2])
    tier = s.manager.get_stats().tiers[1]
    held = {entry.key for entry in s.faults[0].inner.entries()}
    assert tier.chunks == len(held) == 12


def test_a_tier_with_less_room_than_it_said_evicts_what_it_must(stack: Make) -> None:
    s = stack(slots=16, capacity=12 * 512)
    s.faults[0].inner._capacity = 6 * 512  # type: ignore[attr-defined]
    for number in range(20):
        s.serve(f"r{number}", KEYS[2 * number : 2 * number + 2])
    s.manager.reset_cache("primary")
    assert s.serve("the last one", KEYS[38:40]) == 2


class _Lateness:
    """A medium that is not there at first."""

    def __init__(self, tier: MemoryTier) -> None:
        self.tier = tier
        self.there = False
        self.tries = 0

    def open(self, context: OpenContext) -> MemoryTier:
        self.tries += 1
        if not self.there:
            raise TierUnavailable("the medium is not there")
        return self.tier


def test_a_tier_that_is_not_there_at_the_start_comes_later_with_what_it_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache/LMCache#1913: the stack starts without it, and serves its chunks when it is there."""
    late = _Lateness(MemoryTier(1 << 20))
    views = [buffer(512) for _ in range(4)]
    for key, view in zip(KEYS, views, strict=False):
        fill(view, key)
    late.tier.write(KEYS[:4], views)
    monkeypatch.setattr(MemorySettings, "open", lambda settings, context: late.open(context))
    settings = parse_stack(
        {
            "version": 1,
            "log_every": "0s",
            "tiers": [{"type": "host", "capacity": "64KiB"}, {"type": "memory", "capacity": "1MiB"}],
        }
    )
    clock = ManualClock()
    s = Driver(build(settings, Namespace.of(model="test"), 512, clock=clock))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert s.serve("without it", KEYS[:2]) == 0
    assert not s.manager.get_stats().tiers[1].up
    late.there = True
    clock.advance(5.1)
    s.step()
    s.until(lambda: s.manager.get_stats().tiers[1].chunks == 4, "what it holds does not come")
    s.manager.reset_cache("primary")
    assert s.serve("with it", KEYS[:4]) == 4
    assert late.tries == 2
    s.check_at_rest()
    s.manager.shutdown()


def test_a_probe_that_is_taken_back_leaves_the_way_open_for_the_next(stack: Make) -> None:
    """A reset withdrew the one probe that could have told that the tier is back; it stayed down for good."""
    s = stack(slots=8, concurrency=1, breaker={"failures": 1, "probe_every": "5s"}, deadline="1s")
    s.gates[0].shut()
    ctx = s.begin("r")
    s.store(ctx, KEYS[:1])
    s.finish(ctx)
    s.step()
    s.gates[0].wait_for("write")
    s.clock.advance(1.1)
    s.step()
    assert not s.manager.get_stats().tiers[1].up
    s.clock.advance(5.1)
    s.step()
    assert s.manager.get_stats().tiers[1].queue == 1, "the probe waits for the only thread"
    s.manager.reset_cache("primary", timeout=0.0)
    s.step()
    s.gates[0].open()

    def up() -> bool:
        s.clock.advance(0.01)
        return s.manager.get_stats().tiers[1].up

    s.until(up, "the tier does not come back")


def test_what_is_being_deleted_just_in_case_is_not_written_meanwhile(stack: Make) -> None:
    """The chunk was written, and deleted by a job from before: known to be there, and gone."""
    s = stack(slots=16, concurrency=2, breaker={"failures": 100}, deadline="1h")
    s.faults[0].down = True
    s.serve("fails, and may have been stored", KEYS[:1])
    s.faults[0].down = False
    s.manager.reset_cache("primary")
    s.gates[0].shut()
    ctx = s.begin("r")
    s.store(ctx, KEYS[1:2])
    deletes = s.gates[0].wait_for("write")
    s.store(ctx, KEYS[:1])
    s.step()
    assert s.gates[0].waiting == [deletes]
    s.gates[0].open()
    s.settle()
    s.manager.touch(KEYS[:1], ctx)
    s.finish(ctx)
    s.settle()
    assert [s.faults[0].inner.exists([key]) for key in KEYS[:2]] == [[True], [True]]


def test_a_transfer_whose_cleanup_fails_is_reported_once_when_it_has_succeeded(stack: Make) -> None:
    """The bytes were there, releasing the handle raised, the result was lost and the block pinned for ever
    (vllm-project/vllm#49947)."""
    s = stack(slots=8, retries=2, deadline="30s")
    moved: list[list[Outcome]] = []

    class RaisesAfterwards(TierWrapper):
        def around(self, verb: str, keys: Sequence[Key], buffers: Sequence[Buffer], call: Any) -> Any:
            outcomes = call()
            if verb == "write":
                moved.append(outcomes)
                if len(moved) < 3:
                    raise OSError("the handle can't be released")
            return outcomes

    s.faults[0].inner = RaisesAfterwards(s.faults[0].inner)
    ctx = s.begin("r")
    s.store(ctx, KEYS[:2])
    s.finish(ctx)
    s.settle()
    tier, stats = s.manager.get_stats().tiers[1], s.manager.get_stats()
    assert moved == [[Outcome.OK] * 2] * 3
    assert (tier.written, tier.failed_writes, stats.pinned_slots) == (2, 0, 0)
    assert not s.manager.has_pending_work()
    s.manager.reset_cache("primary")
    assert s.serve("again", KEYS[:2]) == 2
