"""What the adapter knows of each request."""

import logging
from collections.abc import Iterator, Sequence

from kvcascade.types import Key, RequestContext

from .coverage import needed_chunks, storable, written_tokens
from .groups import GroupSpec
from .protocols import NO_BLOCK, Request

__all__ = ["GroupState", "RequestState"]

_log = logging.getLogger(__name__)


class GroupState:
    """One request in one group: its keys and blocks, and how far it is stored."""

    __slots__ = ("_hashes_per_chunk", "_suffix", "blocks", "cursor", "keys", "spec")

    def __init__(self, spec: GroupSpec, tokens_per_hash: int) -> None:
        self.spec = spec
        self.keys: list[Key] = []
        """Of its chunks, as far as their hashes are known."""
        self.blocks: list[int] = []
        self.cursor = 0
        """Chunks before this one are stored, found there, or not wanted. Goes back by a reset only."""
        self._hashes_per_chunk = spec.tokens_per_chunk // tokens_per_hash
        self._suffix = spec.index.to_bytes(4, "big")

    def take_keys(self, hashes: Sequence[bytes]) -> None:
        """Takes over hashes that have become known; and those that the engine has replaced, from the end."""
        step = self._hashes_per_chunk
        while self.keys and not self._stands(self.keys[-1], hashes, len(self.keys) * step - 1):
            self.keys.pop()
        self.keys += [
            hashes[at] + self._suffix for at in range((len(self.keys) + 1) * step - 1, len(hashes), step)
        ]

    def disown(self, blocks: set[int], end: int) -> None:
        """Of the first `end` blocks, those not stored yet that are among `blocks` belong to somebody else now."""
        for place in range(self.cursor * self.spec.blocks_per_chunk, end):
            if self.blocks[place] in blocks:
                self.blocks[place] = NO_BLOCK

    def begin_again(self, computed: int) -> None:
        """All is to be offered again, but for what a sliding window has passed: those blocks may be somebody
        else's, which is followed for what is not stored only."""
        if self.spec.window is not None:
            passed = max(0, computed - self.spec.window + 1) // self.spec.tokens_per_block
            passed = min(passed, len(self.blocks))
            self.blocks[:passed] = [NO_BLOCK] * passed
        self.cursor = 0

    def skip_loaded(self, local: int, tokens: int) -> None:
        """The chunks from token `local` to `tokens` were found, and need not be offered; but where those before
        them have not been offered all are, since the manager may have lost the head that the engine still had."""
        size = self.spec.tokens_per_chunk
        if self.cursor >= local // size:
            self.cursor = max(self.cursor, -(-tokens // size))

    def _stands(self, key: Key, hashes: Sequence[bytes], at: int) -> bool:
        return at < len(hashes) and key[:-4] == hashes[at]


class RequestState:
    """One request, from `on_new_request` to its last job."""

    __slots__ = ("context", "groups", "jobs", "load_limit", "local", "matched", "max_load", "max_store", "request")

    def __init__(
        self,
        request: Request,
        context: RequestContext,
        groups: Sequence[GroupSpec],
        tokens_per_hash: int,
        prompt_only: bool,
    ) -> None:
        self.request = request
        self.context = context
        self.groups = tuple(GroupState(spec, tokens_per_hash) for spec in groups)
        self.jobs: set[int] = set()
        """Its jobs in flight: one load, or any number of stores."""
        self.local = 0
        """Tokens that the engine had of its own when it asked last."""
        self.matched = 0
        """Tokens that it was told it could load."""
        self.load_limit: int | None = None
        """A load has failed at this token: no load reaches beyond it again."""
        self.max_load = _cap(request, "max_load_tokens")
        """Tokens that it may load at most; None for any number."""
        self.max_store = _cap(request, "max_offload_tokens")
        """Leading tokens that may be stored; None for all."""
        if prompt_only:
            prompt = request.num_prompt_tokens
            self.max_store = prompt if self.max_store is None else min(prompt, self.max_store)

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def has_blocks(self) -> bool:
        return any(group.blocks for group in self.groups)

    def take_keys(self) -> None:
        for group in self.groups:
            group.take_keys(self.request.block_hashes)

    def drop_blocks(self) -> None:
        """Its blocks are not its own any more."""
        for group in self.groups:
            group.blocks.clear()

    def storable(self, scheduled: int) -> list[int]:
        """For each group, how many leading chunks can be stored after this step, in which `scheduled` tokens of it
        are computed. A draft model's newest chunk waits while the request decodes, since a rejected draft's tokens
        are written again."""
        tokens = written_tokens(self.request, scheduled)
        if self.max_store is not None:
            tokens = min(tokens, self.max_store)
        decoding = tokens > self.request.num_prompt_tokens and not self.request.is_finished()
        return [
            storable(group.spec, tokens, len(group.blocks), len(group.keys), group.spec.draft and decoding)
            for group in self.groups
        ]

    def needed_keys(self, boundary: int) -> Iterator[Key]:
        """The chunks that it reads if it goes on at that token, after its own."""
        if boundary > self.local:
            for group in self.groups:
                for chunk in needed_chunks(group.spec, self.local, boundary):
                    yield group.keys[chunk]

    def reset(self) -> None:
        """What was stored is void: it is offered again from the first chunk."""
        self.jobs.clear()
        self.matched = 0
        for group in self.groups:
            group.begin_again(self.request.num_computed_tokens)


def _cap(request: Request, name: str) -> int | None:
    """A bound that the client gave, which may be anything."""
    params = getattr(request, "kv_transfer_params", None)
    value = params.get(name) if isinstance(params, dict) else None
    if value is None or (type(value) is int and value >= 0):
        return value
    _log.warning(
        "request %s: %s=%.100r is ignored; an integer of at least 0 is allowed", request.request_id, name, value
    )
    return None
