"""The worker: bytes between device tensors and slots, and when they move."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvcascade.connector import ChunkCopy, ConnectorMetadata, GroupLayout, TransferWorker
from kvcascade.connector.copies import HostCopier, copier_for, rows
from kvcascade.connector.transfers import Direction
from kvcascade.errors import ConfigError, ProtocolError
from kvcascade.tiers.host import HostPool

from .conftest import HANG, NEEDS_CUDA, GatedCopier, random, raw, run, transfer

STORE, LOAD = Direction.STORE, Direction.LOAD
DEVICES = [
    pytest.param("cpu"),
    pytest.param("cuda", marks=NEEDS_CUDA),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
def test_chunks_go_to_their_slots_and_come_back_elsewhere(
    worker: Callable[..., TransferWorker], pool: HostPool, device: str, dtype: torch.dtype
) -> None:
    layers = [random(16, 4, 3, dtype=dtype, device=device), random(16, 5, dtype=dtype, device=device)]
    w = worker(layers, [GroupLayout(2, (0, 1))])
    blocks = [(3, 4), (9, 2), (15, 1)]
    run(
        w, transfer(1, STORE, *(ChunkCopy(0, slot, 0, pair) for slot, pair in zip((5, 0, 7), blocks, strict=True)))
    )
    for slot, pair in zip((5, 0, 7), blocks, strict=True):
        expected = b"".join(raw(layer[block]) for layer in layers for block in pair)
        assert bytes(pool.slot(slot))[: len(expected)] == expected
        assert set(bytes(pool.slot(slot))[len(expected) :]) == {0xAA}
    before = [layer.clone() for layer in layers]
    run(w, transfer(2, LOAD, *(ChunkCopy(0, slot, 0, (at, at + 8)) for slot, at in ((5, 5), (0, 6), (7, 7)))))
    for layer, old in zip(layers, before, strict=True):
        for (source, other), at in zip(blocks, (5, 6, 7), strict=True):
            assert raw(layer[at]) == raw(old[source]) and raw(layer[at + 8]) == raw(old[other])
        assert raw(layer[:5]) == raw(old[:5])


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_chunks_and_absent_blocks(
    worker: Callable[..., TransferWorker], pool: HostPool, device: str
) -> None:
    layer = random(16, 8, device=device)
    w = worker([layer], [GroupLayout(4, (0,))])
    run(w, transfer(1, STORE, ChunkCopy(0, 0, 0, (1, 2, 3, 4)), ChunkCopy(0, 1, 0, (0, 0, 7, 8))))
    assert bytes(pool.slot(1))[:16] == b"\xaa" * 16 and bytes(pool.slot(1))[16:32] == raw(layer[7:9])
    old = layer.clone()
    run(
        w,
        transfer(
            2, LOAD, ChunkCopy(0, 0, 1, (11, 12, 13)), ChunkCopy(0, 0, 0, (14,)), ChunkCopy(0, 0, 2, (0, 10))
        ),
    )
    assert raw(layer[11:14]) == raw(old[2:5]) and raw(layer[14]) == raw(old[1]) and raw(layer[10]) == raw(old[4])
    assert raw(layer[:10]) == raw(old[:10]) and raw(layer[15]) == raw(old[15])


def test_groups_have_tensors_and_sizes_of_their_own(worker: Callable[..., TransferWorker], pool: HostPool) -> None:
    tensors = [random(8, 16), random(8, 4), random(8, 6)]
    groups = [GroupLayout(1, (0, 2)), GroupLayout(3, (1,))]
    assert TransferWorker.part_bytes(tensors, groups) == 22
    w = worker(tensors, groups)
    run(w, transfer(1, STORE, ChunkCopy(0, 0, 0, (5,)), ChunkCopy(1, 1, 0, (5, 6, 1))))
    assert bytes(pool.slot(0))[:22] == raw(tensors[0][5]) + raw(tensors[2][5])
    assert bytes(pool.slot(1))[:12] == raw(tensors[1][5:7]) + raw(tensors[1][1])


def test_ranks_share_a_slot_and_keep_to_their_parts(worker: Callable[..., TransferWorker], pool: HostPool) -> None:
    """sgl-project/sglang#15175: ranks that write one key do not overwrite each other."""
    layers = [random(8, 8 + 0 * rank) + rank for rank in range(3)]
    ranks = [worker([layer], [GroupLayout(2, (0,))], offset=16 * rank) for rank, layer in enumerate(layers)]
    for w in ranks:
        run(w, transfer(1, STORE, ChunkCopy(0, 2, 0, (1, 2))))
    assert bytes(pool.slot(2))[:48] == b"".join(raw(layer[1:3]) for layer in layers)
    for layer, w in zip(layers, ranks, strict=True):
        run(w, transfer(2, LOAD, ChunkCopy(0, 2, 0, (5, 6))))
        assert raw(layer[5:7]) == raw(layer[1:3])


REMOTE = """
import sys, torch
from kvcascade.connector import *
from kvcascade.tiers.host import HostPool

layer = torch.arange(64, dtype=torch.uint8).reshape(8, 8)
with HostPool.attach(int(sys.argv[1])) as pool:
    worker = TransferWorker([layer], [GroupLayout(1, (0,))], pool, offset=8)
    store = Transfer(1, "r", Direction.STORE, (ChunkCopy(0, 3, 0, (2,)),))
    worker.handle_preemptions(ConnectorMetadata(stores=[store], flush={1}))
    assert worker.get_finished().ended == {1: 1}
    worker.shutdown()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a memfd")
def test_a_worker_in_another_process_maps_the_pool(pool: HostPool) -> None:
    assert pool.fd is not None
    command = [sys.executable, "-c", REMOTE, str(pool.fd)]
    assert subprocess.run(command, pass_fds=[pool.fd], check=False).returncode == 0
    assert bytes(pool.slot(3))[:16] == b"\xaa" * 8 + bytes(range(16, 24))


def test_what_is_no_pool_is_not_attached(tmp_path: Path) -> None:
    for content in (b"", b"x" * 8192):
        (tmp_path / "file").write_bytes(content)
        with (
            (tmp_path / "file").open("rb") as file,
            pytest.raises(ConfigError, match="host pool of file descriptor"),
        ):
            HostPool.attach(file.fileno())


def test_blocks_may_be_views_into_a_wider_tensor(worker: Callable[..., TransferWorker], pool: HostPool) -> None:
    packed = random(8, 20)
    w = worker([packed[:, 4:12]], [GroupLayout(2, (0,))])
    run(w, transfer(1, STORE, ChunkCopy(0, 0, 0, (3, 4))))
    assert bytes(pool.slot(0))[:16] == raw(packed[3:5, 4:12])
    old = packed.clone()
    run(w, transfer(2, LOAD, ChunkCopy(0, 0, 0, (6, 7))))
    assert raw(packed[6:8, 4:12]) == raw(old[3:5, 4:12])
    assert raw(packed[6:8, :4]) == raw(old[6:8, :4]) and raw(packed[6:8, 12:]) == raw(old[6:8, 12:])


@pytest.fixture
def gated(pool: HostPool) -> Iterator[tuple[TransferWorker, GatedCopier, torch.Tensor]]:
    layer = random(16, 8)
    copier = GatedCopier([rows(layer)], pool)
    w = TransferWorker([layer], [GroupLayout(1, (0,))], pool, copier=copier)
    yield w, copier, layer
    copier.gate.set()
    w.shutdown()


Gated = tuple[TransferWorker, GatedCopier, torch.Tensor]


def test_a_store_starts_in_the_next_step_and_sees_what_its_own_step_has_computed(
    gated: Gated, pool: HostPool
) -> None:
    """vllm-project/vllm#45704: nothing is read before its writer is done."""
    w, copier, layer = gated
    w.handle_preemptions(meta := ConnectorMetadata(stores=[transfer(1, STORE, ChunkCopy(0, 0, 0, (3,)))]))
    w.start_load_kv(meta)
    assert copier.copied == []
    layer[3] = 77  # the step computes
    w.wait_for_save(meta)
    assert copier.copied == [] and not w.get_finished()
    w.handle_preemptions(ConnectorMetadata(flush={1}))
    assert bytes(pool.slot(0))[:8] == bytes([77]) * 8


def test_a_step_without_computation_starts_deferred_stores_too(gated: Gated) -> None:
    w, _, _ = gated
    w.wait_for_save(ConnectorMetadata(stores=[transfer(1, STORE, ChunkCopy(0, 0, 0, (3,)))]))
    w.start_load_kv(ConnectorMetadata())
    wait_for(lambda: bool(w.get_finished()))


def test_a_store_in_the_flush_list_of_its_own_step_is_done_before_the_step_computes(
    gated: Gated, pool: HostPool
) -> None:
    """vllm-project/vllm#29870."""
    w, _, layer = gated
    layer[3] = 11
    meta = ConnectorMetadata(stores=[transfer(1, STORE, ChunkCopy(0, 0, 0, (3,)))], flush={1})
    w.handle_preemptions(meta)
    layer[3] = 99
    w.start_load_kv(meta)
    w.wait_for_save(meta)
    w.handle_preemptions(ConnectorMetadata())
    assert bytes(pool.slot(0))[:8] == bytes([11]) * 8
    assert w.get_finished().ended == {1: 1} and not w.get_finished()


def test_the_flush_list_is_waited_for_and_nothing_else_is(gated: Gated) -> None:
    w, copier, _ = gated
    copier.gate.clear()
    w.wait_for_save(ConnectorMetadata(stores=[transfer(1, STORE, ChunkCopy(0, 0, 0, (3,)))]))
    w.handle_preemptions(ConnectorMetadata())
    assert not w.get_finished()
    waiter = threading.Thread(target=w.handle_preemptions, args=(ConnectorMetadata(flush={1}),))
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    copier.gate.set()
    waiter.join(HANG)
    assert w.get_finished().ended == {1: 1}


def test_jobs_that_have_ended_or_were_never_seen_do_no_harm_in_the_flush_list(gated: Gated) -> None:
    w, _, _ = gated
    w.handle_preemptions(ConnectorMetadata(flush={4, 5}))


def test_a_copy_that_fails_is_reported_with_its_chunks_and_the_others_are_done(
    gated: Gated, pool: HostPool
) -> None:
    """vllm-project/vllm#39732: the third copy raises; the process lives, and later jobs are served."""
    w, copier, layer = gated
    copier.fail = lambda piece, direction: piece.block == 3
    chunks = [ChunkCopy(0, slot, 0, (block,)) for slot, block in enumerate((1, 3, 5))]
    assert run(w, transfer(1, STORE, *chunks), transfer(2, STORE, ChunkCopy(0, 4, 0, (7,)))) == {1: {1}}
    assert bytes(pool.slot(2))[:8] == raw(layer[5]) and set(bytes(pool.slot(1))) == {0xAA}
    assert run(w, transfer(3, LOAD, ChunkCopy(0, 4, 0, (9,)))) == {} and raw(layer[9]) == raw(layer[7])


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (ChunkCopy(0, 8, 0, (1,)), "slots are 0 to 7"),
        (ChunkCopy(0, -1, 0, (1,)), "slots are 0 to 7"),
        (ChunkCopy(0, 0, 0, (1, 2)), "chunks of 1 blocks"),
        (ChunkCopy(0, 0, 1, (1,)), "chunks of 1 blocks"),
        (ChunkCopy(0, 0, 0, (16,)), "blocks are 0 to 15"),
        (ChunkCopy(0, 0, 0, (-1,)), "blocks are 0 to 15"),
        (ChunkCopy(1, 0, 0, (1,)), "groups are 0 to 0"),
    ],
)
def test_nothing_outside_the_tensors_and_the_slots_is_touched(
    gated: Gated, chunk: ChunkCopy, message: str
) -> None:
    w, copier, _ = gated
    with pytest.raises(ProtocolError, match=message):
        w.start_load_kv(ConnectorMetadata(loads=[transfer(1, LOAD, chunk)]))
    assert copier.copied == []


def test_a_job_is_started_once(gated: Gated) -> None:
    w, copier, _ = gated
    copier.gate.clear()
    meta = ConnectorMetadata(loads=[transfer(1, LOAD, ChunkCopy(0, 0, 0, (1,)))])
    w.start_load_kv(meta)
    with pytest.raises(ProtocolError, match="job 1 is running already"):
        w.start_load_kv(meta)


def test_shutdown_ends_what_has_started_and_forgets_the_rest(gated: Gated, pool: HostPool) -> None:
    w, _, layer = gated
    w.wait_for_save(ConnectorMetadata(stores=[transfer(1, STORE, ChunkCopy(0, 0, 0, (3,)))]))
    w.handle_preemptions(ConnectorMetadata())
    w.wait_for_save(ConnectorMetadata(stores=[transfer(2, STORE, ChunkCopy(0, 1, 0, (4,)))]))
    w.shutdown()
    w.shutdown()
    assert bytes(pool.slot(0))[:8] == raw(layer[3]) and set(bytes(pool.slot(1))) == {0xAA}


def test_layouts_that_cannot_be(pool: HostPool) -> None:
    layer = random(8, 16)
    for tensors, groups, options, message in (
        ([], [GroupLayout(1, (0,))], {}, "at least one KV tensor"),
        ([layer], [], {}, "at least one KV tensor and one group"),
        ([layer], [GroupLayout(1, (1,))], {}, "tensors out of 0 to 0"),
        ([layer], [GroupLayout(0, (0,))], {}, "at least 1 block"),
        ([layer], [GroupLayout(257, (0,))], {}, "slots have 4096 bytes"),
        ([layer], [GroupLayout(1, (0,))], {"offset": 4090}, "bytes 4090 to 4106 of a slot"),
        ([layer], [GroupLayout(1, (0,))], {"offset": -1}, "bytes -1 to"),
        ([layer.T], [GroupLayout(1, (0,))], {}, "must lie together"),
        ([layer.to("meta")], [GroupLayout(1, (0,))], {}, "'cpu' and 'cuda' are served"),
        ([layer, layer.to("meta")], [GroupLayout(1, (0,))], {}, "all must be on one"),
    ):
        with pytest.raises(ConfigError, match=message):
            TransferWorker(tensors, groups, pool, **options)  # type: ignore[arg-type]


def test_the_copier_follows_the_device(pool: HostPool) -> None:
    copier = copier_for([rows(random(4, 4))], pool)
    assert isinstance(copier, HostCopier)
    copier.close()


def wait_for(done: Callable[[], bool]) -> None:
    """Waits for the copying thread."""
    pause = threading.Event()
    for _ in range(30_000):
        if done():
            return
        pause.wait(0.001)
    raise AssertionError("it does not happen")
