"""A request, with the names that vLLM's has."""

from enum import Enum, auto
from hashlib import blake2b
from typing import Any

__all__ = ["SimRequest", "Status", "block_hash"]

_ROOT = b"the hash in front of the first block"


class Status(Enum):
    """Where a request stands."""

    WAITING = auto()
    LOADING = auto()
    """It has blocks, and waits for the connector to fill them."""
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_ABORTED = auto()


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    """The hash of a block: of its tokens and all before them."""
    return blake2b(parent + b"".join(token.to_bytes(4, "big") for token in tokens), digest_size=32).digest()


class SimRequest:
    """One request. Its output is a function of its prompt, so that a recomputation gives the same tokens.

    Args:
        max_tokens: of output; the scheduler knows it, and plans no step beyond it.
        stop_after: of output; the model stops here, which no scheduler knows beforehand.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        tokens_per_block: int,
        stop_after: int | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = list(prompt)
        self.all_token_ids = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.stop_after = stop_after
        self.kv_transfer_params = kv_transfer_params
        self.status = Status.WAITING
        self.block_hashes: list[bytes] = []
        """Of its full blocks, as far as they are known: they may come late."""
        self.num_computed_tokens = 0
        """Tokens whose KV is there, or will be when all planned steps have run and accepted all drafts."""
        self.num_output_placeholders = 0
        """Tokens that planned steps are expected to generate."""
        self.num_in_flight_tokens = 0
        """Tokens of planned steps whose results are not in."""
        self.num_stale_tokens = 0
        """Those of them that were planned before the request was preempted."""
        self.drop_stale = False
        self.drafts = 0
        """Tokens drafted for its next step."""
        self.last_step = 0
        """The last step it was planned in."""
        self.is_prefill_chunk = False
        self.num_preemptions = 0
        self.was_scheduled = False
        self._size = tokens_per_block
        self.update_block_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def holds_blocks(self) -> bool:
        """Whether it has blocks while it waits."""
        return self.num_computed_tokens > 0 or self.status is Status.LOADING

    def is_finished(self) -> bool:
        return self.status in (Status.FINISHED_STOPPED, Status.FINISHED_ABORTED)

    def append(self, token: int) -> bool:
        """One more token of output. Returns whether it was the last."""
        self.all_token_ids.append(token)
        return self.num_output_tokens >= min(self.max_tokens, self.stop_after or self.max_tokens)

    def update_block_hashes(self, held_back: int = 0) -> None:
        """The hashes of all blocks that are full become known, but for the last `held_back` of them."""
        for place in range(len(self.block_hashes), self.num_tokens // self._size - held_back):
            tokens = self.all_token_ids[place * self._size : (place + 1) * self._size]
            self.block_hashes.append(block_hash(self.block_hashes[-1] if place else _ROOT, tokens))
