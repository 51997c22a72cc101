"""The proxy changes nothing until it is told to, and then exactly what it was told."""

import socket
import threading
from collections.abc import Iterator

import pytest

from kvcascade.testing.servers import Proxy

HANG = 30.0


@pytest.fixture
def echo() -> Iterator[Proxy]:
    """A proxy before a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def serve() -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=answer, args=(end,)))
            threads[-1].start()

    def answer(end: socket.socket) -> None:
        with end:
            try:
                while piece := end.recv(1 << 16):
                    end.sendall(piece)
            except OSError:
                return

    server = threading.Thread(target=serve)
    server.start()
    with Proxy(listener.getsockname()[1]) as proxy:
        yield proxy
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in [server, *threads]:
        thread.join(HANG)


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), HANG)


def ask(end: socket.socket, payload: bytes) -> bytes:
    """What comes back before the end of it, or of the connection."""
    found = b""
    try:
        end.sendall(payload)
        while len(found) < len(payload) and (piece := end.recv(1 << 16)):
            found += piece
    except ConnectionError:
        pass
    return found


def test_without_a_fault_all_passes(echo: Proxy) -> None:
    payload = bytes(range(256)) * 8192
    with connect(echo) as one, connect(echo) as two:
        sender = threading.Thread(target=one.sendall, args=(payload,))
        sender.start()
        found = b""
        while len(found) < len(payload):
            found += one.recv(1 << 16)
        sender.join(HANG)
        assert found == payload
        assert ask(two, b"x") == b"x"
    assert echo.accepted == 2


@pytest.mark.parametrize("towards", ["client", "server"])
def test_a_cut_comes_after_as_many_bytes_as_were_said(echo: Proxy, towards: str) -> None:
    with connect(echo) as one:
        assert ask(one, b"before") == b"before"
        echo.cut(towards, after=5)  # type: ignore[arg-type]
        found = ask(one, b"0123456789")  # what reached the server may be cut off on its way back
        assert found == b"01234" or (towards == "server" and found == b"")
    with connect(echo) as two:
        assert ask(two, b"after") == b"after"


def test_one_byte_is_changed(echo: Proxy) -> None:
    with connect(echo) as one:
        echo.corrupt(after=3)
        assert ask(one, b"aaaaaa") == b"aaa`aa"
        assert ask(one, b"aaaaaa") == b"aaaaaa"


def test_what_is_stalled_comes_when_it_is_healed(echo: Proxy) -> None:
    with connect(echo) as one:
        echo.stall(after=2)
        one.sendall(b"abcd")
        assert one.recv(10) == b"ab"
        one.settimeout(0.05)
        with pytest.raises(TimeoutError):
            one.recv(10)
        one.settimeout(HANG)
        echo.heal()
        assert one.recv(10) == b"cd"


def test_refused_connections_come_back(echo: Proxy) -> None:
    with connect(echo) as one:
        assert ask(one, b"a") == b"a"
        echo.refuse()
        assert ask(one, b"a") == b""
        with pytest.raises(ConnectionRefusedError):
            connect(echo)
        echo.heal()
    with connect(echo) as two:
        assert ask(two, b"b") == b"b"


def test_dropped_connections_end(echo: Proxy) -> None:
    with connect(echo) as one:
        assert ask(one, b"a") == b"a"
        echo.drop()
        assert one.recv(1) == b""
