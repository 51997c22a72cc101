"""One engine in a process of its own, told what to do from a test."""

import json
import select
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .nursery import Nursery
from .processes import ONE_THREAD, Group

__all__ = ["Engine"]

_START = 300.0
_HANG = 300.0
_END = 60.0


class Engine:
    """vLLM's `LLM` in a process of its own. Calls are those of `Runner`, with arguments by name.

    Args:
        settings: of vLLM's `LLM`; and `fault`, see there.
        log: where the engine's output goes.
        nursery: forks the process. None: a new one, begun with the command `prefix`.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        log: Path,
        nursery: Nursery | None = None,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.log_path = log
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | (env or {})
        self._channel, theirs = socket.socketpair()
        self._lines = self._channel.makefile("rw")
        with theirs:
            if nursery:
                self._group = nursery.engine(settings, log, env, theirs)
            else:
                fd = theirs.fileno()
                module = [sys.executable, "-m", "kvcascade.testing.vllm.runner", json.dumps(settings), str(fd)]
                self._group = Group.spawn([*prefix, *module], log, ONE_THREAD | env, [fd])

    def wait_ready(self) -> "Engine":
        """Returns once the engine serves.

        Raises:
            RuntimeError: it does not start; with what it says.
        """
        self._answer(_START)
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(**arguments: Any) -> Any:
            self.begin(name, **arguments)
            return self.end()

        return call

    def begin(self, name: str, **arguments: Any) -> None:
        """Tells the engine to do something; `end` waits for it."""
        print(json.dumps({"do": name, **arguments}), file=self._lines, flush=True)

    def end(self) -> Any:
        return self._answer(_HANG)["value"]

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def close(self) -> None:
        """Ends the engine as its user would, and waits for that.

        Raises:
            TimeoutError: it does not end.
        """
        self._channel.shutdown(socket.SHUT_WR)
        ended = self._group.ends_within(_END)
        self.kill()
        if not ended:
            raise TimeoutError(f"the engine does not end:\n{self.log[-4000:]}")

    def kill(self) -> None:
        """kill -9, the engine's own processes, too. A second call does nothing."""
        self._group.kill()
        with suppress(BrokenPipeError, ValueError):
            self._lines.close()
        self._channel.close()

    def _answer(self, timeout: float) -> dict[str, Any]:
        ready, _, _ = select.select([self._channel], [], [], timeout)
        line = self._lines.readline() if ready else ""
        if not line:
            what = "has ended" if ready else "does not answer"
            raise RuntimeError(f"the engine {what}:\n{self.log[-8000:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer
