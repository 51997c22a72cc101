"""One engine in a process of its own, which does what lines of JSON over a socket tell it."""

import json
import os
import socket
import sys
import time
import traceback
from functools import partial
from itertools import count
from typing import Any, NamedTuple

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

HANG = 60.0
_WATCHED = ("kvcascade", "kv_offload", "preempt", "cached_by_source")


class Runner:
    """What an engine can be told to do. Steps, our manager and its pool are reached only where the engine's core
    runs in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        _install(settings.pop("fault", None))
        self.llm = LLM(
            skip_tokenizer_init=True,
            block_size=32,
            enforce_eager=True,
            dtype="float32",
            disable_log_stats=False,
            **settings,
        )
        self.engine = self.llm.llm_engine
        self._asked = 0

    def generate(
        self,
        prompts: list[list[int]],
        tokens: int,
        salt: str | None = None,
        abort: list[int] | None = None,
        after: int = 0,
        **sampling: Any,
    ) -> list[Any]:
        """All prompts at once: for each the outputs' token ids, their log-probabilities, and how many tokens of
        the prompt were not computed. Those whose places `abort` names are aborted after so many steps, and have no
        answer."""
        names = [f"{self._asked}-{place}" for place in range(len(prompts))]
        self._asked += 1
        for name, prompt in zip(names, prompts, strict=True):
            given = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
            self.engine.add_request(name, given, _sampling(tokens, **sampling))
        gone = {names[place] for place in abort or ()}
        found: dict[str, Any] = {}
        steps = 0
        while self.engine.has_unfinished_requests():
            if steps == after and gone:
                self.engine.abort_request(list(gone))
            outputs = self.engine.step()
            found |= {output.request_id: output for output in outputs if output.finished}
            steps += 1
            time.sleep(0 if outputs else 0.001)  # as vLLM's core does in a process of its own
        self.settle()
        return [None if name in gone else _answer(found[name]) for name in names]

    def settle(self) -> None:
        """Steps the engine until nothing is on its way any more."""
        core = getattr(self.engine.engine_core, "engine_core", None)
        if core is None:  # in another process, which steps itself
            time.sleep(1.0)
            return
        end = time.monotonic() + HANG
        while core.scheduler.has_requests():
            if time.monotonic() > end:
                raise TimeoutError("the engine does not come to rest")
            self.engine.step()
            time.sleep(0.001)

    def reset(self, connector: bool = False) -> bool:
        """Clears the GPU's prefix cache, and the connector's, too."""
        return bool(self.engine.reset_prefix_cache(reset_connector=connector))

    def metrics(self) -> dict[str, float]:
        """Our numbers by name and tier, and vLLM's of what was loaded and stored."""
        found = {}
        for metric in self.llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None and any(word in metric.name for word in _WATCHED):
                tier = metric.labels.get("tier") or metric.labels.get("source")
                found[metric.name.removeprefix("vllm:") + (f".{tier}" if tier else "")] = value
        return found

    def poison(self) -> None:
        """Turns over every byte of the host pool's chunks."""
        pool = self._inside().stack.pool
        for slot in range(pool.slots):
            row = pool.slot(slot)
            row[:] = bytes(255 - byte for byte in row)

    def at_rest(self) -> dict[str, int]:
        """What must be nothing when nothing runs."""
        inside = self._inside()
        stats = inside.stack.get_stats()
        return {
            "pinned": stats.pinned_slots,
            "leaked": inside.stack.capacity - stats.free_slots - stats.tiers[0].chunks,
            "requests": inside.stack.requests_known + inside.requests,
            "copies": inside.copies,
        }

    def reset_in_flight(self, prompts: list[list[int]], tokens: int) -> list[Any]:
        """As `generate`; but in the middle, with copies under way, the connector's cache is cleared."""
        names = [f"reset-{place}" for place in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, _sampling(tokens))
        found: dict[str, Any] = {}
        while self.engine.has_unfinished_requests():
            found |= {output.request_id: output for output in self.engine.step() if output.finished}
            if self._inside().running:
                self._connector().reset_cache()
        self.settle()
        return [_answer(found[name]) for name in names]

    def _connector(self) -> Any:
        connector = self.engine.engine_core.engine_core.scheduler.connector
        return getattr(connector, "_connectors", [connector])[0]

    def _inside(self) -> "_Inside":
        connector = self._connector()
        side: Any = getattr(connector, "scheduler", None)
        if hasattr(side, "adapter"):  # the connector of our own
            adapter = side.adapter
            running = len(adapter._jobs.in_flight)
            return _Inside(side.stack, adapter.requests_known, adapter.jobs_known, running)
        manager = connector.connector_scheduler.manager
        running, void = len(manager._ledger._open), len(manager._ledger._void)
        return _Inside(manager._stack, len(manager._requests), running + void, running)


class _Inside(NamedTuple):
    """What our half of the scheduler has at this moment."""

    stack: Any
    requests: int
    copies: int
    running: int
    """Copies that no reset has voided."""


def _sampling(tokens: int, params: dict[str, Any] | None = None, **more: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if params:
        more["extra_args"] = {"kv_transfer_params": params}
    return SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **{"temperature": 0.0, "logprobs": 1} | more,
    )


def _answer(output: Any) -> dict[str, Any]:
    return {
        "tokens": [list(one.token_ids) for one in output.outputs],
        "logprobs": [
            [step[token].logprob for step, token in zip(one.logprobs, one.token_ids, strict=True)]
            for one in output.outputs
            if one.logprobs
        ],
        "cached": output.num_cached_tokens,
    }


def _install(fault: dict[str, Any] | None) -> None:
    """Puts a tier of `kvcascade.testing`, or one of these here, in front of a tier of the stack; or makes every
    so manieth copy to the device fail."""
    if fault is None:
        return
    if fault["kind"] == "loads":
        _fail_loads(fault["every"])
        return
    from kvcascade import stack
    from kvcascade.connector.vllm import spec, tier
    from kvcascade.testing import FaultTier, TierWrapper

    class Poison(TierWrapper):
        """Writes other bytes than it is given: of the same length, and under a right checksum."""

        def write(self, keys: Any, buffers: Any, victims: Any = ()) -> Any:
            turned = [memoryview(bytearray(255 - byte for byte in buffer)) for buffer in buffers]
            return self.inner.write(keys, turned, victims)

    def wrap(name: str, inner: Any) -> Any:
        if name != fault["tier"]:
            return inner
        if fault["kind"] == "poison":
            return Poison(inner)
        return FaultTier(inner, **fault["settings"])

    vars(spec)["build"] = partial(stack.build, wrap=wrap)
    vars(tier)["build_lower"] = partial(stack.build_lower, wrap=wrap)


def _fail_loads(every: int) -> None:
    from kvcascade.connector.copies import HostCopier
    from kvcascade.connector.transfers import Direction

    copy, numbers = HostCopier.copy, count(1)

    def failing(self: Any, piece: Any, direction: Any) -> None:
        if direction is Direction.LOAD and not next(numbers) % every:
            raise RuntimeError("injected")
        copy(self, piece, direction)

    HostCopier.copy = failing  # type: ignore[method-assign]


def import_engine() -> None:
    """All that takes time before there is an engine."""
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401


def run(settings: dict[str, Any], channel: socket.socket) -> int:
    """Starts an engine and does what it is told until the other side closes the channel; returns the exit code."""
    lines = channel.makefile("rw")

    def answer(**what: Any) -> None:
        print(json.dumps(what), file=lines, flush=True)

    try:
        runner = Runner(settings)
        answer(ready=True)
        for line in lines:
            call = json.loads(line)
            answer(value=getattr(runner, call.pop("do"))(**call))
    except Exception as error:  # the process's top: the test wants to know, and the log has the rest
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        return 1
    runner.engine.engine_core.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))
