"""A stack as one tier below vLLM's own host memory: driven by vLLM's real tiering manager, without an engine."""

import gc
import time
import uuid
from types import SimpleNamespace as Object

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from kvcascade.connector.vllm import compat, plugin, tier
from kvcascade.errors import ConfigError
from kvcascade.testing import fill, holds

pytestmark = pytest.mark.e2e

ROW = 4096
HANG = 30.0
STEP = compat.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
HIT, MISS = compat.LookupResult.HIT, compat.LookupResult.MISS


def keys(count, start=0):
    return [number.to_bytes(32, "big") + bytes(4) for number in range(start, start + count)]


def spec(events=True):
    """What a tier reads of vLLM's spec."""
    group = Object(group_id=0, tokens_per_block=16, layer_names=("layer",))
    config = Object(
        groups=(group,),
        cache=Object(blocks_per_chunk=1, tokens_per_hash=16),
        parallel=Object(world_size=1, data_parallel_index=3, data_parallel_size=1),
        kv_cache_layout="LBHNC",
        replicated_layout=False,
        canonical_layout=False,
    )
    return Object(config=config, kv_events_config=Object(enable_kv_cache_events=events))


class Bench:
    """vLLM's manager over a real region of its own, and what its worker would do."""

    def __init__(self, *declared, slots=16, events=True, tiers=None):
        self.region = SharedOffloadRegion(f"test-{uuid.uuid4()}", slots, None, ROW, ROW)
        primary = CPUPrimaryTierOffloadingManager(slots, self.region, enable_events=events)
        self.view = primary.get_kv_memoryview().cast("B")
        stack = {"version": 1, "tiers": [{"type": "host", "capacity": "1MiB"}, *declared]}
        tiers = tiers or [{"type": "KVCascade", "stack": stack}]
        plugin.register()
        view = primary.get_kv_memoryview()
        problem = ""
        try:
            self.tiers = [SecondaryTierFactory.create_secondary_tier(one, view, spec(events)) for one in tiers]
        except ConfigError as error:
            problem = str(error)
        if problem:  # outside of the handler, whose traceback holds the memory
            self.view.release()
            gc.collect()
            primary.shutdown()
            raise ConfigError(problem)
        self.manager = TieringOffloadingManager(primary, self.tiers)

    def row(self, slot):
        return self.view[slot * ROW : (slot + 1) * ROW]

    def request(self, name, tiers=compat.TierFilter.ALL):
        context = compat.ReqContext(name, load_tier_filter=tiers)
        self.manager.on_new_request(context)
        return context

    def store(self, context, offered):
        output = self.manager.prepare_store(offered, context)
        for key, slot in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            fill(self.row(int(slot)), key)
        self.manager.complete_store(output.keys_to_store, context)
        self.settle()

    def put(self, offered, name="writer"):
        context = self.request(name)
        self.store(context, offered)
        self.manager.on_request_finished(context)

    def settle(self):
        """Steps until nothing is pending."""
        end = time.monotonic() + HANG
        while True:
            self.manager.on_schedule_end(STEP)
            if not self.manager.has_pending_work():
                return
            assert time.monotonic() < end
            time.sleep(0.002)

    def find(self, context, key):
        end = time.monotonic() + HANG
        while True:
            answer = self.manager.lookup(key, context)
            if answer in (HIT, MISS):
                return answer
            assert time.monotonic() < end
            self.manager.on_schedule_end(STEP)
            time.sleep(0.002)

    def loads(self, context, wanted):
        """Whether these are loaded, with the bytes that were stored."""
        assert [self.find(context, key) for key in wanted] == [HIT] * len(wanted)
        slots = self.manager.prepare_load(wanted, context).chunk_ids
        right = all(holds(self.row(int(slot)), key) for key, slot in zip(wanted, slots, strict=True))
        self.manager.complete_load(wanted, context)
        return right

    def forget(self):
        """Host memory alone is emptied."""
        self.manager.primary_tier.reset_cache()

    def close(self):
        self.view.release()
        self.manager.shutdown()


@pytest.fixture
def bench():
    begun = []

    def make(*declared, **more):
        begun.append(Bench(*declared, **more))
        return begun[-1]

    yield make
    for one in begun:
        one.close()


@pytest.fixture
def disk(tmp_path):
    return {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "16MiB", "deadline": "30s", "queue": 0.5}


@pytest.fixture
def shared(tmp_path):
    return {"type": "fs", "path": str(tmp_path / "fs"), "deadline": "30s", "queue": 0.5}


def test_what_vllm_stores_is_promoted_again(bench, disk, shared):
    b = bench(disk, shared)
    b.put(keys(4))
    b.forget()
    context = b.request("reader")
    assert b.loads(context, keys(4))
    assert b.manager.get_load_source(keys(1)[0], context) is compat.CacheHitSource.DISK
    assert b.find(context, keys(1, 50)[0]) is MISS
    b.manager.on_request_finished(context)
    b.settle()
    assert b.tiers[0]._tiers.requests_known == b.tiers[0]._tiers.orders_under_way == 0


def test_a_chunk_that_is_gone_is_a_miss_and_the_others_are_kept(bench, disk):
    b = bench(disk)
    b.put(keys(3))
    b.forget()
    damaged = keys(3)[1]
    b.tiers[0]._tiers._chain.levels[0].tier.delete([damaged])
    context = b.request("reader")
    assert [b.find(context, key) for key in keys(3)] == [HIT, MISS, HIT]
    b.manager.on_request_finished(context)


def test_a_promotion_from_below_fills_the_tier_above(bench, disk, shared):
    b = bench(disk, shared)
    b.put(keys(2))
    b.forget()
    upper, lower = b.tiers[0]._tiers._chain.levels
    for key in keys(2):
        upper.tier.delete([key])
    context = b.request("reader")
    assert b.loads(context, keys(2))  # the disk turns out not to have them
    b.settle()
    assert all(upper.holds(key) for key in keys(2))
    assert all(upper.tier.exists(keys(2)))
    assert not lower.stats.failed_writes
    b.manager.on_request_finished(context)
    assert not b.manager._req_state


def test_what_was_shed_is_stored_when_it_is_used(bench, disk):
    b = bench(disk | {"queue": 0.2}, slots=10)
    b.put(keys(4))
    (level,) = b.tiers[0]._tiers._chain.levels
    assert sum(level.holds(key) for key in keys(4)) == 2
    context = b.request("reader")
    for _ in range(2):
        b.manager.touch(keys(4), context)
        b.settle()
    assert all(level.holds(key) for key in keys(4))
    b.manager.on_request_finished(context)


def test_results_are_vllms_own(bench, disk):
    b = bench(disk)
    one = b.tiers[0]
    context = compat.ReqContext("r")
    begun = one.on_new_request(context)
    assert type(begun) is compat.RequestOffloadingContext and begun.policy is compat.OffloadPolicy.CHUNK_LEVEL
    assert one.lookup(keys(1)[0], context) is compat.LookupResult.MISS
    assert one.medium is compat.Medium.STORAGE and one.locality is compat.Locality.LOCAL
    one.on_request_finished(context)


def test_what_all_tiers_have_in_common_is_said_of_the_one(bench, disk, shared):
    assert bench(disk, shared).tiers[0].cache_hit_source is compat.CacheHitSource.DISK
    memory = {"type": "memory", "capacity": "1MiB"}
    mixed = bench(disk | {"path": disk["path"] + "2"}, memory).tiers[0]
    assert mixed.cache_hit_source is compat.CacheHitSource.EXTERNAL_UNSPECIFIED and mixed.locality is None


def test_a_client_may_name_the_tiers_it_loads_from(bench, disk):
    b = bench(disk)
    b.put(keys(1))
    b.forget()
    matcher = compat.TierMatcher(medium=compat.Medium.STORAGE, locality=compat.Locality.REMOTE)
    far = b.request("far", compat.TierFilter((matcher,)))
    assert b.find(far, keys(1)[0]) is MISS
    near = b.request("near")
    assert b.loads(near, keys(1))
    for context in (far, near):
        b.manager.on_request_finished(context)


def test_events_name_the_tier(bench, disk):
    b = bench(disk)
    b.put(keys(2))
    told = [event for event in b.manager.take_events() if event.ownership]
    assert [(event.ownership, event.medium, event.removed, list(event.keys)) for event in told] == [
        ("disk", compat.Medium.STORAGE, False, keys(2))
    ]
    assert type(told[0]) is compat.OffloadingEvent


def test_no_events_where_nobody_takes_them(bench, disk):
    b = bench(disk, events=False)
    b.put(keys(2))
    assert list(b.manager.take_events()) == []
    assert b.tiers[0]._tiers.take_events() == []


def test_metrics_are_declared_and_told(bench, disk):
    b = bench(disk)
    b.put(keys(2))
    told = b.manager.get_stats()
    declared = tier.KVCascadeTier.build_metric_definitions({})
    assert "vllm:kvcascade_chunks" in declared
    ours = [name for name in str(told.data).split("'") if name.startswith("vllm:kvcascade")]
    assert ours and set(ours) <= set(declared)


def test_a_reset_clears_the_tiers_too(bench, disk):
    """Else an engine whose weights have changed would load what the old ones have computed."""
    b = bench(disk)
    b.put(keys(3))
    b.manager.reset_cache()
    context = b.request("reader")
    assert [b.find(context, key) for key in keys(3)] == [MISS] * 3
    b.store(context, keys(3))
    b.forget()
    assert b.loads(context, keys(3))
    b.manager.on_request_finished(context)


def test_a_reset_with_transfers_under_way(bench, disk):
    b = bench(disk)
    context = b.request("writer")
    output = b.manager.prepare_store(keys(5), context)
    b.manager.complete_store(output.keys_to_store, context)
    b.manager.reset_cache()  # asserts that every job was reported
    assert b.find(context, keys(1)[0]) is MISS
    b.manager.on_request_finished(context)
    b.settle()


def test_nothing_raised_reaches_the_engine(bench, disk):
    b = bench(disk)
    one = b.tiers[0]
    one._tiers.close()
    context = b.request("writer")
    output = b.manager.prepare_store(keys(2), context)
    b.manager.complete_store(output.keys_to_store, context)  # submits to a tier that is closed
    b.settle()
    b.manager.on_request_finished(context)


def test_keywords_of_later_releases_are_accepted(bench, disk):
    stack = {"version": 1, "tiers": [{"type": "host", "capacity": "1MiB"}, disk]}
    b = bench(tiers=[{"type": "KVCascade", "stack": stack, "locality": "REMOTE", "stak": 1, "novelty": 2}])
    assert b.tiers[0].locality is compat.Locality.REMOTE
    b.put(keys(1))


def test_backpressure_is_vllms(bench, disk):
    """A store that writes nothing, since all is there, must not divide by its bytes."""
    stack = {"version": 1, "tiers": [{"type": "host", "capacity": "1MiB"}, disk]}
    slow = {"backpressure_cls": "EMABackpressureDetector"}
    b = bench(tiers=[{"type": "KVCascade", "stack": stack, "backpressure": slow}])
    for name in ("a", "b", "c"):
        b.put(keys(2), name)
        b.forget()
    assert b.tiers[0].bp_detector._completions == 3


def test_beside_another_tier_of_vllm(bench, disk):
    stack = {"version": 1, "tiers": [{"type": "host", "capacity": "1MiB"}, disk]}
    b = bench(tiers=[{"type": "example"}, {"type": "KVCascade", "stack": stack}])
    b.put(keys(2))
    b.tiers[0].chunks.clear()
    b.forget()
    context = b.request("reader")
    assert b.loads(context, keys(2))
    b.manager.on_request_finished(context)


@pytest.mark.parametrize(
    ("declared", "message"),
    [([], "none below 'host'"), ([{"type": "noop", "write": "on_evict"}], "on_evict")],
)
def test_what_can_not_work_is_refused(bench, declared, message):
    with pytest.raises(ConfigError, match=message):
        bench(*declared)


def test_a_tier_without_a_stack_says_what_to_give(bench):
    with pytest.raises(ConfigError, match="stack: required, but missing"):
        bench(tiers=[{"type": "KVCascade"}])


def test_without_the_engines_configuration_nothing_is_shared(bench, disk):
    """As in these tests: there is no engine around. What can't be known to be safe to share is kept apart."""
    one = bench(disk)
    one.put(keys(1))
    one.close()
    other = Bench(disk)
    context = other.request("reader")
    assert other.find(context, keys(1)[0]) is MISS
    other.close()
