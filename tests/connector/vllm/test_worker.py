"""Our worker behind vLLM's: partial chunks, several groups, padded and packed tensors, and copies that fail."""

from types import SimpleNamespace as Object

import pytest

pytest.importorskip("vllm")

import torch

from kvcascade.connector.copies import HostCopier, rows
from kvcascade.connector.transfers import ChunkCopy
from kvcascade.connector.vllm import compat
from kvcascade.connector.vllm.pool import WorkerPool
from kvcascade.connector.vllm.slots import SlotSpec
from kvcascade.connector.vllm.worker import CascadeWorker, chunk_copies, layout_of
from kvcascade.connector.worker import TransferWorker
from kvcascade.errors import KVCascadeError
from kvcascade.tiers.host import HostPool

pytestmark = pytest.mark.e2e

BLOCKS = 16
HANG = 30.0


def caches(*pages, groups, padding=0):
    """Tensors of these page sizes, each block with bytes of its own; groups of (tensor, bytes used)."""
    tensors = []
    for number, page in enumerate(pages):
        memory = torch.arange(BLOCKS * (page + padding), dtype=torch.int64).add(97 * number).to(torch.int8)
        tensors.append(Object(tensor=memory.view(BLOCKS, page + padding)[:, :page], page_size_bytes=page))
    refs = [[Object(tensor_idx=tensor, page_size_bytes=used) for tensor, used in group] for group in groups]
    return Object(tensors=tensors, group_data_refs=refs)


class Flaky(HostCopier):
    """Fails the copies of these slots, so many times."""

    def __init__(self, tensors, pool):
        super().__init__(tensors, pool)
        self.failures = {}

    def copy(self, piece, direction):
        if self.failures.get(piece.slot, 0) > 0:
            self.failures[piece.slot] -= 1
            raise RuntimeError("injected")
        super().copy(piece, direction)


class Bench:
    def __init__(self, kv, blocks_per_chunk, rank=0, ranks=1):
        self.kv = kv
        tensors, groups = layout_of(kv, blocks_per_chunk)
        part = TransferWorker.part_bytes(tensors, groups)
        self.pool = HostPool(8, part * ranks, ranks=ranks)
        self.copier = Flaky([rows(tensor) for tensor in tensors], self.pool)
        transfers = TransferWorker(tensors, groups, self.pool, offset=rank * part, copier=self.copier)
        sizes = [sum(tensors[place].shape[1] for place in group.tensors) for group in groups]
        self.worker = CascadeWorker(transfers, WorkerPool(self.pool, part), rank, blocks_per_chunk, sizes)
        self.part = part
        self.jobs = 0

    def store(self, blocks, sizes, indices, slots):
        self.jobs += 1
        assert self.worker.submit_store(self.jobs, device(blocks, sizes, indices), SlotSpec(slots))
        return self.end()

    def load(self, blocks, sizes, indices, slots):
        self.jobs += 1
        assert self.worker.submit_load(self.jobs, SlotSpec(slots), device(blocks, sizes, indices))
        return self.end()

    def end(self):
        for _ in range(10):
            self.worker.wait({self.jobs})
            if results := self.worker.get_finished():
                (result,) = results
                assert type(result) is compat.TransferResult and result.success is True
                assert result.job_id == self.jobs
                return result
        raise TimeoutError


def device(blocks, sizes, indices):
    return compat.GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=indices)


@pytest.fixture
def bench():
    begun = []

    def make(*args, **more):
        begun.append(Bench(*args, **more))
        return begun[-1]

    yield make
    for one in begun:
        one.worker.shutdown()


def content(kv, group, block):
    return b"".join(
        kv.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes].numpy().tobytes()
        for ref in kv.group_data_refs[group]
    )


def wipe(kv, blocks):
    for tensor in kv.tensors:
        tensor.tensor[blocks] = 0


def test_first_and_last_chunks_may_be_partial():
    """vLLM's own arithmetic: of each group, the first block's place in its chunk is its index."""
    spec = device([3, 4, 5, 6, 7, 9, 10], sizes=[5, 2], indices=[6, 1])
    assert chunk_copies(spec, [10, 11, 12], 4) == (
        ChunkCopy(0, 10, 2, (3, 4)),
        ChunkCopy(0, 11, 0, (5, 6, 7)),
        ChunkCopy(1, 12, 1, (9, 10)),
    )
    assert chunk_copies(device([], sizes=[0, 0], indices=[0, 0]), [], 4) == ()
    with pytest.raises(KVCascadeError, match="2 blocks has 1 chunks and 2 slots"):
        chunk_copies(device([1, 2], sizes=[2], indices=[0]), [0, 1], 4)


@pytest.mark.parametrize("padding", [0, 24])
def test_bytes_come_back_of_several_groups_and_padded_pages(bench, padding):
    """Two groups overlay one tensor with pages of other sizes; tensors may lie packed in others."""
    kv = caches(64, 96, groups=[[(0, 64), (1, 96)], [(0, 40)]], padding=padding)
    b = bench(kv, 2)
    blocks, sizes, indices, slots = [1, 2, 3, 4, 5, 6], [4, 2], [0, 2], [0, 1, 2]
    before = [content(kv, 0, block) for block in blocks[:4]] + [content(kv, 1, block) for block in blocks[4:]]
    result = b.store(blocks, sizes, indices, slots)
    assert result.transfer_size == 4 * 160 + 2 * 40
    wipe(kv, blocks)
    b.load([11, 12, 13, 14, 9, 8], sizes, indices, slots)
    after = [content(kv, 0, block) for block in (11, 12, 13, 14)] + [content(kv, 1, block) for block in (9, 8)]
    assert after == before


def test_a_load_may_begin_and_end_within_a_chunk(bench):
    kv = caches(64, groups=[[(0, 64)]])
    b = bench(kv, 4)
    before = [content(kv, 0, block) for block in range(1, 9)]
    b.store(list(range(1, 9)), [8], [0], [3, 5])
    wipe(kv, slice(1, 9))
    b.load([10, 11, 12, 13], [4], [2], [3, 5])
    assert [content(kv, 0, block) for block in (10, 11, 12, 13)] == before[2:6]
    assert [content(kv, 0, block) for block in range(1, 9)] == [bytes(64)] * 8


def test_each_rank_has_its_part_of_the_slot(bench):
    kv = caches(64, groups=[[(0, 64)]])
    b = bench(kv, 1, rank=1, ranks=2)
    b.store([4], [1], [0], [2])
    row = bytes(b.pool.slot(2))
    assert row == bytes(64) + content(kv, 0, 4)
    assert not b.pool.marks.ended(2, 1)  # the other rank has not
    b.pool.marks.end(0, [2])
    assert b.pool.marks.ended(2, 1)


def test_a_store_that_fails_is_reported_as_ended_and_marked(bench):
    kv = caches(64, groups=[[(0, 64)]])
    b = bench(kv, 1)
    b.copier.failures = {2: 1}
    b.store([4, 5], [2], [0], [1, 2])
    assert b.pool.marks.ended(1, 1) and b.pool.marks.ended(2, 1)
    assert b.pool.marks.failed(2, 1) and not b.pool.marks.failed(1, 1)


@pytest.mark.parametrize(
    ("blocks", "index", "slots"),
    [([5, 8], 0, [1]), ([8], 3, [1]), ([5, 8, 9, 12], 0, [1, 2]), ([5, 6, 7, 8, 9], 0, [1, 2])],
    ids=["hole", "no head", "two holes", "full and hole"],
)
def test_a_store_without_all_blocks_of_its_chunks_has_failed(bench, blocks, index, slots):
    """vLLM leaves out the blocks that a sliding window has passed, so that others would take their places."""
    kv = caches(64, groups=[[(0, 64)]])
    b = bench(kv, 4)
    result = b.store(blocks, [len(blocks)], [index], slots)
    assert result.transfer_size == 0
    assert all(b.pool.marks.ended(slot, 1) and b.pool.marks.failed(slot, 1) for slot in slots)
    assert all(bytes(b.pool.slot(slot)) == bytes(4 * 64) for slot in slots)
    assert b.worker.get_finished() == []


def test_a_load_that_fails_is_tried_again(bench):
    kv = caches(64, groups=[[(0, 64)]])
    b = bench(kv, 1)
    before = content(kv, 0, 4)
    b.store([4], [1], [0], [1])
    b.copier.failures = {1: 2}
    b.load([9], [1], [0], [1])
    assert content(kv, 0, 9) == before
    assert b.pool.marks.ended(1, 2) and not b.pool.marks.failed(1, 2)


def test_a_load_that_keeps_failing_ends_the_engine_rather_than_serving_wrong_bytes(bench):
    kv = caches(64, groups=[[(0, 64)]])
    b = bench(kv, 1)
    b.store([4], [1], [0], [1])
    b.copier.failures = {1: 3}
    with pytest.raises(KVCascadeError, match="has failed 3 times"):
        b.load([9], [1], [0], [1])
