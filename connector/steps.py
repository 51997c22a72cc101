"""What a planned step says: whether it can be, and which blocks belong to whom after it."""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from kvcascade.errors import ProtocolError

from .fences import Fences
from .groups import GroupSpec
from .jobs import JobTable
from .protocols import StepOutput
from .requests import RequestState

__all__ = ["check_step", "follow_blocks"]

_Tables: TypeAlias = Sequence[Sequence[int]]
"""Blocks, for each group of the engine."""


def check_step(
    step: StepOutput,
    groups: Sequence[GroupSpec],
    running: Mapping[str, RequestState],
    finishing: Collection[str],
    finalised: Collection[str],
    jobs: JobTable,
) -> None:
    """Of a step that breaks the protocol nothing is taken over.

    Args:
        running: the requests that have not finished.
        finishing: those that have since the step before.
        finalised: names of such as were over before this step, which may be in use again.

    Raises:
        ProtocolError: what was expected instead.
    """
    given = _given_blocks(step)
    listed = step.finished_req_ids or ()
    for name in finishing:
        if name not in listed:
            raise ProtocolError(
                f"build_connector_meta: {name!r} has finished; it was expected in finished_req_ids, before its "
                f"blocks are given to others"
            )
    for name in listed:
        if name in running and name not in finalised:
            raise ProtocolError(
                f"build_connector_meta: {name!r} is listed as finished; request_finished must come before"
            )
    for name in (*given, *step.num_scheduled_tokens):
        state = running.get(name)
        if state is None:
            raise ProtocolError(f"build_connector_meta: {name!r} is not running; on_new_request must come before")
        if jobs.load_of(state):
            raise ProtocolError(f"build_connector_meta: {name!r} is scheduled, but its load has not ended")
    for name, blocks in given.items():
        if blocks is not None:
            _check_blocks(groups, blocks, name)
    preempted = step.preempted_req_ids or ()
    for name in step.num_scheduled_tokens:
        if name not in given and (name in preempted or not running[name].has_blocks):
            raise ProtocolError(
                f"build_connector_meta: {name!r} is scheduled and has no blocks; it was expected in "
                f"scheduled_new_reqs or scheduled_cached_reqs"
            )


def follow_blocks(
    step: StepOutput,
    running: Mapping[str, RequestState],
    finishing: Mapping[str, RequestState],
    fences: Fences,
) -> None:
    """Takes over which blocks belong to whom.

    Args:
        finishing: the requests that have finished since the step before.
    """
    for name in step.preempted_req_ids or ():
        preempted = running.get(name) or finishing.get(name)
        if preempted:
            preempted.drop_blocks()
    grown = {}
    for new in step.scheduled_new_reqs:
        grown[new.req_id] = _replace_blocks(running[new.req_id], new.block_ids, new.num_computed_tokens, fences)
    cached = step.scheduled_cached_reqs
    for name, blocks, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if blocks is None:
            continue
        if name in cached.resumed_req_ids:
            grown[name] = _replace_blocks(running[name], blocks, computed, fences)
        else:
            grown[name] = _add_blocks(running[name], blocks, fences)
    fences.hand_out(copied.dst_block_id for copied in getattr(step, "kv_cache_block_copies", None) or ())
    _disown(running, grown, fences.allocated)


def _given_blocks(step: StepOutput) -> dict[str, _Tables | None]:
    """The requests that a step lists, with the blocks that it gives to them; None for none."""
    cached = step.scheduled_cached_reqs
    lengths = [len(cached.req_ids), len(cached.new_block_ids), len(cached.num_computed_tokens)]
    if len(set(lengths)) > 1:
        raise ProtocolError(
            f"build_connector_meta: req_ids, new_block_ids and num_computed_tokens of scheduled_cached_reqs have "
            f"{lengths} entries; one for each request was expected in each"
        )
    given: dict[str, _Tables | None] = {new.req_id: new.block_ids for new in step.scheduled_new_reqs}
    for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
        given[name] = () if blocks is None and name in cached.resumed_req_ids else blocks
    return given


def _check_blocks(groups: Sequence[GroupSpec], blocks: _Tables, name: str) -> None:
    for group in groups:
        if group.index >= len(blocks):
            raise ProtocolError(
                f"build_connector_meta: request {name!r} has block lists of {len(blocks)} groups; group "
                f"{group.index} was expected among them"
            )


def _replace_blocks(state: RequestState, blocks: _Tables, computed: int, fences: Fences) -> list[int]:
    """All blocks of a request. Those of its `computed` tokens hold them already; the others will be written."""
    state.drop_blocks()
    for group in state.groups:
        group.blocks += blocks[group.spec.index]
        fences.hand_out(group.blocks[computed // group.spec.tokens_per_block :])
    return [0 for _ in state.groups]


def _add_blocks(state: RequestState, blocks: _Tables, fences: Fences) -> list[int]:
    """More blocks of a request. Returns how many it had, for each group."""
    had = [len(group.blocks) for group in state.groups]
    for group in state.groups:
        new = blocks[group.spec.index]
        group.blocks += new
        fences.hand_out(new)
    return had


def _disown(running: Mapping[str, RequestState], grown: Mapping[str, list[int]], allocated: set[int]) -> None:
    """Blocks that a sliding window has released and somebody has been given in this step hold nothing of their
    former request any more. `grown`: request -> how many blocks it had before this step, for each group."""
    if not allocated:
        return
    for name, state in running.items():
        for number, group in enumerate(state.groups):
            if group.spec.window is not None:
                group.disown(allocated, grown[name][number] if name in grown else len(group.blocks))
