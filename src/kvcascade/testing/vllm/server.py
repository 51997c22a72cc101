"""vLLM's OpenAI server in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Completion", "Server"]

_START = 300.0
_HANG = 180.0
_END = 60.0


class Completion(NamedTuple):
    text: str
    cached: int
    """Tokens of the prompt that were not computed."""


class Server:
    """Started with the options of `vllm serve`, as its user would. `prefix` is a command that starts it."""

    def __init__(
        self,
        model: Path,
        log: Path,
        transfer: dict[str, Any] | None,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.model = str(model)
        self.log_path = log
        self._port = _free_port()
        given = [*options, *(["--kv-transfer-config", json.dumps(transfer)] if transfer else [])]
        command = [
            *(*prefix, sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", self.model, "--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "float32", "--max-model-len", "2048", "--block-size", "32", "--enforce-eager"),
            *("--enable-prompt-tokens-details", "--uvicorn-log-level", "warning", *given),
        ]
        fixed = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | fixed | (env or {}),
                start_new_session=True,
            )

    def wait_ready(self) -> "Server":
        """
        Raises:
            RuntimeError: it does not serve; with what it says.
        """
        end = time.monotonic() + _START
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            with suppress(urllib.error.URLError, OSError), self._open("/health"):
                return self
            time.sleep(0.25)
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
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(ProcessLookupError):
                if os.getpgid(int(folder.name)) == self._process.pid:
                    found.append(int(folder.name))
        return found

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def stop(self) -> None:
        """SIGTERM, and waits for the end.

        Raises:
            TimeoutError: it does not end.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(f"the server does not end:\n{self.log[-4000:]}") from None
        self.kill()

    def kill(self) -> None:
        """kill -9, all its processes. A second call does nothing."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

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
