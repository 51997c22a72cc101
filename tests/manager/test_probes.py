"""Tiers that others write to: they are asked, in batches, in the background."""

from collections.abc import Callable

from kvcascade.manager.probes import ProbeTable
from kvcascade.testing import buffer, bytes_for, key_for
from kvcascade.types import Changes, Entry, LookupResult, MissReason, Outcome, PrefixMatch

from .conftest import CHUNK, Stack

KEYS = [key_for(number) for number in range(64)]
Make = Callable[..., Stack]


def _write_elsewhere(s: Stack, keys: list[bytes]) -> None:
    """Another engine stores these chunks."""
    views = [buffer(CHUNK) for _ in keys]
    for key, view in zip(keys, views, strict=True):
        view[:] = bytes_for(key, CHUNK)
    assert s.faults[0].inner.write(keys, views) == [Outcome.OK] * len(keys)


def _probes(s: Stack) -> list[tuple[bytes, ...]]:
    return [call.keys for call in s.gates[0].calls if call.verb == "exists"]


def test_a_prompt_is_probed_in_one_batch_and_then_served(stack: Make) -> None:
    s = stack(slots=16, shared=[0])
    _write_elsewhere(s, KEYS[:4])
    ctx = s.begin("r")
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.RETRY
    assert s.manager.match_prefix(KEYS[:6], ctx) == PrefixMatch(0, pending=True)
    assert s.match(ctx, KEYS[:6]).hits == 4
    s.load(ctx, KEYS[:4])
    s.finish(ctx)
    assert _probes(s) == [tuple(KEYS[:6])]


def test_what_nobody_stored_is_a_miss_when_the_answer_is_there(stack: Make) -> None:
    s = stack(shared=[0])
    ctx = s.begin("r")
    assert s.match(ctx, KEYS[:4]).hits == 0
    assert s.manager.match_prefix(KEYS[:4], ctx) == PrefixMatch(0, pending=False)
    s.finish(ctx)


def test_an_answer_on_its_way_is_shared_and_asked_for_once(stack: Make) -> None:
    """The request that asked has ended; the next one gets the answer (vllm-project/vllm#54872, #55823)."""
    s = stack(shared=[0])
    _write_elsewhere(s, KEYS[:1])
    s.gates[0].shut()
    first = s.begin("r1")
    assert s.manager.lookup(KEYS[0], first) is LookupResult.RETRY
    s.step()
    probe = s.gates[0].wait_for("exists")
    s.finish(first)
    second = s.begin("r2")
    assert s.manager.lookup(KEYS[0], second) is LookupResult.RETRY
    s.step()
    probe.release()
    s.gates[0].open()
    assert s.lookup(second, KEYS[0]) is LookupResult.HIT
    s.load(second, KEYS[:1])
    s.finish(second)
    assert _probes(s) == [(KEYS[0],)]


def test_answers_expire(stack: Make) -> None:
    s = stack(slots=8, shared=[0])
    ctx = s.begin("r1")
    assert s.lookup(ctx, KEYS[0]) is LookupResult.MISS
    s.finish(ctx)
    _write_elsewhere(s, KEYS[:1])
    assert s.serve("still believed", KEYS[:0]) == 0
    ctx = s.begin("r2")
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.MISS
    s.finish(ctx)
    s.clock.advance(10.1)
    s.step()
    ctx = s.begin("r3")
    assert s.lookup(ctx, KEYS[0]) is LookupResult.HIT
    s.finish(ctx)
    assert len(_probes(s)) == 2


def test_a_found_chunk_that_is_gone_at_the_read_is_a_miss_and_known_to_be_gone(stack: Make) -> None:
    """No phantom hits (LMCache/LMCache#4745)."""
    s = stack(slots=8, shared=[0])
    _write_elsewhere(s, KEYS[:2])
    ctx = s.begin("r1")
    s.manager.match_prefix(KEYS[:2], ctx)
    s.gates[0].shut()
    s.step()
    s.gates[0].wait_for("exists").release()
    s.until(lambda: s.manager.lookup(KEYS[0], ctx) is LookupResult.HIT_PENDING, "the probe does not end")
    s.manager.lookup(KEYS[1], ctx)
    s.step()
    read = s.gates[0].wait_for("read")
    s.faults[0].inner.delete(KEYS[:1])
    read.release()
    s.gates[0].open()
    assert s.match(ctx, KEYS[:2]).hits == 0
    s.finish(ctx)
    ctx = s.begin("r2")
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.MISS, "known, without another probe"
    s.store(ctx, KEYS[:1])
    s.finish(ctx)
    s.settle()
    s.manager.reset_cache("primary")
    ctx = s.begin("r3: a store makes it known at once")
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.HIT_PENDING
    assert s.lookup(ctx, KEYS[0]) is LookupResult.HIT
    s.finish(ctx)


def test_a_store_is_newer_than_a_probe_on_its_way(stack: Make) -> None:
    s = stack(slots=8, shared=[0], concurrency=2)
    s.gates[0].shut()
    asking = s.begin("asks")
    s.manager.lookup(KEYS[0], asking)
    s.step()
    probe = s.gates[0].wait_for("exists")
    s.store(asking, KEYS[:1])
    s.gates[0].wait_for("write").release()
    s.until(lambda: s.manager.get_stats().tiers[1].written == 1, "the write does not end")
    probe.release([False])
    s.gates[0].open()
    s.finish(asking)
    s.settle()
    s.manager.reset_cache("primary")
    ctx = s.begin("r")
    assert s.manager.lookup(KEYS[0], ctx) is LookupResult.HIT_PENDING
    s.finish(ctx)


def test_a_probe_that_never_ends_costs_no_more_than_the_deadline(stack: Make) -> None:
    s = stack(shared=[0], deadline="200ms")
    s.gates[0].shut()
    ctx = s.begin("r")
    s.manager.match_prefix(KEYS[:4], ctx)
    s.step()
    s.gates[0].wait_for("exists")
    s.clock.advance(0.25)
    s.step()
    assert s.manager.match_prefix(KEYS[:4], ctx) == PrefixMatch(0, pending=False)
    s.finish(ctx)
    s.gates[0].open()


def test_a_probe_that_fails_is_a_miss_that_names_the_tier_and_is_asked_again_soon(stack: Make) -> None:
    s = stack(shared=[0], tiers=1)
    _write_elsewhere(s, KEYS[:1])
    s.faults[0].down = True
    ctx = s.begin("r1")
    assert s.lookup(ctx, KEYS[0]) is LookupResult.MISS
    s.finish(ctx)
    assert s.manager.get_stats().misses == {MissReason.TIER_DOWN: 1}
    s.faults[0].down = False
    s.clock.advance(1.1)
    s.step()
    ctx = s.begin("r2")
    assert s.lookup(ctx, KEYS[0]) is LookupResult.HIT
    s.finish(ctx)


def test_a_private_tier_that_has_it_is_not_kept_waiting_for_a_shared_one(stack: Make) -> None:
    s = stack(slots=8, tiers=2, shared=[1])
    s.serve("store", KEYS[:4])
    s.serve("push out", KEYS[10:14])
    s.serve("push out more", KEYS[14:18])
    s.gates[1].shut()
    assert s.serve("served by the private one", KEYS[:4]) == 4
    s.gates[1].open()


def test_two_engines_on_one_shared_tier_find_each_others_chunks(stack: Make) -> None:
    s, t = stack(shared=[0]), stack(shared=[0])
    t.faults[0].inner = s.faults[0].inner
    s.serve("store", KEYS[:4])
    assert t.serve("load", KEYS[:4]) == 4


def test_of_a_shared_tier_only_what_was_told_as_stored_is_told_as_removed(stack: Make) -> None:
    """By whoever it was stored: a probe that finds a chunk tells of it, too."""
    s = stack(slots=16, shared=[0])
    told: dict[bytes, list[bool]] = {}

    def listen() -> None:
        for event in s.manager.take_events():
            for key in event.keys if event.tier == "t0" else ():
                told.setdefault(key, []).append(event.removed)

    _write_elsewhere(s, KEYS[:2])
    ctx = s.begin("own")
    assert s.match(ctx, KEYS[:3]).hits == 2
    s.store(ctx, KEYS[2:4])
    s.finish(ctx)
    s.settle()
    listen()
    assert told == {key: [False] for key in KEYS[:4]}
    s.manager.reset_cache("primary")
    s.faults[0].inner.delete([KEYS[0], KEYS[2]])
    s.serve("finds the first one gone", KEYS[:1])
    s.later(11.0)
    _write_elsewhere(s, KEYS[4:5])
    ctx = s.begin("asks anew")
    for key in (KEYS[1], KEYS[2], KEYS[4], KEYS[5]):
        s.lookup(ctx, key)
    s.finish(ctx)
    listen()
    kept, gone, back = [False], [False, True], [False, True, False]
    assert told == dict(zip(KEYS[:5], [back, kept, gone, kept, kept], strict=True))
    assert s.manager.get_stats().tiers[1].chunks == 4
    s.manager.reset_cache("all")
    listen()
    assert told == dict(zip(KEYS[:5], [[*back, True], gone, gone, gone, gone], strict=True))


def test_a_use_is_told_however_long_ago_the_chunk_was_found() -> None:
    """A chunk that is always found further up would otherwise be the first that the shared tier evicts."""
    table = ProbeTable(ttl=10.0)
    table.load([Entry(key, CHUNK, 0.0, 0.0) for key in KEYS[:3]])
    table.lost(KEYS[1], MissReason.EVICTED)
    table.now = 100.0
    assert KEYS[0] not in table
    assert table.touch(KEYS[:4]).here == [KEYS[2], KEYS[0]]


def test_what_a_shared_tier_has_evicted_is_known_to_be_gone(stack: Make) -> None:
    s = stack(slots=16, shared=[0])
    s.serve("store", KEYS[:4])
    level = s.manager._chain.levels[0]
    s.faults[0].inner.delete(KEYS[:3])
    vars(level.lane)["_changes"].append(Changes(evicted=tuple(KEYS[:3])))
    s.manager.reset_cache("primary")
    s.step()
    assert [level.holds(key) for key in KEYS[:4]] == [False] * 3 + [True]
    assert level.why(KEYS[0]) is MissReason.EVICTED
