"""One engine in a process of its own, which does what lines of JSON over a socket tell it."""

import gc
import json
import os
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

HANG = 60.0
_FIXED = {
    "skip_tokenizer_init": True,
    "block_size": 32,
    "num_gpu_blocks_override": 512,
    "enforce_eager": True,
    "dtype": "float32",
    "disable_log_stats": False,
}
_WATCHED = ("kvcascade", "kv_offload", "preempt", "cached_by_source")


class Runner:
    """What an engine can be told to do. Steps, our manager and its pool are reached only where the engine's core
    runs in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        _install(settings.pop("fault", None))
        if settings.get("async_scheduling"):
            _allow_asynchronous_scheduling()
        self.llm = LLM(
            **_FIXED | settings,
        )
        self.engine = self.llm.llm_engine
        asynchronous = self.engine.vllm_config.scheduler_config.async_scheduling
        if asynchronous != settings.get("async_scheduling", False):
            raise RuntimeError(f"async_scheduling is {asynchronous}, which was not asked for")
        self._asked = 0
        self._open = True

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

    def timed(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        """The same, measured: seconds until the last token, until a request's first one (the mean), and until
        nothing is on its way any more; and seconds of processor time of all threads."""
        from vllm import SamplingParams

        begin, busy = time.perf_counter(), time.process_time()
        self._asked += 1
        for place, prompt in enumerate(prompts):
            terms = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0.0)
            self.engine.add_request(f"{self._asked}-{place}", {"prompt_token_ids": prompt}, terms)
        first: dict[str, float] = {}
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            for output in outputs:
                first.setdefault(output.request_id, time.perf_counter() - begin)
            time.sleep(0 if outputs else 0.0005)
        last = time.perf_counter() - begin
        self.settle()
        rest = time.perf_counter() - begin
        spent = time.process_time() - busy
        return {"last": last, "first": sum(first.values()) / len(first), "rest": rest, "processor": spent}

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
        return self._inside().left()

    def forget_host(self) -> None:
        """Clears the GPU's prefix cache and the stack's host memory: what is asked for comes from below."""
        self.reset()
        self._inside().stack.reset_cache("primary")

    def reset_in_flight(self, prompts: list[list[int]], tokens: int, loads: bool = False) -> tuple[list[Any], int]:
        """As `generate`; but in the middle the connector's cache is cleared: whenever copies are under way, or
        once, when a load is. Returns the answers and how often that was."""
        names = [f"reset-{place}" for place in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt}, _sampling(tokens))
        found: dict[str, Any] = {}
        resets = 0
        while self.engine.has_unfinished_requests():
            found |= {output.request_id: output for output in self.engine.step() if output.finished}
            inside = self._inside()
            if inside.loading and not resets if loads else inside.running:
                self._connector().reset_cache()
                resets += 1
        self.settle()
        return [_answer(found[name]) for name in names], resets

    def finish(self, folder: str) -> dict[str, list[str]]:
        """Ends the engine, but not its process; returns what is left of it there. `folder`: of its stack."""
        self.close()
        gc.collect()
        named = [thread.name for thread in threading.enumerate() if "kvcascade" in thread.name]
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "kvcascade" in line]
        files = []
        for link in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                files.append(str(link.readlink()))
        return {
            "threads": named,
            "maps": [line for line in maps if ".so" not in line],
            "files": [file for file in files if "memfd:" in file or folder in file or "/dev/shm" in file],
        }

    def close(self) -> None:
        """Ends the engine. A second call does nothing."""
        if self._open:
            self._open = False
            self.engine.engine_core.shutdown()

    def _connector(self) -> Any:
        connector = self.engine.engine_core.engine_core.scheduler.connector
        several = getattr(connector, "_connectors", [connector])  # of a MultiConnector
        return next(one for one in several if hasattr(one, "scheduler") or hasattr(one, "connector_scheduler"))

    def _inside(self) -> "_Inside":
        connector = self._connector()
        side: Any = getattr(connector, "scheduler", None)
        if hasattr(side, "adapter"):  # the connector of our own
            return _of_connector(side)
        manager = connector.connector_scheduler.manager
        return _of_tier(manager) if hasattr(manager, "secondary_tiers") else _of_spec(manager)


class _Inside(NamedTuple):
    """What our half of the scheduler has at this moment."""

    stack: Any
    """The tier's own `LowerTiers`, below vLLM's host memory."""
    requests: int
    copies: int
    running: int
    """Copies that no reset has voided."""
    loading: int = 0
    """Loads among them, where that is known."""

    def left(self) -> dict[str, int]:
        stats = self.stack.get_stats()
        own = getattr(self.stack, "capacity", None)  # slots of our own, where there are any
        return {
            "pinned": stats.pinned_slots,
            "leaked": 0 if own is None else own - stats.free_slots - stats.tiers[0].chunks,
            "requests": self.stack.requests_known + self.requests,
            "copies": self.copies,
        }


def _of_connector(side: Any) -> _Inside:
    from kvcascade.connector.transfers import Direction

    adapter = side.adapter
    running = [adapter._jobs._live[job] for job in adapter._jobs.in_flight]
    loading = sum(job.direction is Direction.LOAD for job in running)
    return _Inside(side.stack, adapter.requests_known, adapter.jobs_known, len(running), loading)


def _of_spec(manager: Any) -> _Inside:
    running, void = manager._ledger._open, len(manager._ledger._void)
    loading = sum(not copy.store for copy in running.values())
    return _Inside(manager._stack, len(manager._requests), len(running) + void, len(running), loading)


def _of_tier(manager: Any) -> _Inside:
    tiers = manager.secondary_tiers[0]._tiers
    tiers.drain()  # what is stored in the end goes on while the engine is at rest
    return _Inside(tiers, 0, tiers.orders_under_way, tiers.orders_under_way)


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
    if fault["kind"] in ("loads", "slow loads"):
        _change_loads(fault.get("every", 0), fault.get("seconds", 0.0))
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


def _allow_asynchronous_scheduling() -> None:
    """vLLM turns it off on a CPU, where nothing is gained by it; but it works."""
    from vllm.platforms.cpu import CpuPlatform

    settle = CpuPlatform.check_and_update_config

    def settle_but_for_that(config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        settle(config)
        config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = staticmethod(settle_but_for_that)


def _change_loads(every: int, seconds: float) -> None:
    """Makes every so manieth copy to the device fail, if any, and each last so long at least."""
    from kvcascade.connector.copies import HostCopier
    from kvcascade.connector.transfers import Direction

    copy, numbers = HostCopier.copy, count(1)

    def changed(self: Any, piece: Any, direction: Any) -> None:
        if direction is Direction.LOAD:
            time.sleep(seconds)
            if every and not next(numbers) % every:
                raise RuntimeError("injected")
        copy(self, piece, direction)

    HostCopier.copy = changed  # type: ignore[method-assign]


def import_engine() -> None:
    """All that takes time before there is an engine."""
    import vllm.entrypoints.launchers.api_server.entry
    import vllm.model_executor.models.llama
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
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
    runner.close()
    return 0


def serve(arguments: list[str]) -> int:
    """Is vLLM's OpenAI server until it ends; returns the exit code."""
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["api_server", *arguments]
    main()
    return 0


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))))
