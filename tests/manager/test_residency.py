"""What a private tier holds, as far as a stack of whole chunks does not show it."""

from kvcascade.manager.eviction.lru import LruPolicy
from kvcascade.manager.residency import Residency
from kvcascade.testing import key_for
from kvcascade.types import Entry

KEYS = [key_for(number) for number in range(8)]


def holding(chunks: int, capacity: int) -> Residency:
    """A tier of chunks of one byte."""
    residency = Residency(lambda nbytes: nbytes, chunks, LruPolicy(chunks))
    residency.load([Entry(key, 1, 0.0, float(number)) for number, key in enumerate(KEYS[:chunks])])
    residency.capacity = capacity
    return residency


def test_a_tier_over_its_capacity_evicts_nothing_for_what_it_can_not_take() -> None:
    """The victims of a write that never was were neither there nor gone, for ever."""
    residency = holding(4, capacity=3)
    residency.begin_read(KEYS[1])
    residency.begin_read(KEYS[2])
    residency.begin_read(KEYS[3])
    assert residency.admit([KEYS[5]], 1) == (0, [])
    assert KEYS[0] in residency and residency.chunks == 4


def test_a_tier_over_its_capacity_makes_as_much_room_as_a_write_takes() -> None:
    residency = holding(4, capacity=3)
    assert residency.admit([KEYS[5]], 1) == (1, KEYS[:2])
    assert residency.bytes == 3


def test_uses_are_counted_once_a_request_up_to_255() -> None:
    residency = holding(2, capacity=2)
    assert residency.touch(KEYS[:1], request=2) == (KEYS[:1], {KEYS[0]: 2})
    assert residency.touch(KEYS[:3], request=2) == ([KEYS[1], KEYS[0]], {KEYS[1]: 2})
    for request in range(3, 300):
        residency.touch(KEYS[:1], request)
    assert residency.touch(KEYS[:1], request=300) == (KEYS[:1], {})


def test_a_count_of_uses_that_makes_no_sense_is_taken_for_the_nearest_that_does() -> None:
    residency = Residency(lambda nbytes: nbytes, None, LruPolicy(4))
    residency.load([Entry(KEYS[0], 1, 0.0, 0.0, uses=0), Entry(KEYS[1], 1, 0.0, 0.0, uses=1000)])
    assert residency.touch(KEYS[:2], request=2) == ([KEYS[1], KEYS[0]], {KEYS[0]: 2})
