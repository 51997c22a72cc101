"""The secondary tiers as one tier below a pool that another manager keeps."""

import threading
import time

import pytest

from kvcascade.configs import parse_stack
from kvcascade.errors import ClosedError, ConfigError, KVCascadeError, TierUnavailable
from kvcascade.stack import build_lower
from kvcascade.testing import FaultTier, GateTier, ManualClock, buffer, fill, holds, key_for
from kvcascade.types import Capabilities, LookupResult, MissReason, Namespace, Outcome, RequestContext

CHUNK = 512
HANG = 30.0
K = [key_for(number) for number in range(64)]


class Pool:
    """Another manager, as far as it concerns us: slots, orders, and what became of them."""

    def __init__(self, *tiers, slots=32, shared=(), **stack):
        self.clock = ManualClock()
        self.rows = [buffer(CHUNK) for _ in range(slots)]
        self.gates, self.faults = {}, {}
        self.shared = shared
        host = {"type": "host", "capacity": "1MiB"}
        declared = [{"type": "memory", "capacity": 1 << 20, "queue": 1.0, **tier} for tier in tiers]
        settings = parse_stack({"version": 1, "log_every": "0s", "tiers": [host, *declared], **stack})
        self.tiers = build_lower(
            settings,
            Namespace.of(model="m"),
            CHUNK,
            self.rows.__getitem__,
            slots,
            events=True,
            clock=self.clock,
            wrap=self.wrap,
        )
        self.orders = 0
        self.ended = {}

    def wrap(self, name, tier):
        self.faults[name] = FaultTier(tier, seed=0, rates={})
        self.gates[name] = gate = GateTier(self.faults[name])
        if name in self.shared:
            gate.capabilities = Capabilities(shared=True)
        gate.open()
        return gate

    def request(self, name, **more):
        context = RequestContext(name, **more)
        self.tiers.on_new_request(context)
        return context

    def store(self, context, keys, start=0):
        slots = {key: start + place for place, key in enumerate(keys)}
        for key, slot in slots.items():
            fill(self.rows[slot], key)
        self.orders += 1
        self.tiers.store(self.orders, slots, context)
        return self.orders

    def load(self, context, keys, start=0):
        self.orders += 1
        self.tiers.load(self.orders, {key: start + place for place, key in enumerate(keys)}, context)
        return self.orders

    def step(self):
        for carried in self.tiers.take_ended():
            assert carried.order not in self.ended, "an order is reported twice"
            self.ended[carried.order] = carried
        self.tiers.on_schedule_end()

    def until(self, what):
        end = time.monotonic() + HANG
        while not what():
            assert time.monotonic() < end
            self.step()
            time.sleep(0.001)

    def wait(self, order):
        self.until(lambda: order in self.ended)
        return self.ended[order]

    def find(self, context, key):
        """The answer to a lookup, once it is known."""
        self.until(lambda: self.tiers.lookup(key, context) is not LookupResult.RETRY)
        return self.tiers.lookup(key, context)

    def put(self, keys, name="writer"):
        context = self.request(name)
        carried = self.wait(self.store(context, keys))
        self.tiers.on_request_finished(context)
        return carried

    def held(self, name):
        return {stats.name: stats for stats in self.tiers.get_stats().tiers}[name].chunks


@pytest.fixture
def pool():
    made = []

    def make(*tiers, **more):
        made.append(Pool(*tiers, **more))
        return made[-1]

    yield make
    for one in made:
        for gate in one.gates.values():
            gate.open()
        one.tiers.drain()
        one.tiers.close()


def test_what_is_stored_goes_to_all_and_comes_from_the_topmost(pool):
    p = pool({"name": "a"}, {"name": "b"})
    carried = p.put(K[:3])
    assert carried.whole and carried.chunks == 6
    assert p.held("a") == p.held("b") == 3
    context = p.request("reader")
    assert [p.tiers.lookup(key, context) for key in K[:4]] == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    carried = p.wait(p.load(context, K[:3], start=10))
    assert carried.whole and carried.good == tuple(K[:3])
    assert all(holds(p.rows[10 + place], K[place]) for place in range(3))
    assert [call.keys for call in p.gates["b"].calls if call.verb == "read"] == []
    p.tiers.on_request_finished(context)
    stats = p.tiers.get_stats()
    assert (stats.hits, stats.misses[MissReason.NEVER_STORED]) == (3, 1)
    assert p.tiers.requests_known == p.tiers.orders_under_way == 0


def test_what_is_there_is_not_written_again(pool):
    p = pool({"name": "a"})
    p.put(K[:2])
    carried = p.put(K[:3], "again")
    assert carried.whole and carried.chunks == 1


def test_slots_are_kept_until_the_transfer_has_really_ended(pool):
    """A read that has passed its deadline still writes into the memory of the other manager."""
    p = pool({"name": "a", "deadline": "1s"})
    p.put(K[:1])
    p.gates["a"].shut()
    context = p.request("reader")
    order = p.load(context, K[:1], start=5)
    call = p.gates["a"].wait_for("read")
    p.clock.advance(100)
    p.step()
    assert order not in p.ended and p.tiers.orders_under_way == 1
    call.release()
    assert p.wait(order).whole
    assert holds(p.rows[5], K[0])


def test_a_chunk_that_could_not_be_loaded_is_a_miss_to_who_asked(pool):
    """Else the request would ask for it for ever."""
    p = pool({"name": "a"})
    p.put(K[:3])
    context = p.request("reader")
    p.gates["a"].shut()
    order = p.load(context, K[:3], start=5)
    failed = Outcome.failed(TierUnavailable("injected"))
    p.gates["a"].wait_for("read").release([Outcome.OK, failed, Outcome.OK])
    carried = p.wait(order)
    assert not carried.whole and carried.good == (K[0], K[2])
    p.gates["a"].open()
    assert [p.tiers.lookup(key, context) for key in K[:3]] == [
        LookupResult.HIT,
        LookupResult.MISS,
        LookupResult.HIT,
    ]
    assert p.tiers.lookup(K[1], p.request("other")) is LookupResult.HIT


@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.CORRUPT])
def test_what_one_tier_has_lost_comes_from_the_next_in_the_same_order(pool, outcome):
    p = pool({"name": "a"}, {"name": "b"})
    p.put(K[:2])
    context = p.request("reader")
    p.gates["a"].shut()
    order = p.load(context, K[:2], start=5)
    p.gates["a"].wait_for("read").release([outcome, outcome])
    p.gates["a"].open()
    carried = p.wait(order)
    assert carried.whole
    assert all(holds(p.rows[5 + place], K[place]) for place in range(2))


def test_what_no_tier_has_any_more_ends_at_once(pool):
    p = pool({"name": "a"})
    context = p.request("reader")
    carried = p.wait(p.load(context, K[:2]))
    assert not carried.whole and carried.good == ()
    assert p.tiers.lookup(K[0], context) is LookupResult.MISS


def test_a_promotion_fills_the_tiers_above(pool):
    p = pool({"name": "a"}, {"name": "b"})
    p.gates["a"].shut()
    context = p.request("writer")
    order = p.store(context, K[:2])
    p.gates["a"].wait_for("write").release([Outcome.failed(TierUnavailable("injected"))] * 2)
    assert not p.wait(order).whole
    p.gates["a"].open()
    context = p.request("reader")
    p.wait(p.load(context, K[:2], start=5))
    wanted = p.tiers.take_wanted()
    assert list(wanted) == K[:2] and not p.tiers.has_wanted
    p.orders += 1
    p.tiers.fill(p.orders, {K[0]: 5}, wanted)
    assert p.wait(p.orders).chunks == 1
    assert p.held("a") == 1


def test_a_store_that_did_not_happen_is_wanted_when_its_chunk_is_used(pool):
    p = pool({"name": "a", "queue": 0.1}, slots=20)
    p.gates["a"].shut()
    context = p.request("writer")
    first = p.store(context, K[:5])
    p.gates["a"].open()
    assert not p.wait(first).whole
    assert p.held("a") == 2  # a tenth of the pool
    p.tiers.touch(K[:5], context)
    wanted = p.tiers.take_wanted()
    assert sorted(wanted) == sorted(K[2:5])
    assert p.tiers.get_stats().tiers[0].shed == 3


def test_stores_use_at_most_half_of_the_pool(pool):
    p = pool({"name": "a"}, slots=8)
    p.gates["a"].shut()
    context = p.request("writer")
    order = p.store(context, K[:6])
    p.gates["a"].open()
    assert not p.wait(order).whole
    assert p.held("a") == 4


def test_a_shared_tier_is_asked_first(pool):
    p = pool({"name": "a"}, shared=("a",))
    context = p.request("reader")
    p.gates["a"].shut()
    assert p.tiers.lookup(K[0], context) is LookupResult.RETRY
    p.step()
    p.gates["a"].wait_for("exists").release([True])
    p.gates["a"].open()
    assert p.find(context, K[0]) is LookupResult.HIT


def test_nobody_is_told_to_wait_for_ever(pool):
    p = pool({"name": "a", "deadline": "1s"}, shared=("a",))
    context = p.request("reader")
    p.gates["a"].shut()
    for _ in range(20):
        p.tiers.lookup(K[0], context)
        p.step()
        p.clock.advance(0.5)
    assert p.tiers.lookup(K[0], context) is LookupResult.MISS


def test_a_request_may_name_the_tiers_that_serve_it(pool):
    p = pool({"name": "a"}, {"name": "b"})
    p.put(K[:1])
    nobody = p.request("nobody", load_from=frozenset())
    assert p.tiers.lookup(K[0], nobody) is LookupResult.MISS
    only_b = p.request("only b", load_from=frozenset({"b"}))
    assert p.tiers.lookup(K[0], only_b) is LookupResult.HIT
    p.wait(p.load(only_b, K[:1], start=5))
    assert holds(p.rows[5], K[0])
    assert not [call for call in p.gates["a"].calls if call.verb == "read"]


def test_draining_waits_without_a_limit_and_loses_no_report(pool):
    p = pool({"name": "a", "deadline": "1s", "concurrency": 1})
    p.gates["a"].shut()
    context = p.request("writer")
    orders = [p.store(context, K[place : place + 1], start=place) for place in range(4)]
    p.gates["a"].wait_for("write")
    p.clock.advance(100)
    ended = threading.Event()
    waiting = threading.Thread(target=lambda: (p.tiers.drain(), ended.set()))
    waiting.start()
    assert not ended.wait(0.2)
    p.gates["a"].open()
    waiting.join(HANG)
    assert ended.is_set()
    p.step()
    assert sorted(p.ended) == orders  # those that had not begun, too
    assert p.tiers.orders_under_way == 0


def test_a_reset_voids_the_tiers(pool):
    p = pool({"name": "a"}, {"name": "b"})
    p.put(K[:2])
    report = p.tiers.reset()
    assert report.ok and report.cleared == ("a", "b")
    context = p.request("reader")
    assert p.tiers.lookup(K[0], context) is LookupResult.MISS
    assert p.put(K[:2], "again").chunks == 4


def test_a_reset_of_the_pool_alone_keeps_them(pool):
    p = pool({"name": "a"}, reset_scope="primary")
    p.put(K[:2])
    assert p.tiers.reset().kept == ("a",)
    assert p.tiers.lookup(K[0], p.request("reader")) is LookupResult.HIT


def test_a_finished_request_leaves_nothing(pool):
    """Also where its transfers end after it, and where more come after it."""
    p = pool({"name": "a"})
    p.put(K[:2])
    p.gates["a"].shut()
    context = p.request("reader")
    order = p.load(context, K[:1], start=5)
    p.gates["a"].wait_for("read")
    p.tiers.on_request_finished(context)
    late = p.load(context, K[1:2], start=6)
    assert p.tiers.requests_known == 1
    p.gates["a"].open()
    assert p.wait(order).whole and p.wait(late).whole
    assert p.tiers.requests_known == p.tiers.orders_under_way == 0
    p.tiers.on_request_finished(context)
    assert p.tiers.lookup(K[0], context) is LookupResult.MISS


def test_what_is_not_worth_keeping_is_not_written(pool):
    p = pool({"name": "a", "admit_after": 2})
    low = p.request("low", kv_transfer_params={"kvcascade": {"priority": "low"}})
    high = p.request("high", kv_transfer_params={"kvcascade": {"priority": "high"}})
    assert p.wait(p.store(low, K[:1])).chunks == 0
    assert p.wait(p.store(high, K[1:2])).chunks == 1
    assert p.wait(p.store(p.request("normal"), K[2:3])).chunks == 0


def test_events_tell_what_each_tier_holds(pool):
    p = pool({"name": "a"}, {"name": "b"})
    p.put(K[:2])
    told = {(event.tier, event.keys, event.removed) for event in p.tiers.take_events()}
    assert told == {("a", tuple(K[:2]), False), ("b", tuple(K[:2]), False)}


def test_closing_says_where_the_memory_is_still_in_use(pool):
    p = pool({"name": "a"})
    p.put(K[:1])
    p.gates["a"].shut()
    p.load(p.request("reader"), K[:1])
    call = p.gates["a"].wait_for("read")
    with pytest.raises(KVCascadeError, match="still use the pool"):
        p.tiers.close(timeout=0.05)
    call.release()
    p.tiers.close()
    with pytest.raises(ClosedError):
        p.load(p.request("late"), K[:1])


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ([], "none below 'host'"),
        ([{"name": "a", "write": "on_evict"}], r"tiers\[1\].write: 'on_evict' needs slots of our own"),
    ],
)
def test_what_can_not_stand_there_is_refused(pool, tiers, message):
    with pytest.raises(ConfigError, match=message):
        pool(*tiers)
