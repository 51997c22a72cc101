"""What workers tell of their copies, seen from another mapping of the pool."""

import pytest

from kvcascade.tiers.copymarks import CopyMarks
from kvcascade.tiers.host import HostPool


@pytest.fixture
def pool():
    with HostPool(4, 100, ranks=2) as pool:
        yield pool


def attached(pool):
    return HostPool.attach(pool.fd)


def test_a_copy_has_ended_once_every_rank_has_ended_it(pool):
    with attached(pool) as seen:
        marks = seen.marks
        assert not marks.ended(3, 1)
        pool.marks.end(0, [3])
        assert not marks.ended(3, 1)
        pool.marks.end(1, [3])
        assert marks.ended(3, 1) and not marks.ended(3, 2) and not marks.ended(2, 1)


def test_a_copy_that_failed_on_one_rank_has_failed_and_the_next_has_not(pool):
    marks = pool.marks
    marks.end(0, [1, 2])
    marks.end(1, [1, 2], failed=[2])
    assert marks.failed(2, 1) and not marks.failed(1, 1)
    marks.end(0, [2])
    marks.end(1, [2])
    assert not marks.failed(2, 2) and marks.ended(2, 2)


def test_marks_and_slots_do_not_overlap(pool):
    for slot in range(pool.slots):
        pool.slot(slot)[:] = b"\xff" * 100
    assert not any(pool.marks.failed(slot, 0xFFFFFFFF) for slot in range(pool.slots))
    for rank in range(2):
        pool.marks.end(rank, range(pool.slots), failed=range(pool.slots))
    assert all(bytes(pool.slot(slot)) == b"\xff" * 100 for slot in range(pool.slots))


def test_numbers_go_on_after_the_largest():
    memory = bytearray(CopyMarks.nbytes(1, 1))
    memory[:4] = (0xFFFFFFFF).to_bytes(4, "little")
    marks = CopyMarks(memoryview(memory), 1, 1)
    assert marks.ended(0, 0xFFFFFFFF) and not marks.ended(0, 1 << 32)
    marks.end(0, [0])
    assert marks.ended(0, 1 << 32) and marks.ended(0, 0xFFFFFFFF)
