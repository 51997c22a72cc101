"""The player against the smallest thing that has the verbs, scripted to answer what a real stack rarely does."""

from types import SimpleNamespace

import pytest

from kvcascade.replay import runner
from kvcascade.replay.content import Content, WrongBytesError
from kvcascade.replay.runner import Player, StuckError
from kvcascade.replay.simulate import lru
from kvcascade.replay.trace import Request
from kvcascade.types import PrefixMatch, StoreOffer

CHUNK = 64


class PlainStack:
    """Keeps everything in memory, without bound, and checks that the verbs come as their contracts say."""

    def __init__(self):
        self.chunks = {}
        self.transfers = {}
        self.active = set()
        self.verbs = []
        self.pending = {}
        self.refusals = 0
        self.moves = self.begins = 0
        self.work = 0
        self.steps = 0
        self.pool = SimpleNamespace(slot=lambda slot: memoryview(self.slots[slot]))
        self.slots = []

    def on_new_request(self, ctx):
        assert ctx.req_id not in self.active
        self.active.add(ctx.req_id)

    def match_prefix(self, keys, ctx):
        assert ctx.req_id in self.active
        self.verbs.append(("match", ctx.req_id, len(keys)))
        if self.pending.get(ctx.req_id, 0):
            self.pending[ctx.req_id] -= 1
            return PrefixMatch(0, True)
        return PrefixMatch(next((n for n, key in enumerate(keys) if key not in self.chunks), len(keys)), False)

    def touch(self, keys, ctx):
        assert ctx.req_id in self.active
        self.verbs.append(("touch", ctx.req_id, len(keys)))

    def prepare_load(self, keys, ctx):
        assert all(key in self.chunks for key in keys)
        self.verbs.append(("load", ctx.req_id, len(keys)))
        self.transfers[ctx.req_id] = list(keys)
        return [self.chunks[key] for key in keys]

    def complete_load(self, keys, ctx, success=True):
        assert self.transfers.pop(ctx.req_id) == list(keys)

    def prepare_store(self, keys, ctx):
        self.verbs.append(("store", ctx.req_id, len(keys)))
        if self.refusals:
            self.refusals -= 1
            self.moves = self.begins
            return None
        busy = {key for keys in self.transfers.values() for key in keys}
        new = [key for key in keys if key not in self.chunks and key not in busy]
        first = len(self.slots)
        self.slots += [bytearray(CHUNK) for _ in new]
        slots = list(range(first, first + len(new)))
        self.transfers[ctx.req_id] = new
        self.granted = dict(getattr(self, "granted", {}), **{ctx.req_id: slots})
        return StoreOffer(new, slots, [])

    def complete_store(self, keys, ctx, success=True):
        assert self.transfers.pop(ctx.req_id) == list(keys)
        self.chunks |= zip(keys, self.granted[ctx.req_id], strict=True)
        self.work = 3

    def on_request_finished(self, ctx):
        self.transfers = {req_id: keys for req_id, keys in self.transfers.items() if keys}
        assert ctx.req_id not in self.transfers
        self.active.remove(ctx.req_id)

    def on_schedule_end(self):
        self.steps += 1
        self.work = max(0, self.work - 1)
        self.moves = max(0, self.moves - 1)

    @property
    def jobs_under_way(self):
        return self.work + self.moves

    def has_pending_work(self):
        return self.work > 0


def request(*ids, tokens=None):
    return Request(0, tokens or 512 * len(ids), 10, ids)


def play(requests, stack=None, **how):
    stack = stack or PlainStack()
    player = Player(stack, Content(), **how)
    player.play(requests)
    assert not stack.active
    assert not any(stack.transfers.values())
    return player.tally, stack


PROMPTS = [
    request(1, 2, 3),
    request(1, 2, 4),
    request(1, 2, 3, 5, tokens=1700),
    request(*range(10, 60)),
    request(1),
]


@pytest.mark.parametrize("concurrency", [1, 2, 8])
def test_hits_are_those_of_an_infinite_cache(concurrency):
    tally, _ = play(PROMPTS, concurrency=concurrency)
    assert tally.requests == len(PROMPTS)
    assert tally.chunks == sum(len(each.hash_ids) for each in PROMPTS)
    assert tally.prompt_tokens == sum(each.input_length for each in PROMPTS)
    assert tally.stored == len({chunk for each in PROMPTS for chunk in each.hash_ids})
    if concurrency == 1:
        assert tally.loaded == lru([each.hash_ids for each in PROMPTS], None).hits


def test_tokens_without_prefill_count_the_partial_last_chunk_with_its_own():
    tally, _ = play([request(1, 2, tokens=600), request(1, 2, tokens=600)])
    assert (tally.prompt_tokens, tally.cached_tokens) == (1200, 600)


def test_the_verbs_come_in_the_order_of_an_engines():
    _, stack = play([request(*range(20)), request(*range(5), 99)])
    assert stack.verbs == [
        ("touch", "0", 0),
        ("match", "0", 20),
        ("touch", "0", 0),
        ("store", "0", 16),
        ("touch", "0", 16),
        ("store", "0", 4),
        ("touch", "0", 20),
        ("touch", "1", 0),
        ("match", "1", 6),
        ("touch", "1", 5),
        ("load", "1", 5),
        ("store", "1", 1),
        ("touch", "1", 6),
    ]


def test_no_step_begins_before_the_io_of_the_last_has_ended():
    _, stack = play([request(1)])
    assert stack.work == 0
    assert stack.steps >= 3


def test_a_pending_lookup_is_asked_again_in_a_later_step():
    stack = PlainStack()
    stack.pending = {"1": 2}
    tally, stack = play([request(1), request(1)], stack)
    assert tally.loaded == 1
    assert [verb for verb in stack.verbs if verb[:2] == ("match", "1")] == [("match", "1", 1)] * 3


def test_a_refused_portion_is_offered_once_more():
    stack = PlainStack()
    stack.refusals = 1
    tally, _ = play([request(*range(40))], stack)
    assert (tally.stored, tally.refused) == (40, 0)


def test_a_portion_is_offered_for_as_long_as_the_stack_makes_room_and_not_for_ever():
    stack = PlainStack()
    stack.refusals, stack.begins = 20, 5
    tally, _ = play([request(*range(40))], stack)
    assert (tally.stored, tally.refused) == (40, 0)
    assert stack.steps > 20 * 5, "the moves have ended before each offer"
    stack.refusals = 10**9
    tally, _ = play([request(*range(50, 90))], stack)
    assert (tally.stored, tally.refused) == (0, 40)


def test_a_portion_that_is_refused_twice_leaves_no_gap_in_the_prefix():
    stack = PlainStack()
    stack.refusals = 2
    tally, stack = play([request(*range(40)), request(*range(40))], stack)
    assert (tally.loaded, tally.stored, tally.refused) == (0, 40, 40)
    assert tally.requests == 2


def test_the_gpu_cache_answers_first_and_its_chunks_are_still_offered():
    stack = PlainStack()
    tally, stack = play([request(1, 2, 3), request(1, 2, 4), request(1, 2, 4)], stack, gpu_chunks=3)
    assert (tally.gpu_hits, tally.loaded) == (5, 0)
    assert [verb[2] for verb in stack.verbs if verb[0] == "match"] == [3, 1]
    assert [verb[2] for verb in stack.verbs if verb[0] == "store"] == [3, 3, 3]


def test_a_wrong_byte_ends_the_replay_at_once():
    stack = PlainStack()
    play([request(1, 2)], stack)
    stack.slots[1][17] ^= 4
    with pytest.raises(WrongBytesError, match="1 of 64 bytes are wrong, the first at offset 17"):
        Player(stack, Content()).play([request(1, 2, 3)])


def test_a_stack_that_hangs_is_said(monkeypatch):
    monkeypatch.setattr(runner, "_PATIENCE", 0.05)
    stack = PlainStack()
    stack.pending = {"0": 10**9}
    with pytest.raises(StuckError, match="request 0 waits for its lookup"):
        Player(stack, Content()).play([request(1)])
    stack = PlainStack()
    stack.has_pending_work = lambda: True
    with pytest.raises(StuckError, match="has_pending_work stays true"):
        Player(stack, Content()).play([request(1)])


@pytest.mark.parametrize("actions", range(12))
@pytest.mark.parametrize("concurrency", [1, 3])
def test_stopped_at_any_point_no_transfer_stays_open(actions, concurrency):
    asked = iter(range(10**9))
    stack = PlainStack()
    play([request(1, 2)], stack)
    stack.pending = {"2": 3}
    tally, _ = play(
        [request(1, 2, *range(9, 50)) for _ in range(5)],
        stack,
        concurrency=concurrency,
        stopped=lambda: next(asked) >= actions,
    )
    assert tally.requests < 5
