"""The tiers that wait, fail or are slow: as the test says, and otherwise as the tier that they wrap."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcascade.errors import TierUnavailable
from kvcascade.testing import (
    FaultTier,
    GateTier,
    LatencyTier,
    TierConformance,
    TierWrapper,
    buffer,
    bytes_for,
    holds,
    key_for,
)
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.memory import MemoryTier
from kvcascade.types import Key, Outcome, OutcomeKind

KEYS = [key_for(number) for number in range(8)]


class TestWrapper(TierConformance):
    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        return TierWrapper(MemoryTier(capacity))


class TestFaultTierWithoutFaults(TierConformance):
    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        return FaultTier(MemoryTier(capacity), 1, {})


class TestOpenGate(TierConformance):
    def open(self, path: Path, context: OpenContext, capacity: int | None) -> Tier:
        gate = GateTier(MemoryTier(capacity))
        gate.open()
        return gate


def sources(keys: list[Key]) -> list[memoryview]:
    return [memoryview(bytes_for(key, 512)) for key in keys]


@pytest.fixture
def gate() -> Iterator[GateTier]:
    with GateTier(MemoryTier()) as gate:
        yield gate


def test_a_gate_holds_calls_and_records_their_order(gate: GateTier) -> None:
    inner = gate.inner
    writer = threading.Thread(target=gate.write, args=(KEYS[:2], sources(KEYS[:2])))
    writer.start()
    call = gate.wait_for("write")
    assert call.keys == tuple(KEYS[:2])
    assert inner.exists(KEYS[:2]) == [False, False]
    asker = threading.Thread(target=gate.exists, args=(KEYS[:1],))
    asker.start()
    gate.wait_for("exists")
    assert [one.verb for one in gate.waiting] == ["write", "exists"]
    assert call.held
    assert not call.done
    call.release()
    call.wait_done()
    assert inner.exists(KEYS[:2]) == [True, True]
    assert [one.verb for one in gate.release()] == ["exists"]
    writer.join()
    asker.join()
    assert [one.verb for one in gate.calls] == ["write", "exists"]


def test_a_held_call_can_be_answered_instead(gate: GateTier) -> None:
    answers: list[Outcome] = []
    writer = threading.Thread(target=lambda: answers.extend(gate.write(KEYS[:2], sources(KEYS[:2]))))
    writer.start()
    gate.wait_for("write").release([Outcome.OK, Outcome.REFUSED])
    writer.join()
    assert answers == [Outcome.OK, Outcome.REFUSED]
    assert gate.inner.usage().chunks == 0


def test_an_opened_gate_lets_all_through_until_it_is_shut(gate: GateTier) -> None:
    gate.open()
    assert gate.write(KEYS[:1], sources(KEYS[:1])) == [Outcome.OK]
    gate.shut()
    reader = threading.Thread(target=gate.read, args=(KEYS[:1], [buffer(512)]))
    reader.start()
    gate.wait_for("read")
    gate.open()
    reader.join()


def test_closing_a_gate_lets_go_what_it_holds(gate: GateTier) -> None:
    answers: list[Outcome] = []
    deleter = threading.Thread(target=lambda: answers.extend(gate.delete(KEYS[:1])))
    deleter.start()
    gate.wait_for("delete")
    gate.close()
    deleter.join()
    assert answers == [Outcome.MISSING]


def test_waiting_for_a_call_that_never_comes_says_what_came(gate: GateTier) -> None:
    list(gate.entries())
    with pytest.raises(TimeoutError, match=r"no read is held .* \[entries\(\)\]"):
        gate.wait_for("read", timeout=0.01)


def test_faults_follow_from_the_seed() -> None:
    def history(seed: int, order: list[Key]) -> dict[Key, list[OutcomeKind]]:
        tier = FaultTier(MemoryTier(), seed, {"failed": 0.2, "refused": 0.2})
        seen: dict[Key, list[OutcomeKind]] = {key: [] for key in order}
        for _ in range(20):
            for key in order:
                seen[key] += [outcome.kind for outcome in tier.write([key], sources([key]))]
        return seen

    assert history(1, KEYS) == history(1, KEYS[::-1])
    assert history(1, KEYS) != history(2, KEYS)


def test_a_failed_read_spoils_the_buffer_and_no_neighbour() -> None:
    tier = FaultTier(MemoryTier(), 3, {"failed": 0.2, "missing": 0.1, "corrupt": 0.1})
    seen: set[OutcomeKind] = set()
    for _ in range(50):
        tier.inner.write(KEYS, sources(KEYS))
        targets = [buffer(512) for _ in KEYS]
        outcomes = tier.read(KEYS, targets)
        for key, outcome, target in zip(KEYS, outcomes, targets, strict=True):
            assert outcome.ok == holds(target, key)
        kept = tier.inner.exists(KEYS)
        assert kept == [outcome.kind is not OutcomeKind.CORRUPT for outcome in outcomes]
        seen |= {outcome.kind for outcome in outcomes}
    assert seen == {OutcomeKind.OK, OutcomeKind.FAILED, OutcomeKind.MISSING, OutcomeKind.CORRUPT}
    assert tier.injected["failed"] > 0


def test_a_failed_write_may_have_been_stored_or_not() -> None:
    tier = FaultTier(MemoryTier(), 4, {"failed": 1.0})
    keys = [key_for(number) for number in range(50)]
    outcomes = tier.write(keys, sources(keys), victims=KEYS)
    assert {outcome.kind for outcome in outcomes} == {OutcomeKind.FAILED}
    assert isinstance(outcomes[0].cause, TierUnavailable)
    assert 10 < sum(tier.inner.exists(keys)) < 40
    tier.active = False
    assert tier.write(keys, sources(keys)) == [Outcome.OK] * 50


def test_what_has_no_room_for_a_failure_raises() -> None:
    tier = FaultTier(MemoryTier(), 5, {})
    tier.down = True
    for call in (lambda: tier.exists(KEYS), tier.entries, lambda: tier.move_to(""), lambda: tier.maintain(1.0)):
        with pytest.raises(TierUnavailable):
            call()
    assert {outcome.kind for outcome in tier.delete(KEYS)} == {OutcomeKind.FAILED}
    tier.close()
    buggy = FaultTier(MemoryTier(), 5, {"raises": 1.0})
    with pytest.raises(RuntimeError, match="injected fault in read"):
        buggy.read(KEYS[:1], [buffer(512)])


def test_an_unknown_kind_of_fault_is_named() -> None:
    with pytest.raises(ValueError, match="unknown kind of fault: fialed"):
        FaultTier(MemoryTier(), 1, {"fialed": 0.5})


def test_latency_is_per_verb_and_byte() -> None:
    slept: list[float] = []
    tier = LatencyTier(MemoryTier(), {"write": 0.5, "exists": 0.1}, bytes_per_second=1024, sleep=slept.append)
    tier.write(KEYS[:2], sources(KEYS[:2]))
    tier.exists(KEYS)
    tier.read(KEYS[:1], [buffer(512)])
    tier.delete(KEYS)
    assert slept == [1.5, 0.1, 0.5]
