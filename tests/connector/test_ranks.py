"""Several workers: one decision for all, and a chunk counts only with every worker's part."""

from collections.abc import Callable

import pytest

from kvcascade.connector import ChunkCopy, Direction, GroupLayout, GroupSpec, TransferWorker, WorkerReport
from kvcascade.errors import ConfigError, ProtocolError
from kvcascade.tiers.host import HostPool

from .conftest import Bench, random, raw, run, transfer

Make = Callable[..., Bench]


def test_ranks_with_unequal_layers_share_the_slots_and_their_number(pool: HostPool) -> None:
    """vllm-project/vllm#50653: pipeline stages with more and with fewer layers disagreed on how many slots there
    are. The pool says it for all; each rank's part begins where the one before it ends."""
    stages = [[random(8, 16 + rank) for _ in range(layers)] for rank, layers in enumerate((3, 2, 1))]
    layouts = [[GroupLayout(2, tuple(range(len(layers))))] for layers in stages]
    parts = [TransferWorker.part_bytes(layers, groups) for layers, groups in zip(stages, layouts, strict=True)]
    assert parts == [2 * 3 * 16, 2 * 2 * 17, 2 * 18]
    ranks = [
        TransferWorker(layers, groups, pool, offset=sum(parts[:rank]))
        for rank, (layers, groups) in enumerate(zip(stages, layouts, strict=True))
    ]
    for slot in (0, pool.slots - 1):
        for worker in ranks:
            assert run(worker, transfer(1, Direction.STORE, ChunkCopy(0, slot, 0, (1, 2)))) == {}
        held = b"".join(raw(layer[1:3]) for layers in stages for layer in layers)
        assert bytes(pool.slot(slot))[: len(held)] == held
    for layers, worker in zip(stages, ranks, strict=True):
        run(worker, transfer(2, Direction.LOAD, ChunkCopy(0, pool.slots - 1, 0, (5, 6))))
        assert all(raw(layer[5:7]) == raw(layer[1:3]) for layer in layers)
        with pytest.raises(ProtocolError, match=f"slots are 0 to {pool.slots - 1}"):
            run(worker, transfer(3, Direction.LOAD, ChunkCopy(0, pool.slots, 0, (5, 6))))
        worker.shutdown()


def test_a_rank_whose_part_does_not_fit_is_refused_at_the_start(pool: HostPool) -> None:
    """vllm-project/vllm#50653: not later, with half of a chunk stored as a whole one."""
    layers = [random(8, 1024)]
    assert TransferWorker.part_bytes(layers, [GroupLayout(1, (0,))]) == 1024
    for rank in range(4):
        TransferWorker(layers, [GroupLayout(1, (0,))], pool, offset=rank * 1024).shutdown()
    with pytest.raises(ConfigError, match="bytes 4096 to 5120 of a slot: slots have 4096 bytes; all ranks' parts"):
        TransferWorker(layers, [GroupLayout(1, (0,))], pool, offset=4 * 1024)


def test_no_worker_is_given_a_slot_that_there_is_not(bench: Make) -> None:
    """vllm-project/vllm#50653: ids beyond the smallest rank's capacity. All ranks get the same, out of one pool,
    however much is offered."""
    b = bench(GroupSpec(4), slots=5, workers=3)
    used = set()
    for number in range(12):
        r = b.prefill(f"r{number}", range(100 * number, 100 * number + 24), [1, 2, 3, 4, 5, 6])
        used |= {chunk.slot for store in b.meta.stores for chunk in store.chunks}
        b.finish(r)
        b.drain()
        assert b.stored(r) == [0, 1, 2, 3, 4]
    assert used == set(range(5))


def test_a_rank_that_reports_more_than_it_has_is_refused(bench: Make) -> None:
    """A worker too many, as when ranks are counted in another way than the adapter was told."""
    b = bench(workers=2)
    b.prefill("r", 8, [1, 2])
    (store,) = b.meta.stores
    with pytest.raises(ProtocolError, match="reported by 3 workers; 2 of 2 were expected"):
        b.adapter.update_connector_output(WorkerReport({store.job: 3}))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_what_one_rank_has_not_stored_is_stored_on_none(bench: Make, rank: int) -> None:
    """sgl-project/sglang#15175: half a chunk is never found as a whole one, whichever rank lacks its part."""
    b = bench(workers=3)
    b.copiers[rank].fail = lambda piece, way: piece.block == 2
    r = b.prefill("r", 12, [1, 2, 3])
    b.step()
    b.deliver()
    assert b.stored(r) == [0, 2]
    assert b.query(b.request("again", 12)) == 4
