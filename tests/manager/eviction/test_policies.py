"""What every policy keeps to, and what each is known for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcascade.configs.registry import EVICTION, known, resolve
from kvcascade.manager.eviction.arc import ArcPolicy
from kvcascade.manager.eviction.lhd import LhdPolicy
from kvcascade.manager.eviction.lru import LruPolicy
from kvcascade.manager.eviction.s3fifo import S3FifoPolicy

POLICIES = [LruPolicy, ArcPolicy, S3FifoPolicy, LhdPolicy]


def nobody(entry):
    return False


def key(number):
    return number.to_bytes(36, "big")


class World:
    """A tier of few entries: what its policy is told, and what must hold."""

    def __init__(self, policy, capacity):
        self.policy = policy(capacity)
        self.capacity = capacity
        self.keys = {}
        self.busy = set()
        self.asked = []

    def store(self, numbers, request):
        """Room for these, tail first, as far as it can be made; then one request uses them."""
        new = [number for number in numbers if key(number) not in self.keys.values()]
        victims = self.victims(len(new) + len(self.keys) - self.capacity)
        self.policy.evict(victims)
        for entry in victims:
            del self.keys[entry]
        for number in reversed(new):
            free = next((entry for entry in range(self.capacity) if entry not in self.keys), None)
            if free is not None:
                self.keys[free] = key(number)
                self.policy.insert([free], [key(number)])
        self.use(numbers, request)

    def use(self, numbers, request):
        entries = {held: entry for entry, held in self.keys.items()}
        self.policy.touch([entries[key(each)] for each in reversed(numbers) if key(each) in entries], request)

    def victims(self, count):
        self.asked.clear()
        found = self.policy.victims(max(0, count), self.is_busy)
        assert len(found) == len(set(found)) and set(found) <= self.keys.keys() - self.busy
        idle = len(self.keys) - len(self.busy)
        assert len(found) == min(max(0, count), idle), "as many as there are"
        return found

    def is_busy(self, entry):
        self.asked.append(entry)
        return entry in self.busy

    def release(self):
        while self.busy:
            self.policy.release(self.busy.pop())

    def drop(self, entry):
        if entry in self.keys:
            self.busy.discard(entry)
            self.policy.remove(entry)
            del self.keys[entry]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True)),
        st.tuples(st.just("use"), st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True)),
        st.tuples(st.just("drop"), st.integers(0, 7)),
        st.tuples(st.just("busy"), st.sets(st.integers(0, 7), max_size=8)),
        st.tuples(st.just("look"), st.integers(1, 9)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS, hint=st.sampled_from([0, 1, 8, 100]))
def test_victims_are_there_not_busy_and_as_many_as_asked_for(policy, steps, hint):
    world = World(policy, 8)
    world.policy = policy(hint)
    for request, (name, what) in enumerate(steps, 1):
        if name == "store":
            world.store(what, request)
        elif name == "use":
            world.use(what, request)
        elif name == "drop":
            world.drop(what)
        elif name == "busy":
            world.release()
            world.busy = what & world.keys.keys()
        else:
            found = world.victims(what)
            assert policy is S3FifoPolicy or world.victims(what) == found, "looking changes nothing"
    world.release()
    assert sorted(world.victims(9)) == sorted(world.keys)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_tail_of_a_prompt_goes_before_its_head(policy):
    """vllm-project/vllm#55461"""
    world = World(policy, 4)
    world.store([0, 1, 2, 3], 1)
    assert [world.keys[entry] for entry in world.victims(2)] == [key(3), key(2)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_busy_entry_is_passed_over_once(policy):
    world = World(policy, 100)
    world.store(range(100), 1)
    order = world.victims(100)
    world.busy = set(order[:90])
    world.victims(1)
    for _ in range(5):
        assert world.victims(2) == order[90:92]
        assert len(world.asked) <= 3
    for entry in order[:90]:
        world.busy.discard(entry)
        world.policy.release(entry)
    assert world.victims(100) == order


@pytest.mark.parametrize("policy", POLICIES)
def test_entries_that_were_passed_over_keep_their_order_however_they_come_back(policy):
    world = World(policy, 30)
    world.store(range(30), 1)
    order = world.victims(30)
    for turn in range(3):
        world.busy = set(order[turn : 20 + turn])
        world.victims(4)
        for entry in (*order[10 : 20 + turn], *reversed(order[turn:10])):
            world.busy.discard(entry)
            world.policy.release(entry)
            world.policy.release(entry)
        assert world.victims(30) == order


@pytest.mark.parametrize("policy", POLICIES)
def test_a_used_entry_that_was_passed_over_is_found_again(policy):
    world = World(policy, 4)
    world.store(range(4), 1)
    world.busy = set(range(4))
    assert world.victims(1) == []
    world.use(range(4), 1)
    world.busy = set()
    assert len(world.victims(4)) == 4


@pytest.mark.parametrize("policy", [ArcPolicy, S3FifoPolicy, LhdPolicy])
def test_a_request_is_one_use_however_often_it_touches(policy):
    """vllm-project/vllm#51787: chunks that one request touches ten times are not those that are used again."""
    world = World(policy, 8)
    world.store([0, 1], 1)
    world.use([0, 1], 2)
    world.store([2, 3, 4, 5, 6, 7], 3)
    for _ in range(10):
        world.use([2, 3, 4, 5, 6, 7], 3)
        world.use([2, 3, 4, 5, 6, 7], 0)
    gone = {world.keys[entry] for entry in world.victims(5)}
    assert gone < {key(each) for each in range(2, 8)}


def test_touches_of_requests_in_turn_count_each_once():
    world = World(S3FifoPolicy, 20)
    world.store([0], 1)
    for _ in range(5):
        world.use([0], 2)
        world.use([0], 3)
    assert world.policy._turns[0] == 2


def test_recent_chunks_make_room_where_all_frequent_ones_are_busy():
    """vllm-project/vllm#51787: T2 is all pinned, T1 has 3 idle entries, and a request of 3 succeeds."""
    world = World(ArcPolicy, 6)
    world.store([0, 1, 2], 1)
    world.use([0, 1, 2], 2)
    world.store([3, 4, 5], 3)
    world.policy._target = 6.0  # it would rather take frequent ones
    frequent = [entry for entry, held in world.keys.items() if held in map(key, (0, 1, 2))]
    assert set(world.victims(3)) == set(frequent)
    world.busy = set(frequent)
    assert {world.keys[entry] for entry in world.victims(3)} == {key(3), key(4), key(5)}


@pytest.mark.parametrize("policy", [ArcPolicy, S3FifoPolicy])
def test_a_scan_leaves_what_was_used_again(policy):
    world = World(policy, 20)
    world.store([0, 1, 2, 3], 1)
    world.use([0, 1, 2, 3], 2)
    for number in range(100, 200, 4):
        world.store(range(number, number + 4), number)
    assert {key(each) for each in range(4)} <= set(world.keys.values())


def test_a_ghost_that_comes_back_is_kept_longer_than_what_is_new():
    world = World(S3FifoPolicy, 20)
    world.store(range(20), 1)
    world.store(range(20, 30), 2)
    gone = [number for number in range(20) if key(number) not in world.keys.values()]
    world.store(gone[:2], 3)
    for number in range(100, 160, 2):
        world.store([number, number + 1], number)
    assert {key(each) for each in gone[:2]} <= set(world.keys.values())


@pytest.mark.parametrize("policy", [ArcPolicy, S3FifoPolicy, LhdPolicy])
def test_what_is_remembered_of_those_that_went_is_bounded(policy):
    world = World(policy, 16)
    for number in range(0, 4000, 4):
        world.store(range(number, number + 4), number + 1)
    ghosts = world.policy._ghosts
    remembered = sum(
        key(number) in (ghosts._packed if policy is LhdPolicy else ghosts._ghosts) for number in range(4000)
    )
    assert 0 < remembered <= (8 if policy is LhdPolicy else 2) * 16


def test_a_tier_larger_than_the_hint_keeps_no_ghosts_of_arc():
    world = World(ArcPolicy, 64)
    world.policy = ArcPolicy(2)
    for number in range(0, 400, 4):
        world.store(range(number, number + 4), number + 1)
        assert min(world.policy._ghosts.sizes) == 0 == sum(world.policy._ghosts.sizes)


@pytest.mark.parametrize("policy", POLICIES)
def test_entries_beyond_the_hint_are_ordered_too(policy):
    world = World(policy, 64)
    world.policy = policy(2)
    world.store(range(64), 1)
    assert len(world.victims(64)) == 64


def test_all_policies_are_found_by_name():
    assert {name: resolve(EVICTION, name) for name in known(EVICTION)} == dict(
        zip(["lru", "arc", "s3fifo", "lhd"], POLICIES, strict=True)
    )
