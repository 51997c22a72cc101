import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.replay.simulate import POLICIES, lru, optimal
from kvcascade.replay.trace import BUNDLED, Trace

# From the notice beside the traces: capacity in percent of the distinct chunks -> LRU, offline optimum; ARC.
TABLE = {
    "conversation": {1: (0.0525, 0.2464), 5: (0.1958, 0.3664), 10: (0.2789, 0.3664), 20: (0.3453, 0.3664)},
    "synthetic": {5: (0.1566, 0.3956), 10: (0.2623, 0.5063), 20: (0.3931, 0.6080)},
}
ARC = {
    "conversation": {1: 0.0649, 5: 0.2122, 10: 0.2841, 20: 0.3201},
    "synthetic": {5: 0.1621, 10: 0.2651, 20: 0.4081},
}
INFINITE = {"conversation": 0.3664, "synthetic": 0.6396}


@pytest.fixture(scope="module")
def prompts():
    return {name: [request.hash_ids for request in Trace(name)] for name in BUNDLED}


@pytest.mark.parametrize(("name", "percent"), [(name, percent) for name in TABLE for percent in TABLE[name]])
def test_the_published_table_is_reproduced(prompts, name, percent):
    capacity = len({chunk for prompt in prompts[name] for chunk in prompt}) * percent // 100
    found = (lru(prompts[name], capacity).rate, optimal(prompts[name], capacity).rate)
    assert found == pytest.approx(TABLE[name][percent], abs=0.0001)


@pytest.mark.parametrize(("name", "percent"), [(name, percent) for name in ARC for percent in ARC[name]])
def test_arc_finds_what_was_published(prompts, name, percent):
    capacity = len({chunk for prompt in prompts[name] for chunk in prompt}) * percent // 100
    assert POLICIES["arc"](prompts[name], capacity).rate == pytest.approx(ARC[name][percent], abs=0.01)


@pytest.mark.parametrize("name", INFINITE)
def test_an_infinite_cache_finds_what_was_published(prompts, name):
    rates = [policy(prompts[name], None).rate for policy in POLICIES.values()]
    assert rates == pytest.approx([INFINITE[name]] * len(POLICIES), abs=0.0001)


def test_the_deepest_chunk_of_a_prompt_goes_first():
    # The cache keeps 1, 2 of the first prompt: the second finds its head.
    assert lru([(1, 2, 3), (1, 2, 3)], 2).hits == 2


def test_only_a_leading_chunk_is_a_hit():
    # 3 is evicted by nothing, but its head is: what remains of a prompt without its head is not found.
    assert lru([(1, 2), (3, 4), (9, 2)], 4).hits == 0


def test_the_optimum_keeps_what_comes_back_soonest():
    assert optimal([(1,), (2,), (3,), (1,), (2,)], 2).hits == 2
    assert lru([(1,), (2,), (3,), (1,), (2,)], 2).hits == 0


def test_the_optimum_keeps_what_it_wants_of_a_prompt_larger_than_the_cache():
    assert optimal([(1, 2, 3, 4), (1, 2), (1, 2, 3, 4)], 2).hits == 4


def trees():
    """Prompts whose equal ids are equal prefixes, as in a trace: ids are prefixes, numbered."""
    paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=30)
    return paths.map(_number)


def _number(paths):
    ids = {}
    return [
        tuple(ids.setdefault(tuple(path[: depth + 1]), len(ids)) for depth in range(len(path))) for path in paths
    ]


@given(trees(), st.integers(1, 12))
def test_nothing_beats_the_optimum(prompts, capacity):
    found = optimal(prompts, capacity).hits
    assert lru(prompts, capacity).hits <= found <= lru(prompts, None).hits


@given(trees(), st.integers(1, 6))
def test_the_optimum_is_that_of_trying_everything(prompts, capacity):
    """Belady's rule is optimal for a tree of prefixes: no choice of what to keep finds more."""
    prompts = prompts[:5]
    assert optimal(prompts, capacity).hits == _best(prompts, capacity)


def _best(prompts, capacity):
    states = {frozenset(): 0}
    for prompt in prompts:
        after = {}
        for cached, hits in states.items():
            hits += next((place for place, chunk in enumerate(prompt) if chunk not in cached), len(prompt))
            for kept in _prefix_sets(cached | set(prompt), prompts, capacity):
                after[kept] = max(after.get(kept, 0), hits)
        states = after
    return max(states.values())


def _prefix_sets(chunks, prompts, capacity):
    """The sets of at most `capacity` chunks that hold each chunk together with its head."""
    parent = {
        chunk: prompt[place - 1] if place else None for prompt in prompts for place, chunk in enumerate(prompt)
    }
    found = {frozenset()}
    frontier = found
    for _ in range(capacity):
        frontier = {
            kept | {chunk}
            for kept in frontier
            for chunk in chunks - kept
            if parent[chunk] is None or parent[chunk] in kept
        }
        found = found | frontier
    return found
