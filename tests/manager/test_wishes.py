"""A request may say how long its chunks are worth keeping, and is ignored where it asks nonsense."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from kvcascade.testing import key_for
from kvcascade.types import RequestContext

from .conftest import Stack

KEYS = [key_for(number) for number in range(64)]
Make = Callable[..., Stack]


def _serve(s: Stack, req_id: str, keys: list[bytes], wishes: Any) -> None:
    ctx = s.running[req_id] = RequestContext(req_id, {"kvcascade": wishes, "of others": 1})
    s.manager.on_new_request(ctx)
    s.store(ctx, keys)
    s.finish(ctx)
    s.settle()


def test_low_is_not_worth_a_write_and_high_is_worth_it_at_once(stack: Make) -> None:
    s = stack(slots=16, admit_after=2)
    _serve(s, "low", KEYS[:2], {"priority": "low"})
    _serve(s, "normal", KEYS[2:4], {})
    _serve(s, "high", KEYS[4:6], {"priority": "high"})
    assert s.faults[0].inner.exists(KEYS[:6]) == [False] * 4 + [True] * 2


def test_pinned_chunks_stay_for_their_time_and_no_longer(stack: Make) -> None:
    s = stack(slots=20, tiers=0)
    _serve(s, "pinned", KEYS[:2], {"pin_for": "1m"})
    for number in range(4):
        s.serve(f"r{number}", KEYS[10 + 10 * number : 20 + 10 * number])
    assert s.serve("still there", KEYS[:2]) == 2
    s.later(61)
    for number in range(4):
        s.serve(f"s{number}", KEYS[10 + 10 * number : 20 + 10 * number])
    assert s.serve("gone", KEYS[:2]) == 0


def test_wishes_are_bounded_by_the_stack(stack: Make) -> None:
    s = stack(slots=20, tiers=0)
    _serve(s, "greedy", KEYS[:10], {"pin_for": "365d"})
    assert s.manager.get_stats().pinned_slots == 2, "a tenth of primary: the head of the prompt"
    s.later(601)
    assert s.manager.get_stats().pinned_slots == 0, "ten minutes at most"


def test_a_reset_ends_them(stack: Make) -> None:
    s = stack(slots=20, tiers=0)
    _serve(s, "r", KEYS[:2], {"pin_for": "1m"})
    assert s.manager.reset_cache().quarantined == 0
    assert s.manager.get_stats().free_slots == 20


@pytest.mark.parametrize(
    "nonsense",
    [
        7,
        "high",
        [],
        {"priority": "urgent"},
        {"pin_for": -1},
        {"pin_for": "soon"},
        {"pin_for": 10},
        {"colour": "red"},
    ],
)
def test_nonsense_is_ignored_with_one_line(stack: Make, nonsense: Any, caplog: pytest.LogCaptureFixture) -> None:
    s = stack(slots=20, tiers=1)
    with caplog.at_level(logging.WARNING, "kvcascade"):
        _serve(s, "r", KEYS[:2], nonsense)
    assert len(caplog.records) == 1 and "kv_transfer_params.kvcascade is ignored" in caplog.text
    assert s.manager.get_stats().pinned_slots == 0
    assert s.serve("served as ever", KEYS[:2]) == 2
