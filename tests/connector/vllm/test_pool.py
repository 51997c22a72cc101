"""The pool is found by the processes of one engine, and by nobody else."""

import os
import socket
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvcascade.connector.vllm.pool import join_as_scheduler, join_as_worker
from kvcascade.errors import ConfigError
from kvcascade.tiers.host import HostPool

HANG = 30.0


@pytest.fixture
def engine_id():
    return str(uuid.uuid4())


def make(part_bytes):
    return HostPool(8, 2 * part_bytes, ranks=2)


def told(rank):
    return {"rank": str(rank)}


def both(engine_id, needs=(100, 100), make=make):
    with ThreadPoolExecutor(2) as threads:
        return [
            threads.submit(join_as_worker, engine_id, rank, 2, need, told(rank), make, HANG)
            for rank, need in enumerate(needs)
        ]


def test_workers_and_scheduler_have_one_memory(engine_id):
    workers = [joined.result() for joined in both(engine_id)]
    shared = join_as_scheduler(engine_id, HANG)
    for rank, worker in enumerate(workers):
        start = rank * worker.part_bytes
        worker.pool.slot(5)[start : start + worker.part_bytes] = bytes([rank + 1]) * worker.part_bytes
    assert bytes(shared.pool.slot(5)) == b"\x01" * 100 + b"\x02" * 100
    assert shared.ranks == [told(0), told(1)]
    for owner in (*workers, shared.pool):
        owner.close()


def test_all_parts_are_as_large_as_the_largest(engine_id):
    """Ranks with more layers than others need more (as in vllm-project/vllm#50653)."""
    workers = [joined.result() for joined in both(engine_id, (100, 260))]
    assert [worker.part_bytes for worker in workers] == [260, 260]
    assert {worker.pool.slot_bytes for worker in workers} == {520}
    for worker in workers:
        worker.close()


def test_a_pool_that_can_not_be_made_fails_every_worker_with_the_reason(engine_id):
    def too_large(part_bytes):
        raise ConfigError("tiers[0].capacity: not that much")

    for joined in both(engine_id, make=too_large):
        with pytest.raises(ConfigError, match=r"capacity: not that much"):
            joined.result()


def test_a_rank_that_does_not_come_is_named(engine_id):
    """As where it runs on another host (as in vllm-project/vllm#53474)."""
    with pytest.raises(ConfigError, match=r"ranks \[1\] of 2 have not come"):
        join_as_worker(engine_id, 0, 2, 100, {}, make, 0.2)


def test_a_scheduler_without_workers_says_so(engine_id):
    with pytest.raises(ConfigError, match="one user on one host"):
        join_as_scheduler(engine_id, 0.1)


def test_engines_do_not_meet(engine_id):
    one = join_as_worker(engine_id, 0, 1, 100, {}, make, HANG)
    other = join_as_worker(engine_id + "_dp1", 0, 1, 100, {}, make, HANG)
    shared = join_as_scheduler(engine_id + "_dp1", HANG)
    shared.pool.slot(0)[:1] = b"\x07"
    assert one.pool.slot(0)[0] == 0 and other.pool.slot(0)[0] == 7
    for owner in (one, other, shared.pool):
        owner.close()


def test_the_name_is_free_again_once_the_scheduler_has_come(engine_id):
    for _ in range(2):
        worker = join_as_worker(engine_id, 0, 1, 100, {}, make, HANG)
        shared = join_as_scheduler(engine_id, HANG)
        shared.pool.close()
        worker.close()


def test_a_worker_that_ends_before_the_scheduler_comes_leaves_nothing(engine_id):
    join_as_worker(engine_id, 0, 1, 100, {}, make, HANG).close()
    with pytest.raises(ConfigError):
        join_as_scheduler(engine_id, 0.1)


@pytest.mark.parametrize("nonsense", [b"", b"\x01", b"\xff\xff\xff\xff", b"\x02\0\0\0no", b"\x02\0\0\0[]"])
def test_what_others_send_disturbs_nobody(engine_id, nonsense):
    begun = threading.Event()

    def join():
        begun.set()
        return join_as_worker(engine_id, 0, 2, 100, told(0), make, HANG)

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(join)
        begun.wait(HANG)
        _send_until_taken(engine_id, nonsense)
        second = join_as_worker(engine_id, 1, 2, 100, told(1), make, HANG)
        workers = [first.result(), second]
    _send_until_taken(engine_id, nonsense)
    shared = join_as_scheduler(engine_id, HANG)
    assert shared.ranks == [told(0), told(1)]
    for owner in (*workers, shared.pool):
        owner.close()


def _send_until_taken(engine_id, raw):
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            try:
                stranger.connect(f"\0kvcascade/{os.geteuid()}/{engine_id}")
            except ConnectionRefusedError:
                continue
            stranger.sendall(raw)
            return
