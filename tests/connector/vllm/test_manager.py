"""Our manager behind vLLM's: results of vLLM's own types, and vLLM's rules for offers and resets."""

import pickle
import time
from types import SimpleNamespace as Object

import pytest

pytest.importorskip("vllm")

from kvcascade.configs import parse_stack
from kvcascade.connector.vllm import compat
from kvcascade.connector.vllm.ledger import CopyLedger
from kvcascade.connector.vllm.manager import CascadeManager
from kvcascade.connector.vllm.media import place_of
from kvcascade.connector.vllm.slots import SlotSpec
from kvcascade.stack import build, pool_slots
from kvcascade.testing import fill, holds
from kvcascade.tiers.host import HostPool
from kvcascade.types import Namespace

pytestmark = pytest.mark.e2e

CHUNK = 4096
HANG = 30.0
STEP = Object(new_req_ids=(), preempted_req_ids=())


def keys(count, start=0, group=0):
    return [number.to_bytes(32, "big") + group.to_bytes(4, "big") for number in range(start, start + count)]


class Bench:
    """The manager, and one worker that does what a test tells it."""

    def __init__(self, tiers, slots=8, events=True):
        settings = parse_stack(
            {"version": 1, "tiers": [{"type": "host", "capacity": (slots + 1) * CHUNK}, *tiers]}
        )
        self.pool = HostPool(pool_slots(settings, CHUNK), CHUNK, ranks=1)
        namespace = Namespace.of(model="m")
        self.stack = build(settings, namespace, CHUNK, pool=self.pool, events=events)
        self.worker = HostPool.attach(self.pool.fd)
        places = [place_of(tier) for tier in settings.tiers]
        self.manager = CascadeManager(self.stack, CopyLedger(self.pool.marks, self.pool.slots), places, events)

    def request(self, name, tiers=compat.TierFilter.ALL, positions=()):
        context = compat.ReqContext(name, load_tier_filter=tiers)
        for key, position in positions:
            context.set_offload_key_position(key, position)
        self.manager.on_new_request(context)
        return context

    def copy(self, offered, slots, failed=(), content=None):
        """What a worker does of a store."""
        for key, slot in zip(offered, slots, strict=True):
            if key not in failed:
                fill(self.worker.slot(slot), content or key)
        self.worker.marks.end(0, slots, {slot for key, slot in zip(offered, slots, strict=True) if key in failed})

    def store(self, context, offered, failed=()):
        output = self.manager.prepare_store(offered, context)
        self.copy(output.keys_to_store, output.store_spec.slots, failed)
        self.manager.complete_store(set(output.keys_to_store), context)
        return output

    def settle(self, what=lambda: False):
        """Steps until nothing is pending."""
        for _ in range(int(HANG / 0.002)):
            self.manager.on_schedule_end(STEP)
            if not self.manager.has_pending_work() or what():
                return
            time.sleep(0.002)
        raise TimeoutError

    def find(self, context, key):
        """The answer to a lookup, once it is known."""
        for _ in range(int(HANG / 0.002)):
            answer = self.manager.lookup(key, context)
            if answer in (compat.LookupResult.HIT, compat.LookupResult.MISS):
                return answer
            self.manager.on_schedule_end(STEP)
            time.sleep(0.002)
        raise TimeoutError

    def close(self):
        self.manager.shutdown()
        self.worker.close()


@pytest.fixture
def bench(tmp_path):
    begun = []

    def make(*tiers, **more):
        begun.append(Bench(tiers, **more))
        return begun[-1]

    yield make
    for one in begun:
        one.close()


@pytest.fixture
def disk(tmp_path):
    return {"type": "disk", "path": str(tmp_path / "disk"), "capacity": "16MiB", "deadline": "30s", "queue": 0.5}


def test_results_are_vllms_own(bench):
    """An enum of ours matches nothing in vLLM, and every lookup would silently score zero."""
    b = bench()
    context = compat.ReqContext("r")
    begun = b.manager.on_new_request(context)
    assert type(begun) is compat.RequestOffloadingContext and begun.policy is compat.OffloadPolicy.CHUNK_LEVEL
    (key,) = keys(1)
    assert b.manager.lookup(key, context) is compat.LookupResult.MISS
    output = b.manager.prepare_store([key], context)
    assert type(output) is compat.PrepareStoreOutput and type(output.store_spec) is SlotSpec
    assert b.manager.lookup(key, context) is compat.LookupResult.HIT_PENDING
    b.copy(output.keys_to_store, output.store_spec.slots)
    b.manager.complete_store({key}, context)
    assert b.manager.lookup(key, context) is compat.LookupResult.HIT
    assert b.manager.get_load_source(key, context) is compat.CacheHitSource.HOST
    spec = b.manager.prepare_load([key], context)
    assert holds(b.worker.slot(spec.slots[0]), key)
    assert pickle.loads(pickle.dumps(spec)).slots == spec.slots
    assert b.manager.complete_load({key}, context) is None
    (event,) = b.manager.take_events()
    assert type(event) is compat.OffloadingEvent
    assert b.manager.reset_cache() is None
    assert isinstance(b.manager.get_stats(), compat.ConnectorStats)


def test_an_offer_that_does_not_fit_now_is_refused_whole(bench):
    """vLLM offers again only what was refused as a whole; a key that it does not get back is done for it."""
    b = bench()
    busy, other = b.request("busy"), b.request("other")
    held = b.manager.prepare_store(keys(6), busy)
    assert b.manager.prepare_store(keys(4, start=10), other) is None
    assert b.manager.prepare_store(keys(4, start=10), other) is None
    b.copy(held.keys_to_store, held.store_spec.slots)
    b.manager.complete_store(set(held.keys_to_store), busy)
    b.settle()
    output = b.store(other, keys(4, start=10))
    assert output.keys_to_store == keys(4, start=10)
    assert len(output.evicted_keys) == 2


def test_of_a_prompt_that_can_never_fit_the_prefix_is_kept_and_nothing_more(bench):
    b = bench()
    groups = [*keys(6), *keys(6, group=1)]  # one offer mixes the groups: in each, head first
    context = b.request("r", positions=[(key, 32 + 32 * (place % 6)) for place, key in enumerate(groups)])
    output = b.store(context, groups)
    assert output.keys_to_store == [*keys(4), *keys(4, group=1)]
    assert b.manager.prepare_store(keys(2, start=90), context).keys_to_store == []
    assert all(b.manager.lookup(key, context) is compat.LookupResult.HIT for key in output.keys_to_store)


def test_a_prompt_that_grows_beyond_the_pool_keeps_its_head(bench):
    b = bench()
    context = b.request("r")
    for start in range(0, 12, 3):
        output = b.manager.prepare_store(keys(3, start=start), context)
        assert output is not None
        b.copy(output.keys_to_store, output.store_spec.slots)
        b.manager.complete_store(set(output.keys_to_store), context)
        b.settle()
    found = [b.manager.lookup(key, context) for key in keys(12)]
    assert found == [compat.LookupResult.HIT] * 8 + [compat.LookupResult.MISS] * 4


def test_what_is_refused_at_the_end_is_counted(bench):
    b = bench()
    busy, other = b.request("busy"), b.request("other")
    b.manager.prepare_store(keys(6), busy)
    assert b.manager.prepare_store(keys(4, start=10), other) is None
    b.manager.on_request_finished(other)
    assert counter(b.manager.get_stats(), "vllm:kvcascade_lost_chunks", ()) == 4


def counter(stats, name, labels):
    return stats.data["data"].get(name, {}).get(labels, 0)


def test_counters_are_told_once(bench):
    b = bench()
    context = b.request("r")
    b.store(context, keys(3))
    stats = b.manager.get_stats()
    assert counter(stats, "vllm:kvcascade_written_bytes", ("host",)) == 3 * CHUNK
    assert stats.data["data"]["vllm:kvcascade_chunks"]["host",] == 3
    assert b.manager.get_stats() is None
    b.store(context, keys(1, start=5))
    assert counter(b.manager.get_stats(), "vllm:kvcascade_written_bytes", ("host",)) == CHUNK
    b.manager.reset_cache()
    b.store(b.request("s"), keys(1))
    assert counter(b.manager.get_stats(), "vllm:kvcascade_written_bytes", ("host",)) == CHUNK


def test_every_metric_is_defined(bench, disk):
    from kvcascade.connector.vllm.metrics import definitions

    b = bench(disk)
    b.store(b.request("r"), keys(3))
    b.settle()
    defined = definitions()
    for name, values in b.manager.get_stats().data["data"].items():
        assert all(len(labels) == len(defined[name].labelnames) for labels in values)


def test_a_store_that_failed_on_a_worker_is_dropped(bench):
    """vLLM's worker has no word for it: it reports success (as in vllm-project/vllm#47923)."""
    b = bench()
    context = b.request("r")
    (bad,) = keys(1, start=1)
    b.store(context, keys(3), failed=[bad])
    found = [b.manager.lookup(key, context) for key in keys(3)]
    assert found == [compat.LookupResult.HIT, compat.LookupResult.MISS, compat.LookupResult.HIT]
    assert [sorted(event.keys) for event in b.manager.take_events()] == [[keys(3)[0], keys(3)[2]]]
    assert counter(b.manager.get_stats(), "vllm:kvcascade_failed_store_chunks", ()) == 1
    b.store(context, [bad])
    assert b.manager.lookup(bad, context) is compat.LookupResult.HIT


def test_slots_of_copies_that_a_reset_has_voided_are_used_again_only_once_those_have_ended(bench, disk):
    """vLLM tells nothing of the copies that were in flight (as in vllm-project/vllm#41956). A load and a store
    run, a reset comes, other chunks take all slots that are free, the copies end late: no wrong byte."""
    b = bench(disk)
    first = b.request("first")
    loaded = keys(1)
    b.store(first, loaded)
    b.settle()
    loading = b.manager.prepare_load(loaded, first).slots
    storing = b.manager.prepare_store(keys(2, start=1), first)
    b.manager.reset_cache()
    assert b.manager.has_pending_work()

    later = b.request("later")
    assert b.manager.lookup(loaded[0], later) is compat.LookupResult.MISS
    assert b.manager.prepare_store(keys(1, start=1), later) is None  # a copy still writes there
    b.store(later, keys(4, start=20))
    b.settle(lambda: not b.stack.has_pending_work())
    assert all(b.find(later, key) is compat.LookupResult.HIT for key in keys(4, start=20))

    b.copy(storing.keys_to_store, storing.store_spec.slots, content=b"late")  # the copies of before the reset end
    assert all(bytes(b.worker.slot(slot)) for slot in loading)
    b.worker.marks.end(0, loading)
    slots = b.manager.prepare_load(keys(4, start=20), later).slots
    assert all(holds(b.worker.slot(slot), key) for slot, key in zip(slots, keys(4, start=20), strict=True))
    assert not set(slots) & {*loading, *storing.store_spec.slots}
    b.worker.marks.end(0, slots)
    b.manager.complete_load(set(keys(4, start=20)), later)

    b.settle()
    assert not b.manager.has_pending_work()
    assert b.stack.get_stats().free_slots == 4
    b.store(later, keys(1, start=1))
    assert b.manager.lookup(keys(1, start=1)[0], later) is compat.LookupResult.HIT


def test_late_completions_of_before_a_reset_change_nothing(bench):
    b = bench()
    context = b.request("r")
    output = b.manager.prepare_store(keys(2), context)
    b.manager.reset_cache()
    b.copy(output.keys_to_store, output.store_spec.slots)
    b.manager.complete_store(set(output.keys_to_store), context)
    b.settle()
    assert b.manager.lookup(keys(1)[0], context) is compat.LookupResult.MISS
    assert b.stack.get_stats().free_slots == 8


def test_completions_may_come_after_the_end_of_the_request(bench, disk):
    """As in vllm-project/vllm#45823."""
    b = bench(disk)
    context = b.request("r")
    output = b.manager.prepare_store(keys(2), context)
    b.manager.on_request_finished(context)
    assert b.manager.has_pending_work()
    b.copy(output.keys_to_store, output.store_spec.slots)
    b.manager.complete_store(set(output.keys_to_store), context)
    b.settle()
    assert b.stack.get_stats().tiers[1].chunks == 2
    assert b.stack.requests_known == 0


def test_the_origin_of_a_chunk_is_remembered_across_promotion(bench, disk):
    b = bench(disk)
    b.store(b.request("r"), keys(2))
    b.settle()
    b.stack.reset_cache(scope="primary")
    reader = b.request("s")
    assert b.find(reader, keys(1)[0]) is compat.LookupResult.HIT
    assert b.manager.get_load_source(keys(1)[0], reader) is compat.CacheHitSource.DISK
    assert b.manager.get_load_source(keys(1)[0], b.request("t")) is compat.CacheHitSource.HOST


@pytest.mark.parametrize(
    ("matchers", "found"),
    [
        ([compat.TierMatcher(compat.Medium.STORAGE, None)], True),
        ([compat.TierMatcher(compat.Medium.STORAGE, compat.Locality.REMOTE)], False),
        ([compat.TierMatcher(compat.Medium.CPU, None)], False),
        ([], False),
    ],
)
def test_a_client_may_say_which_tiers_to_load_from(bench, disk, matchers, found):
    b = bench(disk)
    b.store(b.request("r"), keys(1))
    b.settle()
    b.stack.reset_cache(scope="primary")
    reader = b.request("s", compat.TierFilter(tuple(matchers)))
    expected = compat.LookupResult.HIT if found else compat.LookupResult.MISS
    assert b.find(reader, keys(1)[0]) is expected
    assert b.stack.get_stats().tiers[1].read == found


def test_events_are_of_each_tiers_own_chunks(bench, disk):
    b = bench(disk, slots=16)
    context = b.request("r")
    b.store(context, keys(8))
    b.settle()
    events = list(b.manager.take_events())
    assert {(event.medium, event.locality, event.ownership, event.removed) for event in events} == {
        (compat.Medium.CPU, compat.Locality.LOCAL, None, False),
        (compat.Medium.STORAGE, compat.Locality.LOCAL, "disk", False),
    }
    assert sorted(key for event in events if event.ownership for key in event.keys) == keys(8)
    b.manager.on_request_finished(context)
    b.store(b.request("s"), keys(10, start=8))
    gone = [event for event in b.manager.take_events() if event.removed]
    assert [(event.ownership, len(event.keys)) for event in gone] == [(None, 2)]


def test_no_events_where_nobody_takes_them(bench):
    b = bench(events=False)
    b.store(b.request("r"), keys(2))
    assert list(b.manager.take_events()) == []
