"""The I/O process itself: `python -m kvcascade.manager.io.child SOCKET POOL PARENT PID`, where the first three are
file descriptors, and PID is the engine's process.

Its main thread passes messages on; the lanes' threads do the work. It imports no engine and no torch. It ends when
it is told to, when the socket is closed, or when the engine's process ends, whichever comes first, and leaves
nothing behind: what was committed is on the medium, as after the kill of an engine.
"""

import logging
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from threading import Thread

from kvcascade.tiers.host import HostPool

from .channel import Channel
from .running import NOT_WATCHED
from .served import Served
from .wire import Log, Start, Stop

__all__ = ["main"]

_LOOK = 0.02
_LULL = 0.001
"""What ends within it is told in one message: the engine looks once in a step."""
_WATCH = 0.5


class Wake:
    """Wakes the main thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.called = False

    def __call__(self) -> None:
        """From any thread, after there is something to look at."""
        if not self.called:
            self.called = True
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Before looking at what there is. In this order: who finds it called has nothing to do."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        self.called = False


class Child:
    """Passes messages between the engine's process and the tiers."""

    def __init__(self, channel: Channel, pool: HostPool) -> None:
        self._channel = channel
        self._pool = pool
        self._wake = Wake()
        self._tiers: list[Served] = []

    def run(self) -> None:
        """Returns when there is nobody to work for."""
        while not self._channel.over:
            busy = any(tier.busy for tier in self._tiers)
            self._channel.wait(_LOOK if busy else None, self._wake.fd)
            if self._wake.called:
                self._channel.wait(_LULL)
            self._wake.clear()
            for message in self._channel.receive():
                if isinstance(message, Stop):
                    return
                self._handle(message)
            for tier in self._tiers:
                tier.tell()
            self._channel.flush()

    def post(self, message: object) -> None:
        """From any thread."""
        self._channel.post(message)
        self._wake()

    def _handle(self, message: object) -> None:
        if isinstance(message, Start):
            logging.getLogger().addHandler(_Forward(self))
            logging.getLogger("kvcascade").setLevel(message.log_level)
            for place, tier in enumerate(message.tiers):
                self._tiers.append(Served(place, tier, message.again, self._pool.slot, self.post, self._wake))
        else:
            self._tiers[message.place].handle(message)  # type: ignore[attr-defined]


class _Forward(logging.Handler):
    """Sends what is logged here to the engine's log."""

    def __init__(self, child: Child) -> None:
        super().__init__()
        self._child = child

    def emit(self, record: logging.LogRecord) -> None:
        self._child.post(Log(record.name, record.levelno, self.format(record)))


def _end_with(parent: int, pid: int) -> None:
    """On a thread of its own: ends this process, whatever it is doing, when its parent, the process `pid`, has
    ended, which it may have by now."""
    poll = select.poll()
    if parent != NOT_WATCHED:
        poll.register(parent, select.POLLIN)
        poll.poll()
    while os.getppid() == pid:
        time.sleep(_WATCH)
    os._exit(0)


def main(socket_fd: int, pool_fd: int, parent: int, pid: int) -> None:
    for asked in (signal.SIGINT, signal.SIGTERM):  # the parent may have work until it ends itself
        signal.signal(asked, signal.SIG_IGN)
    Thread(target=_end_with, args=(parent, pid), daemon=True).start()
    channel = Channel(socket.socket(fileno=socket_fd))
    pool = HostPool.attach(pool_fd)
    os.close(pool_fd)
    Child(channel, pool).run()
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
