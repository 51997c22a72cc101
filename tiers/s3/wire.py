"""HTTP/1.1 on a socket: payloads are sent from, and received into, the caller's memory.

A call to the system is made for a whole payload, not for each piece of it: beside a busy Python thread every call
may have to wait for the interpreter lock.
"""

import math
import os
import re
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from select import poll
from typing import NamedTuple, Protocol

from kvcascade.types import Buffer

__all__ = ["Connection", "CutShort", "Garbled", "Head", "Origin", "left"]

_HEAD_BYTES = 4096
_LONGEST_HEAD = 64 << 10
_END = b"\r\n\r\n"
_BODILESS = (204, 304)
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,15}")
_LENGTH = re.compile(r"[0-9]{1,18}")
_ALERT = b"\x15\x03"
"""What TLS begins with to say that it was not spoken to in TLS."""
_TIMEVAL = struct.Struct("ll")
_TICKS = 20
_TICK = 1 / _TICKS  # seconds
_MOST_PARTS = min(os.sysconf("SC_IOV_MAX"), 1024) if "SC_IOV_MAX" in os.sysconf_names else 16


class CutShort(ConnectionError):
    """The connection ended in the middle of an answer."""


class Garbled(ConnectionError):
    """What came is no answer in HTTP."""


class Origin(NamedTuple):
    """Where connections lead."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


class Head(NamedTuple):
    """An answer, but for its body."""

    status: int
    fields: dict[str, str]
    """By name, in lower case."""


def left(end: float) -> float:
    """Seconds until `end`, of the monotonic clock.

    Raises:
        TimeoutError: there are none.
    """
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the deadline has passed")
    return seconds


class _Stream(Protocol):
    def send(self, parts: Sequence[Buffer], end: float) -> int:
        """Sends some of what `parts` hold, and says how much."""

    def receive(self, view: Buffer, end: float, whole: bool = False) -> int:
        """Receives something, or, where `whole`, as much as fits if that can be had in one call; 0: the end."""


class _Plain:
    """A blocking socket whose waits the system bounds, so that one call can move a whole payload."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ticks = 0
        sock.settimeout(None)

    def send(self, parts: Sequence[Buffer], end: float) -> int:
        self._bound(end)
        try:
            return self._sock.sendmsg(parts[:_MOST_PARTS])
        except BlockingIOError as error:
            raise TimeoutError("the deadline has passed") from error

    def receive(self, view: Buffer, end: float, whole: bool = False) -> int:
        self._bound(end)
        try:
            return self._sock.recv_into(view, 0, socket.MSG_WAITALL if whole else 0)
        except BlockingIOError as error:
            raise TimeoutError("the deadline has passed") from error

    def _bound(self, end: float) -> None:
        """No wait is longer than until `end`, rounded up: most calls find it set so already."""
        ticks = math.ceil(left(end) / _TICK)
        if ticks != self._ticks:
            self._ticks = ticks
            timeval = _TIMEVAL.pack(ticks // _TICKS, ticks % _TICKS * 1_000_000 // _TICKS)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                self._sock.setsockopt(socket.SOL_SOCKET, option, timeval)


class _Tls:
    """A TLS connection; it moves one record a call."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock

    def send(self, parts: Sequence[Buffer], end: float) -> int:
        self._sock.settimeout(left(end))
        return self._sock.send(parts[0])

    def receive(self, view: Buffer, end: float, whole: bool = False) -> int:
        self._sock.settimeout(left(end))
        return self._sock.recv_into(view)


class Connection:
    """One connection: a request, then its answer, any number of times. Used by one thread at a time.

    All methods raise OSError where the connection is of no use any more, TimeoutError at the deadline `end`.
    """

    def __init__(self, origin: Origin, end: float, tls: ssl.SSLContext | None) -> None:
        """Connects; with TLS where the origin asks for it."""
        self.origin = origin
        self.reused = False
        """Whether it has served before, so that the other side may have closed it meanwhile."""
        self.answered = False
        """Whether anything of the answer has come."""
        self._sock = socket.create_connection((origin.host, origin.port), timeout=left(end))
        self._stream: _Stream
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.scheme == "https" and tls is not None:
                self._sock = tls.wrap_socket(self._sock, server_hostname=origin.host)
                self._stream = _Tls(self._sock)
            else:
                self._stream = _Plain(self._sock)
        except BaseException:
            self.close()
            raise
        self._buffer = bytearray(_HEAD_BYTES)
        self._ahead = memoryview(b"")  # what has come beyond the head
        self._left = 0  # bytes of the body, or of its current chunk, that are still to come
        self._chunked = False
        self._reusable = True
        self._unsent: OSError | None = None

    # -- the request

    def send(self, head: bytes, body: Sequence[Buffer], end: float) -> None:
        """Sends a request. Where that fails in the middle, `receive_head` looks whether an answer tells why."""
        self.answered, self._unsent, self._reusable = False, None, False
        parts = [memoryview(head), *body]
        try:
            while parts:
                sent = self._stream.send(parts, end)
                while parts and sent >= len(parts[0]):
                    sent -= len(parts.pop(0))
                if sent:
                    parts[0] = parts[0][sent:]
        except (ConnectionError, ssl.SSLError) as error:
            self._unsent = error

    # -- the answer

    def receive_head(self, method: str, end: float) -> Head:
        """The next answer's head; what is interim (100 Continue) is passed over."""
        try:
            head = self._next_head(end)
            while 100 <= head.status < 200:
                head = self._next_head(end)
        except (ConnectionError, ssl.SSLError) as error:
            raise self._unsent or error from error
        self._expect_body(method, head)
        return head

    def receive_into(self, view: Buffer, end: float) -> int:
        """Fills `view` with what comes next of the body; returns less than its length at the body's end."""
        filled = 0
        while filled < len(view) and (self._left or self._next_chunk(end)):
            step = min(len(view) - filled, self._left)
            self._receive_exactly(view[filled : filled + step], end)
            self._left -= step
            filled += step
        return filled

    def receive_rest(self, limit: int, end: float) -> bytes:
        """The rest of the body; not more than `limit` bytes of it."""
        parts = []
        while limit > 0 and (self._left or self._next_chunk(end)):
            part = bytearray(min(self._left, limit))
            self.receive_into(memoryview(part), end)
            limit -= len(part)
            parts.append(part)
        return b"".join(parts)

    @property
    def done(self) -> bool:
        """Whether the whole answer has come, and the connection can serve again."""
        return self._reusable and not self._left and not self._chunked and not self._ahead

    @property
    def idle(self) -> bool:
        """Whether an unused connection is still open. Whatever can be read on it means that it is not."""
        waiting = poll()
        waiting.register(self._sock)
        return not [event for _, event in waiting.poll(0) if event & ~4]  # POLLOUT

    def close(self) -> None:
        with suppress(OSError):
            self._sock.close()

    def _next_head(self, end: float) -> Head:
        filled = len(self._ahead)
        self._buffer[:filled] = self._ahead
        while (stop := self._buffer.find(_END, 0, filled)) < 0:
            if filled == len(self._buffer):
                if filled >= _LONGEST_HEAD:
                    raise Garbled("an answer's head has no end")
                self._buffer = self._buffer.ljust(2 * filled, b"\0")
            came = self._stream.receive(memoryview(self._buffer)[filled:], end)
            if not came and self._buffer.startswith(_ALERT) and filled:
                raise Garbled("it speaks TLS; begin `endpoint_url` with https://")
            if not came:
                raise CutShort("the connection was closed before the answer")
            self.answered = True
            filled += came
        self._ahead = memoryview(self._buffer)[stop + len(_END) : filled]
        return _parse(bytes(self._buffer[:stop]))

    def _expect_body(self, method: str, head: Head) -> None:
        self._chunked = False
        self._left = 0
        length = head.fields.get("content-length")
        self._reusable = self._unsent is None and head.fields.get("connection", "").lower() != "close"
        if method == "HEAD" or head.status in _BODILESS:
            return
        if "chunked" in head.fields.get("transfer-encoding", "").lower():
            self._chunked = True
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise Garbled(f"Content-Length: {length[:40]!r}")
            self._left = int(length)
        else:
            self._reusable = False  # it ends with the connection; what has come of it says enough
            self._left = len(self._ahead) if head.status >= 400 else 0

    def _next_chunk(self, end: float) -> bool:
        """Goes on to the next chunk of a body that comes in chunks; False at its end."""
        if not self._chunked:
            return False
        size = self._line(end) or self._line(end)  # a chunk ends with an empty line
        digits = size.partition(b";")[0].strip()
        if not _SIZE.fullmatch(digits):
            raise Garbled("a body in chunks without their sizes")
        self._left = int(digits, 16)
        if not self._left:
            while self._line(end):
                pass  # trailers say nothing that is needed
            self._chunked = False
        return bool(self._left)

    def _line(self, end: float) -> bytes:
        line = bytearray()
        one = bytearray(1)
        while not line.endswith(b"\r\n"):
            if len(line) > _HEAD_BYTES:
                raise Garbled("a line without an end")
            self._receive_exactly(memoryview(one), end)
            line += one
        return bytes(line[:-2])

    def _receive_exactly(self, view: Buffer, end: float) -> None:
        filled = min(len(view), len(self._ahead))
        view[:filled] = self._ahead[:filled]
        self._ahead = self._ahead[filled:]
        while filled < len(view):
            came = self._stream.receive(view[filled:], end, whole=True)
            if not came:
                raise CutShort("the connection was closed in the middle of a body")
            filled += came


def _parse(head: bytes) -> Head:
    first, *lines = head.decode("latin-1").split("\r\n")
    protocol, _, rest = first.partition(" ")
    status = rest[:3]
    if not protocol.startswith("HTTP/1.") or not re.fullmatch("[0-9]{3}", status):
        raise Garbled(f"no answer in HTTP: {first[:40]!r}")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if protocol == "HTTP/1.0":
        fields["connection"] = "close"
    return Head(int(status), fields)
