"""One connection: commands go out and replies come in, payloads straight from and into the caller's buffers."""

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from kvcascade.errors import TierUnavailable
from kvcascade.types import Buffer

from .replies import Refusal, Reply, Status, Stored
from .settings import Location

__all__ = ["Part", "Wire", "command"]

Part: TypeAlias = bytes | Buffer

_TIMEVAL = struct.Struct("@ll")
_INPUT = 1 << 16  # bytes of the buffer for replies; payloads do not pass through it
_MOST = 16 << 20  # bytes of a reply that is no chunk, or parts of one; only a damaged one says more
_DEEP = 8  # lists within lists; no answer has more than a few
_SHOWN = 24  # bytes of an answer that is none
_DIGITS = 20  # of a number
_MANY = 1000  # buffers that one call of the system takes
_IN_PLACE = Stored(in_place=True)
_DRIFT = 0.9  # the system is told of a deadline again once it is this much closer, or farther


def command(*words: bytes | str | int) -> bytes:
    """A command as the protocol has it."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


class Wire:
    """A connection that redis-py has made: connected, authenticated, in its database. From then on its socket is
    used here alone.

    Plain sockets block, with the deadline kept by the system: so a payload takes one call, however large it is,
    and the interpreter lock is waited for once. TLS can't do either, and gets its parts one by one.

    Whatever goes wrong raises `TierUnavailable` and closes the connection. One thread at a time.
    """

    def __init__(self, connection: Any, where: Location, clock: Callable[[], float] = time.monotonic) -> None:
        self.where = where
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        self._clock = clock
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._end = 0.0
        self._least = self._most = 0.0  # seconds left between which the socket is told well enough
        self._ahead = bytearray(_INPUT)  # what was read ahead lies between _start and _stop
        self._input = memoryview(self._ahead)
        self._start = self._stop = 0
        self._tail = memoryview(bytearray(2))
        self.used = clock()
        self.closed = False
        self.lost = False
        """Whether the other end has closed it, or sent what is no answer."""
        if not self._tls:
            self._socket.settimeout(None)

    def begin(self, end: float) -> None:
        """What follows must be done by `end`, in the clock's seconds.

        Raises:
            TierUnavailable: that is over; the connection is as good as it was.
        """
        if end <= self._clock():
            raise TierUnavailable(f"{self.where}: no answer in time")
        self._end = end

    @property
    def quiet(self) -> bool:
        """Whether it is open and has nothing to say: so it may be used."""
        return not self.closed and self._start == self._stop and not self._poll.poll(0)

    def close(self) -> None:
        self.closed = True
        self._connection.disconnect()

    # Sending

    def send(self, parts: Sequence[Part]) -> None:
        """Sends all of them, in few calls. On a failure the connection stays open: what the server said before it
        hung up can still be read."""
        try:
            if self._tls:
                for part in parts:
                    self._arm()
                    self._socket.sendall(part)
                return
            while True:
                self._arm()
                some = parts[:_MANY]
                sent = self._socket.sendmsg(some)
                if sent == sum(map(len, some)) and len(some) == len(parts):
                    return
                parts = _rest(parts, sent)
        except OSError as error:
            raise self._lost(error) from error

    # Receiving

    def reply(self, depth: int = _DEEP) -> Reply:
        """The next reply, whatever it is; lists hold at most `depth` levels of others."""
        line = self._line(_INPUT)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return Status(rest)
        if kind == b"-":
            return Refusal.parse(rest)
        if kind == b":":
            return self._number(rest)
        if kind in (b"$", b"*"):
            count = self._number(rest)
            if count == -1 and kind == b"$":
                return None
            if not 0 <= count <= _MOST or not depth:
                raise self.unexpected(line)
            return self._bulk(count) if kind == b"$" else [self.reply(depth - 1) for _ in range(count)]
        raise self.unexpected(line)

    def reply_into(self, header: Buffer, payload: Buffer) -> Reply:
        """The next reply: a value is received into these two; one of another length is skipped."""
        wanted = b"$%d\r\n" % (len(header) + len(payload))
        ahead = len(wanted) + len(header)  # and no more, so that the payload stays aligned
        if self._start == self._stop:
            self._fill(ahead)
        if not self._ahead.startswith(wanted, self._start, self._stop):
            return self._other_reply(ahead, header, payload)
        self._start += len(wanted)
        self._into(header, payload, self._tail)
        self._check_tail()
        return _IN_PLACE

    def _other_reply(self, ahead: int, header: Buffer, payload: Buffer) -> Reply:
        """As `reply_into`, where what has come does not begin with a value of the right length: it may still be
        one of which too little has come."""
        line = self._line(ahead - (self._stop - self._start))
        if line[:1] != b"$":
            if line[:1] == b"-":
                return Refusal.parse(line[1:])
            raise self.unexpected(line)
        nbytes = self._number(line[1:])
        if nbytes == -1:
            return None
        if nbytes < 0:
            raise self.unexpected(line)
        in_place = nbytes == len(header) + len(payload)
        if in_place:
            self._into(header, payload, self._tail)
        else:
            self._skip(nbytes)
            self._into(self._tail)
        self._check_tail()
        return Stored(in_place)

    def unexpected(self, found: object) -> TierUnavailable:
        """Closes it, since nothing that follows can be believed. What to raise: this is no answer."""
        self.close()
        self.lost = True
        shown = found[:_SHOWN] if isinstance(found, bytes) else found
        return TierUnavailable(f"{self.where}: an answer that is none: {str(shown)[: 2 * _SHOWN]}")

    def _line(self, limit: int) -> bytes:
        """Up to the next line end. Reads ahead at most `limit` bytes, so that little of a payload is copied."""
        searched = self._start
        while True:
            found = self._ahead.find(b"\r\n", searched, self._stop)
            if found >= 0:
                line = bytes(self._input[self._start : found])
                self._start = found + 2
                return line
            searched = max(self._start, self._stop - 1)
            if self._stop - self._start > _INPUT // 2:
                raise self.unexpected(bytes(self._input[self._start : self._start + _SHOWN]))
            searched -= self._fill(limit)

    def _fill(self, limit: int) -> int:
        """Receives something; by how much what was there has moved to the front."""
        moved = self._start if self._stop + limit > _INPUT else 0
        if self._start == self._stop:
            moved = self._start
        if moved:
            left = bytes(self._input[self._start : self._stop])
            self._input[: len(left)] = left
            self._start, self._stop = 0, len(left)
        self._stop += self._receive([self._input[self._stop : self._stop + max(limit, 1)]], 0)
        return moved

    def _bulk(self, nbytes: int) -> bytes:
        value = bytearray(nbytes)
        self._into(memoryview(value), self._tail)
        self._check_tail()
        return bytes(value)

    def _check_tail(self) -> None:
        if (tail := bytes(self._tail)) != b"\r\n":
            raise self.unexpected(tail)

    def _skip(self, nbytes: int) -> None:
        scratch = memoryview(bytearray(min(nbytes, _INPUT)))
        while nbytes:
            part = scratch[: min(nbytes, len(scratch))]
            self._into(part)
            nbytes -= len(part)

    def _into(self, *targets: Buffer) -> None:
        """Fills the buffers: from what was read ahead, and the rest straight from the socket."""
        left: list[Buffer] = []
        for part in targets:
            if taken := min(len(part), self._stop - self._start):
                part[:taken] = self._input[self._start : self._start + taken]
                self._start += taken
            if taken < len(part):
                left.append(part[taken:] if taken else part)
        wanted = sum(map(len, left))
        while wanted:
            received = self._receive(left, socket.MSG_WAITALL)
            wanted -= received
            if wanted:
                left = _rest(left, received)

    def _receive(self, targets: Sequence[Buffer], flags: int) -> int:
        """At least one byte; where the flags ask for it, all that the deadline leaves time for."""
        try:
            self._arm()
            if self._tls:
                received = self._socket.recv_into(targets[0])
            else:
                received = self._socket.recvmsg_into(targets, 0, flags)[0]
            if not received:
                raise ConnectionResetError("the server has closed it")
        except OSError as error:
            self.close()
            raise self._lost(error) from error
        return received

    # Deadlines and failures

    def _arm(self) -> None:
        """Tells the socket how long it may take; it is told again only as the end comes closer."""
        left = self._end - self._clock()
        if self._least < left < self._most:
            return
        if left <= 0:
            self.close()
            raise TierUnavailable(f"{self.where}: no answer in time")
        self._least, self._most = left * _DRIFT, left / _DRIFT
        if self._tls:
            self._socket.settimeout(left)
        else:
            limit = _TIMEVAL.pack(int(left), int(left % 1 * 1e6) or 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _number(self, text: bytes) -> int:
        digits = text[1:] if text[:1] == b"-" else text
        if not digits.isdigit() or len(digits) > _DIGITS:
            raise self.unexpected(text)
        return int(text)

    def _lost(self, error: OSError) -> TierUnavailable:
        if isinstance(error, BlockingIOError | TimeoutError):
            return TierUnavailable(f"{self.where}: no answer in time")
        self.lost = True
        return TierUnavailable(f"{self.where}: the connection was lost: {error.strerror or error}")


def _rest(parts: Sequence[Any], done: int) -> list[Buffer]:
    """What is left of the parts after `done` bytes."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(memoryview(part)[done:])
        done = max(0, done - len(part))
    return left
