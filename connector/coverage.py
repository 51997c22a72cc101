"""Which chunks: what may be stored, and what a request that goes on at some token reads. No state, no engine.

A hit ends at a multiple of the `unit`, the smallest step that all groups allow, or one token before (the engine
computes the last token of a prompt again). Stores and lookups both follow from that: what is stored is what is
looked for.
"""

from collections.abc import Sequence
from math import gcd, lcm

from .groups import GroupSpec
from .protocols import Request

__all__ = ["first_needed_block", "hit_unit", "needed_chunks", "storable", "written_tokens"]

_NORMAL_ENDS = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION"}


def written_tokens(request: Request, scheduled: int) -> int:
    """Leading tokens whose KV is right after this step, in which `scheduled` tokens of the request are computed.

    Only known tokens count, no drafts and no placeholders. At a normal end the last sampled token has no KV (its
    slot may hold a rejected draft's); at any other end only what was computed is certain.
    """
    if not request.is_finished():
        return min(request.num_computed_tokens + scheduled, request.num_tokens)
    if request.status.name in _NORMAL_ENDS:
        return max(request.num_prompt_tokens, request.num_tokens - 1)
    return min(request.num_computed_tokens, request.num_tokens)


def storable(group: GroupSpec, tokens: int, blocks: int, keys: int, hold_back: bool = False) -> int:
    """How many leading chunks of a group can be stored, with `tokens` written, `blocks` allocated and `keys`
    known. `hold_back`: the trailing one may still be written again."""
    full = tokens // group.tokens_per_chunk - hold_back
    return max(0, min(full, blocks // group.blocks_per_chunk, keys))


def hit_unit(groups: Sequence[GroupSpec]) -> int:
    """Hits end at multiples of so many tokens: where some chunk of full attention ends, but never inside a
    window's chunk of several blocks, whose first blocks may have been let go of before it was full."""
    full = [group.tokens_per_chunk for group in groups if group.window is None]
    windows = [group.tokens_per_chunk for group in groups if group.window and group.blocks_per_chunk > 1]
    return lcm(gcd(*(full or [group.tokens_per_chunk for group in groups])), *windows)


def needed_chunks(group: GroupSpec, local: int, boundary: int, margin: int = 0) -> range:
    """The chunks that a request reads which has `local` tokens and goes on at token `boundary`; and those in
    `margin` tokens after it."""
    first = local if group.window is None else max(local, boundary - group.window + 1)
    return range(first // group.tokens_per_chunk, -(-(boundary + margin) // group.tokens_per_chunk))


def first_needed_block(group: GroupSpec, chunk: int, unit: int) -> int:
    """Place in the chunk of the first block that any hit reads; `blocks_per_chunk` where none needs the chunk."""
    if group.window is None:
        return 0
    start = chunk * group.tokens_per_chunk
    before = start // unit * unit
    first = max(0, before + unit - group.window - start) // group.tokens_per_block
    if group.draft and 0 < before > start - group.tokens_per_chunk:
        first = min(first, group.blocks_per_chunk - 1)  # a hit that ends before the chunk asks whether it is there
    return min(first, group.blocks_per_chunk)
