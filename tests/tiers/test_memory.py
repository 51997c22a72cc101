"""The memory tier: the contract of every tier, and what its settings say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvcascade.configs.registry import TIERS, resolve
from kvcascade.errors import ConfigError
from kvcascade.testing import NAMESPACE, TierConformance, TierStateMachine, buffer, key_for
from kvcascade.tiers import OpenContext, Tier
from kvcascade.tiers.memory import MemorySettings, MemoryTier
from kvcascade.types import Key, Outcome

CONTEXT = OpenContext(NAMESPACE, 4096)


class TestMemory(TierConformance):
    def open(self, path: Path, context: OpenContext, capacity: int | None) -> MemoryTier:
        return MemorySettings(capacity=capacity).open(context)

    def raw_corrupt(self, tier: Tier, key: Key) -> None:
        chunk = _chunks(tier)[key]
        middle = len(chunk.payload) // 2
        flipped = bytes([chunk.payload[middle] ^ 1])
        chunk.payload = chunk.payload[:middle] + flipped + chunk.payload[middle + 1 :]

    def raw_truncate(self, tier: Tier, key: Key) -> None:
        chunk = _chunks(tier)[key]
        chunk.payload = chunk.payload[:-1]
        vars(tier)["_bytes"] -= 1

    def raw_remove(self, tier: Tier, key: Key) -> None:
        vars(tier)["_bytes"] -= len(_chunks(tier).pop(key).payload)


class MemoryMachine(TierStateMachine):
    def open(self, path: Path, context: OpenContext) -> MemoryTier:
        return MemorySettings(capacity=64 << 10).open(context)


TestMemoryMachine = MemoryMachine.TestCase


def test_it_is_found_by_its_name() -> None:
    assert resolve(TIERS, "memory") is MemorySettings


def test_it_is_bounded_only_with_a_capacity() -> None:
    bounded = MemorySettings(capacity="1MiB").open(CONTEXT)
    assert bounded.capabilities.bounded
    assert bounded.usage().capacity == 1 << 20
    free = MemorySettings().open(CONTEXT)
    assert not free.capabilities.bounded
    assert free.usage().capacity is None


def test_the_name_defaults_to_the_type() -> None:
    assert MemorySettings().name == "memory"
    assert MemorySettings(capacity="1MiB").eviction == "lru"


def test_an_eviction_policy_without_a_capacity_is_a_contradiction() -> None:
    """A policy that has nothing to evict was taken without a word (LMCache/LMCache#4725)."""
    with pytest.raises(ValidationError, match="eviction 'lru' has no effect without a capacity"):
        MemorySettings(eviction="lru")


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValidationError, match=r"'lrv' \(did you mean 'lru'"):
        MemorySettings(capacity="1MiB", eviction="lrv")


def test_a_capacity_below_one_chunk_is_refused_with_both_numbers() -> None:
    settings = MemorySettings(capacity="1KiB")
    assert settings.probe(4096).problems == ["capacity 1 KiB is below one chunk of 4 KiB"]
    with pytest.raises(ConfigError, match="capacity 1 KiB is below one chunk of 4 KiB"):
        settings.open(CONTEXT)


def test_a_probe_says_how_many_chunks_it_holds() -> None:
    assert MemorySettings(capacity="1MiB").probe(4096).chunks == 256
    assert MemorySettings(capacity="1MiB").probe().chunks is None
    assert MemorySettings().probe(4096).chunks is None


def test_uses_order_the_entries() -> None:
    tier = MemorySettings().open(CONTEXT)
    keys = [key_for(number) for number in range(4)]
    tier.write(keys, [buffer(512) for _ in keys])
    tier.touch([keys[2], keys[0]])
    by_use = [entry.key for entry in sorted(tier.entries(), key=lambda entry: entry.used)]
    assert by_use == [keys[1], keys[3], keys[2], keys[0]]


def test_uses_are_listed() -> None:
    tier = MemorySettings().open(CONTEXT)
    tier.write([key_for(1), key_for(2)], [buffer(512), buffer(512)])
    tier.note_uses({key_for(2): 3, key_for(9): 4})
    assert {entry.key: entry.uses for entry in tier.entries()} == {key_for(1): 1, key_for(2): 3}


def test_a_slot_may_be_used_again_once_its_write_is_answered() -> None:
    tier = MemorySettings().open(replace(CONTEXT, chunk_bytes=512))
    slot, target = buffer(512, filler=1), buffer(512)
    assert tier.write([key_for(1)], [slot]) == [Outcome.OK]
    slot[:] = bytes(512)
    assert tier.read([key_for(1)], [target]) == [Outcome.OK]
    assert set(target) == {1}


def _chunks(tier: Tier) -> dict[Key, Any]:
    assert isinstance(tier, MemoryTier)
    return tier._chunks
