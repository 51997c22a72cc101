"""What is stored and what is looked for follow from one another, for groups of any kind."""

from collections.abc import Sequence
from math import lcm
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcascade.connector import NO_BLOCK, GroupSpec
from kvcascade.connector.coverage import first_needed_block, hit_unit, needed_chunks, storable
from kvcascade.connector.lookup import Lookup
from kvcascade.connector.plans import plan_store
from kvcascade.connector.requests import RequestState
from kvcascade.types import LookupResult, RequestContext


@st.composite
def specs(draw: st.DrawFn) -> list[GroupSpec]:
    """One to three groups, of which the first has full attention more often than not."""
    return [
        GroupSpec(
            tokens_per_block=draw(st.sampled_from([1, 2, 4])) * 2,
            blocks_per_chunk=draw(st.sampled_from([1, 2, 4])),
            window=draw(st.sampled_from([None, 2, 3, 7, 8, 9, 20])) if index or draw(st.booleans()) else None,
            draft=draw(st.booleans()),
            index=index,
        )
        for index in range(draw(st.integers(1, 3)))
    ]


def state(groups: Sequence[GroupSpec], prompt: int) -> RequestState:
    request: Any = SimpleNamespace(
        request_id="r",
        num_tokens=prompt,
        num_prompt_tokens=prompt,
        num_computed_tokens=0,
        block_hashes=[end.to_bytes(4, "big") for end in range(2, prompt + 1, 2)],
        status=SimpleNamespace(name="RUNNING"),
        is_finished=lambda: False,
    )
    made = RequestState(request, RequestContext("r"), groups, 2, prompt_only=False)
    made.take_keys()
    return made


def store_token_by_token(groups: Sequence[GroupSpec], prompt: int) -> dict[bytes, tuple[int, ...]]:
    """Key -> the blocks of its chunk when it was stored, by a request that computes one token a step while its
    windows let go of what they have passed. A block's id is its place, plus 1."""
    made, stored = state(groups, prompt), {}
    for computed in range(prompt):
        made.request.num_computed_tokens = computed  # type: ignore[misc]
        for group in made.groups:
            if len(group.blocks) * group.spec.tokens_per_block <= computed:
                group.blocks.append(len(group.blocks) + 1)
            passed = max(0, computed - (group.spec.window or prompt) + 1) // group.spec.tokens_per_block
            group.blocks[:passed] = [NO_BLOCK] * passed
        plan = plan_store(made, 1, hit_unit(groups), lambda key: False)
        for key, place in plan.wanted.items():
            group, size = made.groups[place.group], groups[place.group].blocks_per_chunk
            stored[key] = tuple(group.blocks[place.chunk * size : (place.chunk + 1) * size])
        for group, end in zip(made.groups, plan.ends, strict=True):
            group.cursor = max(group.cursor, end)
    return stored


class Answers:
    """A manager that knows these keys."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys

    def lookup(self, key: bytes, ctx: RequestContext) -> LookupResult:
        return LookupResult.HIT if key in self.keys else LookupResult.MISS


@settings(max_examples=400, deadline=None)
@given(groups=specs(), stored=st.integers(1, 80), asked=st.integers(1, 90), own=st.integers(0, 6), data=st.data())
def test_a_hit_reads_only_blocks_that_were_stored(
    groups: list[GroupSpec], stored: int, asked: int, own: int, data: st.DataObject
) -> None:
    chunks = store_token_by_token(groups, stored)
    lost = data.draw(st.sets(st.sampled_from(sorted(chunks)), max_size=3)) if chunks else set()
    manager: Any = Answers({key: blocks for key, blocks in chunks.items() if key not in lost})
    made = state(groups, asked)
    made.local = min(own * lcm(*(group.tokens_per_block for group in groups)), asked)
    boundary = Lookup(manager, groups).boundary(made)
    assert boundary is not None and made.local <= boundary <= asked
    if boundary == made.local:
        return
    for group in made.groups:
        spec = group.spec
        first = made.local if spec.window is None else max(made.local, boundary - spec.window + 1)
        for block in range(first // spec.tokens_per_block, -(-boundary // spec.tokens_per_block)):
            chunk, place = divmod(block, spec.blocks_per_chunk)
            assert manager.keys[group.keys[chunk]][place] == block + 1


@settings(max_examples=400, deadline=None)
@given(groups=specs(), prompt=st.integers(1, 90))
def test_what_was_stored_is_found_again(groups: list[GroupSpec], prompt: int) -> None:
    """vllm-project/vllm#52735: whatever is not stored is not needed. The same prompt hits to its last common
    chunk, less one where a draft model's tail is in doubt."""
    manager: Any = Answers(store_token_by_token(groups, prompt))
    whole = lcm(*(group.tokens_per_chunk for group in groups))
    expected = (prompt - 1) // whole * whole - (whole if any(group.draft for group in groups) else 0)
    found = Lookup(manager, groups).boundary(state(groups, prompt))
    assert found is not None and found >= min(expected, prompt)


def test_no_hit_ends_inside_a_windows_chunk_of_several_blocks() -> None:
    """The window let go of the chunk's first block before the chunk was full: nothing right is in its place."""
    groups = [GroupSpec(2), GroupSpec(2, blocks_per_chunk=2, window=2, index=1)]
    chunks = store_token_by_token(groups, 8)
    asked = state(groups, 9)
    assert chunks[asked.groups[1].keys[1]] == (NO_BLOCK, 4)
    del chunks[asked.groups[0].keys[3]]
    manager: Any = Answers(chunks)
    assert Lookup(manager, groups).boundary(asked) == 4


@pytest.mark.parametrize(
    ("tokens", "blocks", "keys", "hold_back", "expected"),
    [(24, 4, 5, False, 4), (24, 6, 5, False, 5), (23, 6, 6, False, 5), (24, 6, 6, True, 5), (3, 6, 6, True, 0)],
)
def test_the_least_of_tokens_blocks_and_keys(
    tokens: int, blocks: int, keys: int, hold_back: bool, expected: int
) -> None:
    """vllm-project/vllm#52170."""
    assert storable(GroupSpec(4), tokens, blocks, keys, hold_back) == expected


def test_only_what_a_hit_reads_is_needed() -> None:
    full, window = GroupSpec(4, blocks_per_chunk=8), GroupSpec(4, window=8, index=1)
    unit = hit_unit([full, window])
    assert unit == 32
    needed = [chunk for chunk in range(16) if first_needed_block(window, chunk, unit) == 0]
    assert needed == [6, 7, 14, 15]
    assert needed_chunks(window, 0, 32) == range(6, 8) and needed_chunks(full, 0, 31) == range(1)
