"""Processes that serve a test end with it, and say why where they don't start."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from kvcascade.testing.servers import ServerFailed, ServerProcess, free_port

SERVE = """
import socket, sys, time
print("here", flush=True)
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    listener.accept()[0].close()
"""


def server(folder: Path, code: str = SERVE) -> ServerProcess:
    port = free_port()

    def ready() -> bool:
        socket.create_connection(("127.0.0.1", port), 1).close()
        return True

    return ServerProcess([sys.executable, "-c", code, str(port)], folder, ready)


def test_it_runs_from_enter_to_exit(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        first = one.pid
        os.kill(first, 0)
        one.restart()
        assert one.pid != first
        assert one.log == "here\nhere\n"
    assert not one.alive
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_one_that_hangs_is_ended(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        one.pause()
    assert not one.alive


def test_one_that_ends_at_once_says_why(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match=r"has ended with 3; its log ends:\nno such thing"):
        server(tmp_path, "import sys; print('no such thing'); sys.exit(3)").start()


def test_a_killed_one_starts_again(tmp_path: Path) -> None:
    with server(tmp_path) as one:
        os.kill(one.pid, signal.SIGKILL)
        one.kill()
        with pytest.raises(ServerFailed, match="was stopped"):
            one.pause()
        one.start()
        assert one.alive
