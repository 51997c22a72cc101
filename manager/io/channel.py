"""Messages over a socket between two processes of one machine."""

import pickle
import select
import socket
import struct
from collections import deque

__all__ = ["Channel"]

_LENGTH = struct.Struct("!I")
_PIECE = 1 << 18


class Channel:
    """One end of a socket pair, which carries pickled objects, in order. Both ends are ours, and trusted.

    `post` may be called from any thread, all else from the one that owns the end. Nothing but `wait` waits: what
    the socket does not take now is sent by a later call.

    Attributes:
        over: whether the other end is closed, and all that it has said was received.
    """

    def __init__(self, end: socket.socket) -> None:
        """`end`: of a stream; it belongs to the channel from here on."""
        end.setblocking(False)
        self.over = False
        self._end = end
        self._out: deque[memoryview] = deque()
        self._in = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def post(self, message: object) -> None:
        """Queues a message; `flush` or `receive` sends it."""
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._out.append(memoryview(_LENGTH.pack(len(body)) + body))

    def send(self, message: object) -> None:
        self.post(message)
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes."""
        while self._out:
            frame = self._out[0]
            try:
                sent = self._end.send(frame)
            except BlockingIOError:
                return
            except OSError:  # the other end is closed, as `receive` will find out too
                self._out.clear()
                return
            if sent == len(frame):
                self._out.popleft()
            else:
                self._out[0] = frame[sent:]

    def receive(self) -> list[object]:
        """All messages that are there."""
        self.flush()
        while not self.over:
            try:
                piece = self._end.recv(_PIECE)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self._in += piece
            self.over = not piece
        return self._messages() if self._in else []

    def wait(self, timeout: float | None, *others: int) -> None:
        """Returns when a message, or room for one, may be there, or one of the `others` (file descriptors) can be
        read; after `timeout` seconds at the latest, where there is one."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN | (select.POLLOUT if self._out else 0))
        for other in others:
            poll.register(other, select.POLLIN)
        poll.poll(None if timeout is None else timeout * 1000)

    def close(self) -> None:
        self.over = True
        self._end.close()

    def _messages(self) -> list[object]:
        found, start = [], 0
        while (begin := start + _LENGTH.size) <= len(self._in):
            end = begin + _LENGTH.unpack_from(self._in, start)[0]
            if end > len(self._in):
                break
            found.append(pickle.loads(self._in[begin:end]))
            start = end
        del self._in[:start]
        return found
