"""A server that speaks just enough of Redis for a benchmark of its clients: values are kept in memory of this
process, received into place and sent from there, so that the client is what is measured.

    python redis_sink.py tcp | unix PATH | tls CERT KEY
"""

import socket
import ssl
import sys
import threading

VALUES: dict[bytes, memoryview] = {}
OK, NONE = b"+OK\r\n", b"$-1\r\n"


class Client:
    """One connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._tls = isinstance(end, ssl.SSLSocket)
        self._ahead = bytearray(1 << 16)
        self._view = memoryview(self._ahead)
        self._start = self._stop = 0

    def serve(self) -> None:
        try:
            while True:
                count = int(self._line()[1:])
                words = [self._word(place) for place in range(count)]
                self._answer(words)
        except (OSError, EOFError):
            self._end.close()

    def _answer(self, words: list[bytes]) -> None:
        command = words[0].upper()
        if command == b"GET":
            value = VALUES.get(words[1])
            if value is None:
                self._end.sendall(NONE)
            elif self._tls:
                for part in (b"$%d\r\n" % len(value), value, b"\r\n"):
                    self._end.sendall(part)
            else:
                self._send([b"$%d\r\n" % len(value), value, b"\r\n"])
        elif command in (b"EXISTS", b"UNLINK", b"DEL"):
            self._end.sendall(b":1\r\n" if words[1] in VALUES else b":0\r\n")
        elif command in (b"CONFIG", b"ROLE", b"SCAN"):
            self._end.sendall(b"*0\r\n")
        else:
            self._end.sendall(OK)

    def _send(self, parts: list[bytes | memoryview]) -> None:
        left = sum(map(len, parts)) - self._end.sendmsg(parts)
        if left:
            self._end.sendall(b"".join(parts)[-left:])

    def _word(self, place: int) -> bytes:
        nbytes = int(self._line()[1:])
        if place == 1:
            self._name = self._exact(nbytes)
            word = bytes(self._name)
        elif place == 2 and nbytes > 1024:
            value = VALUES.get(bytes(self._name))
            if value is None or len(value) != nbytes:
                value = VALUES[bytes(self._name)] = memoryview(bytearray(nbytes))
            self._into(value)
            word = b""
        else:
            word = bytes(self._exact(nbytes))
            if place == 2:
                VALUES[bytes(self._name)] = memoryview(word)
        self._exact(2)
        return word

    def _line(self) -> bytes:
        while (found := self._ahead.find(b"\r\n", self._start, self._stop)) < 0:
            self._fill()
        line = bytes(self._view[self._start : found])
        self._start = found + 2
        return line

    def _exact(self, nbytes: int) -> bytes:
        while self._stop - self._start < nbytes:
            self._fill()
        self._start += nbytes
        return bytes(self._view[self._start - nbytes : self._start])

    def _fill(self) -> None:
        left = bytes(self._view[self._start : self._stop])
        self._view[: len(left)] = left
        self._start, self._stop = 0, len(left)
        received = self._end.recv_into(self._view[self._stop : self._stop + 4096])
        if not received:
            raise EOFError
        self._stop += received

    def _into(self, target: memoryview) -> None:
        taken = min(len(target), self._stop - self._start)
        target[:taken] = self._view[self._start : self._start + taken]
        self._start += taken
        while taken < len(target):
            flags = 0 if self._tls else socket.MSG_WAITALL
            received = self._end.recv_into(target[taken:], 0, flags)
            if not received:
                raise EOFError
            taken += received


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def main() -> None:
    kind = sys.argv[1]
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(sys.argv[2])
        listener.listen()
        say(sys.argv[2])
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        say(listener.getsockname()[1])
    context = None
    if kind == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*sys.argv[2:4])
    while True:
        end, _ = listener.accept()
        if kind != "unix":
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            end = context.wrap_socket(end, server_side=True)
        threading.Thread(target=Client(end).serve, daemon=True).start()


if __name__ == "__main__":
    main()
