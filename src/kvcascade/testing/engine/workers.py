"""The workers: they run what was planned, rank by rank, on real bytes."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

from kvcascade.connector import WorkerReport

from .device import Device
from .model import UNSETTLED, Model, next_hash, prefix_hashes
from .outputs import StepPlan
from .shape import EngineShape

__all__ = ["Rank", "Sequencer", "Transfers", "Workers", "WrongKVError"]


class WrongKVError(AssertionError):
    """A token attends to KV that is not that of the tokens before it."""


class Transfers(Protocol):
    """The worker's side of the connector; `kvcascade.connector.TransferWorker` is one."""

    def handle_preemptions(self, metadata: Any) -> None: ...

    def start_load_kv(self, metadata: Any) -> None: ...

    def wait_for_save(self, metadata: Any) -> None: ...

    def get_finished(self) -> WorkerReport: ...


class Sequencer:
    """What a worker knows of one request: its true tokens, also those that the scheduler has not been told of."""

    def __init__(self, tokens: Sequence[int], computed: int) -> None:
        self.prefixes = prefix_hashes(tokens)
        self.computed = computed
        self.unsettled = False
        """The draft after the last computed token was rejected: a draft model computes that token again."""


class Rank:
    """One tensor-parallel worker."""

    def __init__(self, device: Device, transfers: Transfers) -> None:
        self.device = device
        self.transfers = transfers


class Workers:
    """All ranks. They compute in step with each other; their transfers end when they end.

    Args:
        acceptance: the share of drafts that are accepted.
        on_start: called when a step's copies have been started, before anything is computed.
    """

    def __init__(
        self,
        shape: EngineShape,
        model: Model,
        ranks: Sequence[Rank],
        acceptance: float = 0.3,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self.shape = shape
        self.model = model
        self.ranks = ranks
        self._acceptance = acceptance
        self._on_start = on_start
        self._requests: dict[str, Sequencer] = {}

    def execute(self, plan: StepPlan, draw: Random) -> dict[str, list[int]]:
        """Runs a step on every rank. Returns the tokens that each request has got.

        Raises:
            WrongKVError: a request attends to something else than what was computed for its tokens.
        """
        metadata = plan.kv_connector_metadata
        for rank in self.ranks:
            rank.transfers.handle_preemptions(metadata)
        for req_id in plan.finished_req_ids | plan.preempted_req_ids:
            self._requests.pop(req_id, None)
        for rank in self.ranks:
            rank.transfers.start_load_kv(metadata)
        self._on_start()
        sampled = {req_id: self._compute(req_id, plan, draw) for req_id in plan.num_scheduled_tokens}
        for rank in self.ranks:
            rank.transfers.wait_for_save(metadata)
        return sampled

    def report(self, draw: Random) -> WorkerReport:
        """What the ranks' transfers have ended. A rank may keep it to itself until later."""
        report = WorkerReport()
        for rank in self.ranks:
            if len(self.ranks) == 1 or draw.random() < 0.7:
                report.merge(rank.transfers.get_finished())
        return report

    def check(self, table: Sequence[Sequence[int]], prefixes: Sequence[int], where: str) -> None:
        """Compares the KV of so many leading tokens of a request, as far as a token after them attends to it.

        Raises:
            WrongKVError: it is not all right.
        """
        for group, window in enumerate(self.shape.windows):
            start = max(0, len(prefixes) - window + 1) if window else 0
            for rank in self.ranks:
                wrong = rank.device.wrong(group, table[group], start, prefixes[start:])
                if wrong:
                    raise WrongKVError(
                        f"{where}: rank {rank.device.rank}, group {group}: the KV of tokens {wrong} of "
                        f"{len(prefixes)} is wrong, in blocks {list(table[group])}"
                    )

    def _compute(self, req_id: str, plan: StepPlan, draw: Random) -> list[int]:
        if req_id in plan.tokens:
            self._requests[req_id] = Sequencer(plan.tokens[req_id], plan.starts[req_id])
        request, table = self._requests[req_id], plan.tables[req_id]
        drafts = len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
        certain = plan.num_scheduled_tokens[req_id] - drafts
        self.check(table, request.prefixes[: request.computed], f"request {req_id}")
        accepted = sum(draw.random() < self._acceptance for _ in range(drafts)) if plan.samples[req_id] else 0
        new = self._sample(request, 1 + accepted) if plan.samples[req_id] else []
        self._write(request, table, certain + accepted, drafts - accepted)
        return new

    def _write(self, request: Sequencer, table: Sequence[Sequence[int]], right: int, rejected: int) -> None:
        """Computes `right` tokens; the places of the drafts that were rejected hold nothing of worth."""
        end = request.computed + right
        after = UNSETTLED if rejected else request.prefixes[end]
        for group, blocks in enumerate(table):
            again = request.unsettled and group in self.shape.draft_groups
            start = request.computed - again
            for rank in self.ranks:
                rank.device.write(group, blocks, start, request.prefixes[start:end], after)
                rank.device.spoil(group, blocks, end, rejected)
        request.computed, request.unsettled = end, rejected > 0

    def _sample(self, request: Sequencer, count: int) -> list[int]:
        new = []
        for _ in range(count):
            new.append(self.model.next_token(request.prefixes[-1]))
            request.prefixes.append(next_hash(request.prefixes, new[-1]))
        return new
