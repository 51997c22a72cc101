"""One child of an engine's process: from its start until it is reaped."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Self

from .channel import Channel
from .wire import Start

__all__ = ["NOT_WATCHED", "Running"]

NOT_WATCHED = -1
"""Stands for the descriptor of a parent that can't be watched, on kernels without pidfds."""


class Running:
    """A child, from its start until it is reaped.

    Attributes:
        channel: its socket; of use for what it has said also after its end.
        ended: set when it has been reaped: nothing of it uses the pool any more.
    """

    def __init__(self, popen: "subprocess.Popen[bytes]", channel: Channel) -> None:
        self.pid = popen.pid
        self.channel = channel
        self.ended = Event()
        self._popen = popen
        self._began = time.monotonic()

    @classmethod
    def start(cls, pool_fd: int, start: Start) -> Self:
        """
        Raises:
            OSError: no process can be started.
        """
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        parent = _pidfd()
        try:
            channel.post(start)
            popen = _popen(theirs.fileno(), pool_fd, parent)
        except BaseException:
            channel.close()
            raise
        finally:
            theirs.close()
            if parent != NOT_WATCHED:
                os.close(parent)
        channel.flush()
        return cls(popen, channel)

    def wait(self) -> float:
        """Waits for its end and reaps it; returns the seconds that it lived."""
        self._popen.wait()
        self.ended.set()
        return time.monotonic() - self._began

    def kill(self) -> None:
        self._popen.kill()

    @property
    def end(self) -> str:
        """How it ended, in words."""
        code = self._popen.returncode
        if code is None:
            return "runs"
        if code >= 0:
            return f"ended with exit code {code}"
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"


def _pidfd() -> int:
    """Stands for this process."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return NOT_WATCHED


def _popen(socket_fd: int, pool_fd: int, parent: int) -> "subprocess.Popen[bytes]":
    """What a tier needs from the environment (a store's credentials) the child has too. Modules are found where
    they are found here, and not in the current folder by chance (-P). Settings come over the socket, since anybody
    can read a command line."""
    descriptors = (socket_fd, pool_fd, parent)
    arguments = (*descriptors, os.getpid())
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvcascade.manager.io.child", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[fd for fd in descriptors if fd != NOT_WATCHED],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
    )
