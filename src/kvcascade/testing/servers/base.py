"""Real servers for tests: processes on free ports, which never outlive the test that started them."""

import atexit
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["ServerFailed", "ServerProcess", "free_port", "wait_until"]

HOST = "127.0.0.1"
_PATIENCE = 30.0  # seconds in which a server begins to answer, or ends; a guard, never waited for
_LOG_LINES = 40
_PORTS = range(10_000, 22_000)  # below what the system gives to outgoing connections; Redis Cluster adds 10,000


class ServerFailed(RuntimeError):
    """A server did not do what was expected. The text ends with the last lines of its log."""


def free_port() -> int:
    """A TCP port on which nobody listens; nor on the one 10,000 above it."""
    while True:
        port = random.choice(_PORTS)
        if _is_free(port) and _is_free(port + 10_000):
            return port


def wait_until(condition: Callable[[], bool], what: str, timeout: float = _PATIENCE) -> None:
    """Asks again and again until the condition holds.

    Raises:
        ServerFailed: it did not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise ServerFailed(f"{what}: not within {timeout:g} s")
        time.sleep(0.01)


class ServerProcess:
    """A server in a process of its own, with its output in `folder`/`name`.log. A context manager: it runs from
    enter to exit, and is ended with the interpreter at the latest.

    Args:
        command: what is run.
        folder: where it runs, and where its log is kept for a look after a failure.
        ready: whether it serves now; asked after a start until it is true. It may raise OSError for "not yet".
        environment: added to this process's own.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        ready: Callable[[], bool],
        name: str = "server",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = [str(part) for part in command]
        self._folder = folder
        self._ready = ready
        self._name = name
        self._environment = environment or {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What it has said, over all its starts."""
        path = self._log_path
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        """Starts it, and returns when it serves.

        Raises:
            ServerFailed: it ended, or serves nothing.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                start_new_session=True,  # a Ctrl-C in the terminal is the tests' to handle
            )
        atexit.register(self.kill)
        try:
            wait_until(self._serves, f"{self._name} serves")
        except ServerFailed as error:
            self.kill()
            raise ServerFailed(f"{error}; its log ends:\n{self._tail()}") from None

    def stop(self) -> None:
        """Asks it to end (SIGTERM), and makes it end where it does not."""
        if self.alive:
            self.resume()
            self._running().terminate()
            with suppress(subprocess.TimeoutExpired):
                self._running().wait(_PATIENCE)
        self.kill()

    def kill(self) -> None:
        """Ends it at once (SIGKILL)."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        atexit.unregister(self.kill)

    def restart(self) -> None:
        """Stops it and starts it again, on the same port."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Stops it in its tracks (SIGSTOP): connections stay open, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _log_path(self) -> Path:
        return self._folder / f"{self._name}.log"

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise ServerFailed(f"{self._name} was not started, or was stopped")
        return self._process

    def _serves(self) -> bool:
        if not self.alive:
            raise ServerFailed(f"{self._name} has ended with {self._running().returncode}")
        try:
            return self._ready()
        except OSError:
            return False

    def _tail(self) -> str:
        return "\n".join(self.log.splitlines()[-_LOG_LINES:])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
