"""The simulated scheduler does what vLLM's do: it plays each recorded scenario, and makes the same calls."""

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from kvcascade.connector import EndedLoad
from kvcascade.testing.engine.allocator import Blocks
from kvcascade.testing.engine.outputs import ConnectorOutput, ModelOutput, StepPlan
from kvcascade.testing.engine.requests import SimRequest, Status
from kvcascade.testing.engine.scheduler import EngineScheduler
from kvcascade.testing.engine.shape import EngineShape

RECORDINGS = sorted((Path(__file__).parents[2] / "fixtures" / "vllm").glob("*.json"))


class Recorder:
    """A connector that writes down each call, and answers what the scenario says."""

    def __init__(self, answers: dict[str, list[int | None]], block: int) -> None:
        self.block = block
        self.calls: list[list[Any]] = []
        self.answers = {req: deque(script) for req, script in answers.items()}

    def log(self, name: str, **args: Any) -> None:
        self.calls.append([name, args])

    def on_new_request(self, request: SimRequest) -> None:
        self.log("on_new_request", **told(request))

    def get_num_new_matched_tokens(self, request: SimRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        script = self.answers.get(request.request_id)
        answer = script.popleft() if script else 0
        if answer is not None:
            answer = min(answer, (request.num_tokens - num_computed_tokens) // self.block * self.block)
        self.log("get_num_new_matched_tokens", **told(request), local=num_computed_tokens, answer=answer)
        return answer, bool(answer)

    def update_state_after_alloc(self, request: SimRequest, blocks: Blocks, num_external_tokens: int) -> None:
        ids = list(blocks.get_block_ids())
        self.log("update_state_after_alloc", **told(request), blocks=ids, external=num_external_tokens)

    def build_connector_meta(self, plan: StepPlan) -> None:
        cached = plan.scheduled_cached_reqs
        self.log(
            "build_connector_meta",
            scheduled=dict(plan.num_scheduled_tokens),
            new={new.req_id: list(new.block_ids) for new in plan.scheduled_new_reqs},
            cached={req: ids and list(ids) for req, ids in zip(cached.req_ids, cached.new_block_ids, strict=True)},
            resumed=sorted(cached.resumed_req_ids),
            preempted=sorted(plan.preempted_req_ids),
            finished=sorted(plan.finished_req_ids),
            drafts={req: len(drafts) for req, drafts in plan.scheduled_spec_decode_tokens.items()},
        )

    def update_connector_output(self, output: ConnectorOutput) -> list[EndedLoad]:
        self.log("update_connector_output", finished_recving=sorted(output.finished_recving))
        return []

    def request_finished(self, request: SimRequest, block_ids: tuple[list[int], ...]) -> bool:
        aborted = request.status is Status.FINISHED_ABORTED
        self.log("request_finished", **told(request), blocks=list(block_ids), aborted=aborted)
        return False

    def reset_cache(self) -> bool:
        self.log("reset_cache")
        return True

    def has_pending_push_work(self) -> bool:
        return False


def told(request: SimRequest) -> dict[str, Any]:
    return {
        "req": request.request_id,
        "tokens": request.num_tokens,
        "computed": request.num_computed_tokens,
        "hashes": len(request.block_hashes),
    }


class Run:
    """One recorded scenario, on the simulated scheduler."""

    def __init__(self, recording: dict[str, Any]) -> None:
        sizes = recording["shape"]
        self.shape = EngineShape(
            tokens_per_block=sizes["block"],
            blocks=sizes["blocks"],
            windows=tuple(sizes["windows"]),
            seqs=sizes["seqs"],
            budget=sizes["budget"],
            drafts=sizes["drafts"],
            asynchronous=sizes["asynchronous"],
        )
        self.recording = recording
        self.connector = Recorder(recording["match"], self.shape.tokens_per_block)
        self.scheduler = EngineScheduler(self.shape, self.connector)
        self.accepts = {req: deque(script) for req, script in recording["accept"].items()}
        self.queue: deque[tuple[StepPlan, dict[str, list[int]]]] = deque()
        self.output = ConnectorOutput()

    def play(self) -> list[list[Any]]:
        for action, *args in self.recording["actions"]:
            self.connector.log("action", do=[action, *args])
            getattr(self, action)(*args)
        return self.connector.calls

    def add(self, req: str, base: int, length: int, max_tokens: int) -> None:
        prompt = [base * 1000 + place for place in range(length)]
        self.scheduler.add(SimRequest(req, prompt, max_tokens, self.shape.tokens_per_block))

    def abort(self, req: str) -> None:
        self.scheduler.abort(req)

    def reset(self, running: bool) -> None:
        if self.scheduler.reset(running) is None:
            self.connector.log("reset_refused")

    def loaded(self, req: str, bad: int | None) -> None:
        request = self.scheduler.requests.get(req)
        if request is None or req in self.scheduler.received:
            return
        if not (request.is_finished() or request.status is Status.LOADING):
            return
        self.output.finished_recving.add(req)
        if bad is not None and len(self.shape.windows) > 1:
            self.output.failed_recving.add(req)
        elif bad is not None:
            (blocks,) = self.scheduler.tables.blocks(req).blocks
            fresh = [block.block_id for block in blocks if not block.is_null and block.block_hash is None]
            self.output.invalid_block_ids.update(fresh[bad:])

    def step(self) -> None:
        if self.scheduler.has_requests:
            plan = self.scheduler.schedule()
            self.queue.append((plan, self.sample(plan)))
            executed = plan.total_num_scheduled_tokens > 0
            if len(self.queue) < self.shape.depth and (executed or self.scheduler.has_requests):
                return
        if self.queue:
            plan, sampled = self.queue.popleft()
            self.connector.log("update_from_output", sampled={req: len(new) for req, new in sampled.items()})
            output, self.output = self.output, ConnectorOutput()
            self.scheduler.update(plan, ModelOutput(sampled, output))

    def sample(self, plan: StepPlan) -> dict[str, list[int]]:
        sampled = {}
        for req, samples in plan.samples.items():
            drafts = len(plan.scheduled_spec_decode_tokens.get(req, ()))
            script = self.accepts.get(req)
            accepted = min(drafts, script.popleft() if script and drafts else 0)
            sampled[req] = [7] * (1 + accepted) if samples else []
        return sampled


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_the_scheduler_makes_the_recorded_calls(path: Path) -> None:
    recording = json.loads(path.read_text())
    assert Run(recording).play() == recording["calls"]


def test_there_are_recordings() -> None:
    assert len(RECORDINGS) >= 40
