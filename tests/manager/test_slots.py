"""Slots and pins by themselves."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvcascade.manager.eviction import LruPolicy
from kvcascade.manager.slots import SlotState, SlotTable
from kvcascade.testing import key_for

KEYS = [key_for(number) for number in range(64)]


def _filled(slots: int) -> SlotTable:
    table = SlotTable(slots, LruPolicy(slots))
    for slot in table.allocate([key_for(number) for number in range(slots)], SlotState.STORING):
        table.publish(slot)
        table.unpin(slot)
    return table


def test_a_pin_is_released_once() -> None:
    """LMCache/LMCache#1034: a count never goes below zero."""
    table = SlotTable(4, LruPolicy(4))
    (slot,) = table.allocate(KEYS[:1], SlotState.STORING)
    table.publish(slot)
    table.unpin(slot)
    with pytest.raises(ValueError, match=f"slot {slot} has no pin to release"):
        table.unpin(slot)
    assert (table.pinned, table.pins(slot), table.free) == (0, 0, 3)


def test_a_slot_is_never_free_twice() -> None:
    """LMCache/LMCache#5005: two owners would write into one."""
    table = SlotTable(4, LruPolicy(4))
    (slot,) = table.allocate(KEYS[:1], SlotState.STORING)
    table.discard(slot)
    with pytest.raises((ValueError, KeyError)):
        table.unpin(slot)
    slots = table.allocate(KEYS[1:5], SlotState.STORING)
    assert sorted(slots) == [0, 1, 2, 3]


def test_room_is_found_by_work_that_grows_with_what_is_asked_for() -> None:
    """No stall however many chunks were passed over: hits of a step at the cold end, released at its end."""
    assert _lines(lambda: _pass_over(_filled(4000), 3000)) < 6 * _lines(lambda: _pass_over(_filled(1000), 750))


def _pass_over(table: SlotTable, hits: int) -> None:
    for start in range(0, hits, 50):  # prompts, head first: released in another order than they were stored in
        table.hit_prefix([key_for(number) for number in range(start, start + 50)])
    assert table.victims(8) is not None
    table.end_step()
    assert table.victims(8) is not None


def _lines(work: Callable[[], None]) -> int:
    """How many lines of code the work takes: its cost, whatever else the machine does."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
