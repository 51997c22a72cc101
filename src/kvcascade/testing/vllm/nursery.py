"""Imports vLLM once, which takes longer than anything else, and forks a process whenever an engine is wanted."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .processes import ONE_THREAD, Group

__all__ = ["Nursery"]

_START = 300.0
_LONGEST = 1 << 20


class Nursery:
    """The process that forks, seen from a test. `close` ends it; what it has forked goes on.

    A forked process leads a group of its own. What it begins is forked, too, where vLLM lets us choose.
    """

    def __init__(self, log: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=os.environ | ONE_THREAD,
            )
        self._socket.settimeout(_START)
        self._socket.recv(1)

    def engine(self, settings: dict[str, Any], log: Path, env: Mapping[str, str], channel: socket.socket) -> Group:
        """An engine of these settings, told what to do over `channel`."""
        return self._fork({"settings": settings}, log, env, channel)

    def server(self, arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> Group:
        """vLLM's OpenAI server, with these arguments."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            return self._fork({"arguments": [*arguments]}, log, env, theirs)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _fork(self, what: dict[str, Any], log: Path, env: Mapping[str, str], channel: socket.socket) -> Group:
        request = json.dumps(what | {"env": dict(env), "log": str(log)})
        socket.send_fds(self._socket, [request.encode()], [channel.fileno()])
        return Group(int(self._socket.recv(32)))


def _serve(requests: socket.socket) -> None:
    from . import runner

    runner.import_engine()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    requests.send(b"!")
    while True:
        raw, fds, _, _ = socket.recv_fds(requests, _LONGEST, 1)
        if not raw:
            return
        pid = os.fork()
        if pid == 0:
            requests.close()
            _become(json.loads(raw), socket.socket(fileno=fds[0]))
        os.close(fds[0])
        requests.send(str(pid).encode())


def _become(request: dict[str, Any], channel: socket.socket) -> None:
    """Turns a forked process into an engine's or a server's. Does not return."""
    from . import runner

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Path(request["log"]).open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update({"VLLM_WORKER_MULTIPROC_METHOD": "fork"} | request["env"])
    code = 1
    try:
        if "settings" in request:
            code = runner.run(request["settings"], channel)
        else:
            channel.close()
            code = runner.serve(request["arguments"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
