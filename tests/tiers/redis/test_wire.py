"""Replies as they come over a connection: in any pieces, in any order, and such as are none."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvcascade.errors import TierUnavailable
from kvcascade.tiers.redis.replies import Refusal, Stored
from kvcascade.tiers.redis.settings import Location
from kvcascade.tiers.redis.wire import Wire, command

HANG = 60.0
HEADER, PAYLOAD = b"h" * 328, bytes(range(256)) * 16


class Connection:
    """What a wire needs of redis-py's."""

    def __init__(self, end: socket.socket) -> None:
        self._sock = end

    def disconnect(self) -> None:
        self._sock.close()


class Line:
    """A wire, and the server's end of it."""

    def __init__(self) -> None:
        self.server, client = socket.socketpair()
        self.wire = Wire(Connection(client), Location("test"))
        self.wire.begin(time.monotonic() + HANG)
        self.header, self.payload = bytearray(len(HEADER)), bytearray(len(PAYLOAD))

    def chunk(self) -> Any:
        return self.wire.reply_into(memoryview(self.header), memoryview(self.payload))

    def close(self) -> None:
        self.server.close()
        self.wire.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


def value(*parts: bytes) -> bytes:
    whole = b"".join(parts)
    return b"$%d\r\n%b\r\n" % (len(whole), whole)


REPLIES: list[tuple[bytes, Any]] = [
    (b"+OK\r\n", b"OK"),
    (b":-7\r\n", -7),
    (b"-OOM no room\r\n", Refusal("OOM", "no room")),
    (b"$-1\r\n", None),
    (b"$0\r\n\r\n", b""),
    (value(b"a\r\nb"), b"a\r\nb"),
    (b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n", [b"a", [1]]),
    (value(b"x" * 100_000), b"x" * 100_000),
]


def test_replies_of_all_kinds(line: Line) -> None:
    line.server.sendall(b"".join(raw for raw, _ in REPLIES))
    assert [line.wire.reply() for _ in REPLIES] == [wanted for _, wanted in REPLIES]
    assert line.wire.quiet


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 338, 5000])
def test_chunks_between_misses_and_errors_in_pieces(line: Line, piece: int) -> None:
    replies = [
        b"$-1\r\n",
        value(HEADER, PAYLOAD),
        b"-LOADING x\r\n",
        b"$-1\r\n",
        b"$-1\r\n",
        value(HEADER, PAYLOAD),
    ]
    replies += [
        value(b"shorter"),
        value(HEADER, PAYLOAD),
        value(HEADER, PAYLOAD, b"longer"),
        value(HEADER, PAYLOAD),
    ]
    raw = b"".join(replies)

    def send() -> None:
        for start in range(0, len(raw), piece):
            line.server.sendall(raw[start : start + piece])

    sender = threading.Thread(target=send)
    sender.start()
    found = []
    for _ in replies:
        line.header[:], line.payload[:] = bytes(len(HEADER)), bytes(len(PAYLOAD))
        found.append(line.chunk())
        right = bytes(line.header) == HEADER and bytes(line.payload) == PAYLOAD
        assert right is (found[-1] == Stored(in_place=True))
    sender.join(HANG)
    right, other = Stored(in_place=True), Stored(in_place=False)
    assert found == [None, right, Refusal("LOADING", "x"), None, None, right, other, right, other, right]
    assert line.wire.quiet


def test_misses_that_come_at_once_are_not_waited_for(line: Line) -> None:
    """What was read ahead is a reply already: nothing more will come."""
    line.server.sendall(b"$-1\r\n-LOADING x\r\n$-1\r\n")
    assert [line.chunk() for _ in range(3)] == [None, Refusal("LOADING", "x"), None]
    assert line.wire.quiet


@pytest.mark.parametrize(
    "raw",
    [
        *[b"", b"?\r\n", b"$x\r\n", b":\r\n", b"*99999999999\r\n", b"$99999999999\r\n", b"x" * 70_000],
        *[b"*-1\r\n", b"$-2\r\n", b":+1\r\n", b":1_0\r\n", b": 1\r\n", b"$1\r\nabcd\r\n", b"*1\r\n" * 5000],
        b":" + b"9" * 5000 + b"\r\n",
    ],
)
def test_an_answer_that_is_none_closes_it(line: Line, raw: bytes) -> None:
    line.server.sendall(raw)
    line.server.shutdown(socket.SHUT_WR)
    with pytest.raises(TierUnavailable):
        line.wire.reply()
    assert line.wire.closed
    assert not line.wire.quiet


@pytest.mark.parametrize(
    "raw",
    [
        *[value(HEADER, PAYLOAD)[:-2] + b"xx", value(HEADER, PAYLOAD)[:-1], b":1\r\n", b"$x\r\n"],
        *[b"$-2\r\n", b"*-1\r\n", b"+OK\r\n", b"$3\r\nabcd\r\n"],
    ],
)
def test_a_chunk_that_is_none_closes_it(line: Line, raw: bytes) -> None:
    line.server.sendall(raw)
    line.server.shutdown(socket.SHUT_WR)
    with pytest.raises(TierUnavailable):
        line.chunk()
    assert line.wire.closed


@given(st.binary(max_size=300))
@hypothesis_settings(deadline=None, max_examples=200)
def test_no_bytes_make_it_hang_or_fail_otherwise(raw: bytes) -> None:
    line = Line()
    try:
        line.server.sendall(raw)
        line.server.shutdown(socket.SHUT_WR)
        for _ in range(400):
            try:
                line.wire.reply()
            except TierUnavailable:
                break
        else:
            pytest.fail("more replies than bytes")
    finally:
        line.close()


def test_what_was_said_too_much_is_not_taken_for_the_next_reply(line: Line) -> None:
    line.server.sendall(b"+OK\r\n+OK\r\n")
    assert line.wire.reply() == b"OK"
    assert not line.wire.quiet


def test_a_payload_larger_than_the_systems_buffers_is_sent_whole(line: Line) -> None:
    received = bytearray()
    parts = [b"head", memoryview(bytes(range(256)) * 40_000), b"", b"tail"] * 3

    def receive() -> None:
        while piece := line.server.recv(10_000):
            received.extend(piece)

    receiver = threading.Thread(target=receive)
    receiver.start()
    line.wire.send(parts)
    line.wire.close()
    receiver.join(HANG)
    assert bytes(received) == b"".join(parts)


def test_a_wire_that_is_closed_says_so_in_our_words(line: Line) -> None:
    """Also where the deadline is another one, of which the system would have to be told."""
    line.wire.close()
    for seconds in (HANG, 10 * HANG):
        line.wire.begin(time.monotonic() + seconds)
        with pytest.raises(TierUnavailable):
            line.wire.reply()


def test_commands_are_binary_safe() -> None:
    assert command("SET", b"\xff\r\n", 12) == b"*3\r\n$3\r\nSET\r\n$3\r\n\xff\r\n\r\n$2\r\n12\r\n"
