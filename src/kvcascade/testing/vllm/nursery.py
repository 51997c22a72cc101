"""Imports vLLM once, which takes longer than anything else, and forks a process whenever an engine is wanted."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Nursery"]

_START = 120.0
_LONGEST = 1 << 20


class Nursery:
    """The process that forks, seen from a test. `close` ends it; engines that it has forked go on."""

    def __init__(self, log: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
            )
        self._socket.settimeout(_START)
        self._socket.recv(1)

    def fork(self, settings: dict[str, Any], env: dict[str, str], log: Path, channel: socket.socket) -> int:
        """A process with an engine of these settings, told what to do over `channel`; returns its id. It is the
        leader of a process group of its own."""
        request = json.dumps({"settings": settings, "env": env, "log": str(log)})
        socket.send_fds(self._socket, [request.encode()], [channel.fileno()])
        return int(self._socket.recv(32))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


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
    """Turns a forked process into an engine's. Does not return."""
    from . import runner

    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with Path(request["log"]).open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(request["env"])
    code = 1
    try:
        code = runner.run(request["settings"], channel)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
