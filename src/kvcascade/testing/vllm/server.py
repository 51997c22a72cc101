"""vLLM's OpenAI server in a process of its own."""

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .nursery import Nursery
from .processes import ONE_THREAD, Group

__all__ = ["Completion", "Server"]

_START = 600.0
_HANG = 300.0
_END = 60.0


class Completion(NamedTuple):
    text: str
    cached: int
    """Tokens of the prompt that were not computed."""


class Server:
    """Started with the options of `vllm serve`.

    Args:
        nursery: forks the process, and so it those of the engine. None: begun as its user would, by a command,
            with the command `prefix` before it.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: dict[str, Any] | None,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        nursery: Nursery | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.model = str(model)
        self.log_path = log
        self._port = _free_port()
        arguments = [
            *("--model", self.model, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "float32", "--max-model-len", "2048", "--block-size", "32", "--enforce-eager"),
            *("--enable-prompt-tokens-details", "--uvicorn-log-level", "warning", *options),
            *(["--kv-transfer-config", json.dumps(transfer)] if transfer else []),
        ]
        env = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"} | (env or {})
        if nursery:
            self._group = nursery.server(arguments, log, env)
        else:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
            self._group = Group.spawn([*prefix, *command], log, ONE_THREAD | env)

    def wait_ready(self) -> "Server":
        """
        Raises:
            RuntimeError: it does not serve; with what it says.
        """
        end = time.monotonic() + _START
        while time.monotonic() < end:
            if self._group.ends_within(0):
                break
            with suppress(urllib.error.URLError, OSError), self._open("/health"):
                return self
            time.sleep(0.1)
        raise RuntimeError(f"the server does not serve:\n{self.log[-8000:]}")

    def complete(self, prompt: Sequence[int], tokens: int, **more: Any) -> Completion:
        """Greedy, and to the end."""
        asked = {"model": self.model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0}
        with self._open("/v1/completions", asked | {"ignore_eos": True} | more) as answer:
            found = json.load(answer)
        details = found["usage"].get("prompt_tokens_details") or {}
        return Completion(found["choices"][0]["text"], details.get("cached_tokens") or 0)

    def metrics(self) -> str:
        with self._open("/metrics") as answer:
            return str(answer.read().decode())

    def processes(self) -> list[int]:
        """The ids of all its processes, itself included."""
        return self._group.members()

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def stop(self) -> None:
        """SIGTERM, and waits for the end.

        Raises:
            TimeoutError: it does not end.
        """
        self._group.terminate()
        ended = self._group.ends_within(_END)
        self.kill()
        if not ended:
            raise TimeoutError(f"the server does not end:\n{self.log[-4000:]}")

    def kill(self) -> None:
        """kill -9, all its processes. A second call does nothing."""
        self._group.kill()

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=_HANG)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
