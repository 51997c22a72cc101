"""Our own connector's parts: which models it serves, what it tells vLLM of failed loads, where hits come from."""

import pickle
from types import SimpleNamespace as Object

import pytest

pytest.importorskip("vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole, supports_hma
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from kvcascade.connector.copies import HostCopier, rows
from kvcascade.connector.groups import GroupSpec
from kvcascade.connector.transfers import ChunkCopy, ConnectorMetadata, Direction, Transfer, WorkerReport
from kvcascade.connector.vllm import compat, connector, plugin
from kvcascade.connector.vllm.cache_groups import check_chunks, check_served, groups_of
from kvcascade.connector.vllm.connector import KVCascadeConnector, StepPlan, StepReport
from kvcascade.connector.vllm.hits import hits_by_source
from kvcascade.connector.vllm.pool import WorkerPool
from kvcascade.connector.vllm.scheduler_side import LostLoad
from kvcascade.connector.vllm.spec import KVCascadeSpec, WorkerTransfers
from kvcascade.connector.vllm.tier import KVCascadeTier
from kvcascade.connector.vllm.worker_side import WorkerSide
from kvcascade.connector.worker import GroupLayout, TransferWorker
from kvcascade.errors import ConfigError
from kvcascade.tiers.host import HostPool

pytestmark = pytest.mark.e2e

HOST, DISK, NOWHERE = (
    compat.CacheHitSource.HOST,
    compat.CacheHitSource.DISK,
    compat.CacheHitSource.EXTERNAL_UNSPECIFIED,
)
SIZES = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def full(kind=compat.FullAttentionSpec):
    return kind(**SIZES)


def window(tokens, **more):
    return compat.SlidingWindowSpec(sliding_window=tokens, **SIZES, **more)


def model(*specs, **more):
    groups = [
        spec if isinstance(spec, KVCacheGroupSpec) else KVCacheGroupSpec([f"layer.{number}"], spec)
        for number, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups, **more)


def offloading(config, blocks_per_chunk=1):
    groups = [Object(group_id=number, tokens_per_block=32) for number in range(len(config.kv_cache_groups))]
    return Object(groups=groups, cache=Object(blocks_per_chunk=blocks_per_chunk))


class TestModels:
    def test_full_attention_sliding_windows_and_draft_layers(self):
        config = model(full(), window(128), KVCacheGroupSpec(["draft"], full(), is_eagle_group=True))
        check_served(config)
        assert groups_of(config, offloading(config, 4)) == [
            GroupSpec(32, 4),
            GroupSpec(32, 4, window=128, index=1),
            GroupSpec(32, 4, draft=True, index=2),
        ]

    def test_tokens_that_vllm_retains_behind_a_window_are_loaded_too(self):
        config = model(window(128, extra_retained_tokens=3))
        assert groups_of(config, offloading(config))[0].window == 131

    def test_layers_that_differ_within_a_group(self):
        config = model(UniformTypeKVCacheSpecs(32, {"a": full(), "b": full()}), full(compat.MLAAttentionSpec))
        check_served(config)
        assert [group.window for group in groups_of(config, offloading(config))] == [None, None]

    @pytest.mark.parametrize(
        "spec",
        [
            MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)),
            ChunkedLocalAttentionSpec(attention_chunk_size=128, **SIZES),
        ],
        ids=lambda spec: type(spec).__name__,
    )
    def test_others_are_refused_and_the_other_way_is_named(self, spec):
        with pytest.raises(ConfigError) as refused:
            check_served(model(full(), spec))
        assert f"cache group 1 of this model ({type(spec).__name__}: layer.1" in str(refused.value)
        assert '"kv_connector": "OffloadingConnector" with "spec_name": "KVCascade"' in str(refused.value)

    def test_groups_that_vllm_does_not_transfer_are_refused(self):
        with pytest.raises(ConfigError, match="cache group 0"):
            check_served(model(KVCacheGroupSpec(["a"], full(), enable_kv_transfer=False)))

    def test_refused_before_anything_is_opened(self):
        mamba = model(MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,)))
        with pytest.raises(ConfigError, match="OffloadingConnector"):
            KVCascadeConnector(Object(kv_transfer_config=Object()), KVConnectorRole.SCHEDULER, mamba)


def start_offloading(kv_cache_config, blocks_per_chunk, start=check_chunks):
    """As vLLM's OffloadingConnector, which is given the cache groups and passes on less."""
    start(offloading(kv_cache_config, blocks_per_chunk))


class TestChunksUnderVllmsOwnScheduler:
    """It stores a chunk whose last block is there, without those that the model has passed."""

    @pytest.mark.parametrize(
        "start",
        [
            lambda config: KVCascadeSpec._make_manager(Object(config=config)),
            lambda config: KVCascadeTier(Object(config=config), memoryview(b""), "KVCascade"),
        ],
        ids=["OffloadingConnector", "tier"],
    )
    def test_several_blocks_of_a_window_are_refused(self, start):
        with pytest.raises(ConfigError, match=r"cache group 1 \(SlidingWindowSpec\).*KVCascadeConnector"):
            start_offloading(model(full(), window(128)), 4, start)

    def test_others_are_served(self):
        start_offloading(model(full(), window(128)), 1)
        start_offloading(model(full(), full(compat.MLAAttentionSpec)), 4)
        check_chunks(offloading(model(window(128)), 4))  # nobody tells the groups


class TestHits:
    def test_they_add_up_where_the_engine_has_the_start_of_a_chunk(self):
        chunks = [(0, 128, DISK), (128, 256, HOST), (256, 384, HOST)]
        assert hits_by_source(chunks, 96, 383) == {DISK: 32, HOST: 255}

    def test_several_groups_count_as_the_outermost(self):
        full = [(0, 64, HOST), (64, 128, HOST), (128, 192, DISK)]
        other = [(64, 128, DISK), (128, 192, HOST)]
        assert hits_by_source(full + other, 0, 192) == {HOST: 64, DISK: 128}

    def test_what_a_window_has_passed_comes_from_nowhere_in_particular(self):
        assert hits_by_source([(256, 320, DISK)], 64, 320) == {NOWHERE: 192, DISK: 64}
        assert hits_by_source([], 0, 32) == {NOWHERE: 32}


class Failing(HostCopier):
    """Fails the copies of these slots."""

    bad = frozenset()

    def copy(self, piece, direction):
        if piece.slot in self.bad:
            raise RuntimeError("injected")
        super().copy(piece, direction)


@pytest.fixture
def worker():
    """A worker of eight slots and sixteen blocks in a group, and its copier."""
    made = []

    def make(by_block, groups=1):
        tensors = [torch.zeros(16, 64, dtype=torch.int8) for _ in range(groups)]
        pool = HostPool(8, 64)
        copier = Failing([rows(tensor) for tensor in tensors], pool)
        layouts = [GroupLayout(1, (number,)) for number in range(groups)]
        transfers = TransferWorker(tensors, layouts, pool, copier=copier)
        side = WorkerSide(
            Object(join=lambda caches: WorkerTransfers(transfers, WorkerPool(pool, 64), [64])), by_block
        )
        side.register(None)
        made.append(side)
        return side, copier

    yield make
    for side in made:
        side.shutdown()


def load(job, name, *copies):
    return Transfer(job, name, Direction.LOAD, tuple(ChunkCopy(0, slot, 0, blocks) for slot, blocks in copies))


def run(side, plan, until):
    side.before_forward(plan)
    side.start_loads(plan)
    side.note_stores(plan)
    side.before_forward(ConnectorMetadata(flush={until}))
    return side.take_results()


class TestFailedLoads:
    PLAN = ConnectorMetadata(loads=[load(7, "a", (0, (3,)), (1, (4,)), (2, (0,)))])

    LOST = (LostLoad("a", frozenset({4})),)

    def test_the_scheduler_hears_which_chunks_have_failed(self, worker):
        side, copier = worker(by_block=True)
        copier.bad = {1, 2}
        results = run(side, self.PLAN, 7)
        assert (results.finished_recving, results.failed_recving) == ({"a"}, set())
        assert side.take_invalid_blocks() == set()
        assert side.take_report() == WorkerReport({7: 1}, {7: {1}})  # block 0 holds nothing, and is not copied

    def test_blocks_are_told_with_the_end_of_the_load(self, worker):
        side, _ = worker(by_block=True)
        side.before_forward(ConnectorMetadata(), self.LOST)
        results = side.take_results()
        assert (results.finished_recving, results.failed_recving) == ({"a"}, set())
        assert side.take_invalid_blocks() == {4}
        assert side.take_results().finished_recving == side.take_invalid_blocks() == set()

    def test_requests_are_told_where_blocks_can_not_be(self, worker):
        side, _ = worker(by_block=False, groups=2)
        side.before_forward(ConnectorMetadata(), self.LOST)
        results = side.take_results()
        assert (results.finished_recving, results.failed_recving) == ({"a"}, {"a"})
        assert side.take_invalid_blocks() == set()

    def test_others_are_not_touched(self, worker):
        side, _ = worker(by_block=False)
        side.before_forward(ConnectorMetadata(loads=[load(8, "b", (1, (4,)))]), self.LOST)
        side.start_loads(ConnectorMetadata(loads=[load(8, "b", (1, (4,)))]))
        side.before_forward(ConnectorMetadata(flush={8}))
        results = side.take_results()
        assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"a"})

    def test_what_was_copied_is_counted_as_vllm_does(self, worker):
        side, _ = worker(by_block=True)
        run(side, self.PLAN, 7)
        counted = side.take_stats().reduce()
        assert counted["vllm:kv_offload_load_bytes"] == 3 * 64
        assert side.take_stats() is None


def test_reports_of_workers_add_up_and_travel():
    one, other = WorkerReport({7: 1, 8: 1}, {7: {0}}), WorkerReport({7: 1}, {7: {2}})
    both = pickle.loads(pickle.dumps(StepReport(one))).aggregate(StepReport(other))
    assert both.report == WorkerReport({7: 2, 8: 1}, {7: {0, 2}})
    assert (one, other) == (WorkerReport({7: 1, 8: 1}, {7: {0}}), WorkerReport({7: 1}, {7: {2}}))
    plan = ConnectorMetadata(loads=[load(7, "a", (0, (3,)))], flush={3})
    step = pickle.loads(pickle.dumps(StepPlan(plan, [LostLoad("a", frozenset({4}))])))
    assert (step.plan, step.lost) == (plan, [LostLoad("a", frozenset({4}))])


def test_which_failures_are_told_by_block():
    def told(*groups, pcp=1, dcp=1):
        spec = Object(config=Object(parallel=Object(pcp_size=pcp, dcp_size=dcp)))
        return connector._told_by_block(spec, groups)

    assert told(GroupSpec(32))
    assert not told(GroupSpec(32), GroupSpec(32, index=1))
    assert not told(GroupSpec(32, window=128))
    assert not told(GroupSpec(32), pcp=2) and not told(GroupSpec(32), dcp=2)


def test_vllm_knows_it_by_name_and_as_what_it_is():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    plugin.register()
    plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name("KVCascadeConnector")
    assert found is KVCascadeConnector
    assert supports_hma(found)
    assert found.get_required_kvcache_layout(Object(attention_config=Object(hisparse_config=None))) == "LBHNC"
    assert not found.requires_kv_delivery.fget(None)


@pytest.mark.parametrize(("policy", "warned"), [("fail", True), ("recompute", False)])
def test_a_policy_that_fails_requests_is_warned_of(policy, warned, caplog):
    connector._warn_of_policy(Object(kv_load_failure_policy=policy))
    assert ('with "recompute"' in caplog.text) is warned
