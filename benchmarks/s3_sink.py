"""A server that speaks just enough of S3 for a benchmark of its clients: objects are kept in memory of this
process, received into place and sent from there, so that the client is what is measured. Small objects are kept
where a client asks for that; larger ones are taken again and again, and for HEAD nothing is ever there.

    python s3_sink.py
"""

import socket
import sys
import threading

OBJECTS: dict[str, memoryview] = {}
_SMALL = 1024
_NONE = memoryview(b"")
_LIST = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'


class Client:
    """One connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._view = memoryview(bytearray(1 << 16))
        self._filled = 0

    def serve(self) -> None:
        try:
            while True:
                self._request(*self._head())
        except (OSError, EOFError):
            self._end.close()

    def _head(self) -> tuple[str, str, dict[str, str]]:
        while (stop := self._view.obj.find(b"\r\n\r\n", 0, self._filled)) < 0:  # type: ignore[attr-defined]
            received = self._end.recv_into(self._view[self._filled : self._filled + 4096])
            if not received:
                raise EOFError
            self._filled += received
        first, *lines = bytes(self._view[:stop]).decode("latin-1").split("\r\n")
        rest = bytes(self._view[stop + 4 : self._filled])
        self._view[: len(rest)] = rest
        self._filled = len(rest)
        method, target, _ = first.split(" ")
        fields = dict(line.lower().split(": ", 1) for line in lines)
        if fields.get("expect") == "100-continue":
            self._end.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return method, target, fields

    def _request(self, method: str, target: str, fields: dict[str, str]) -> None:
        name, _, query = target.partition("?")
        if method == "PUT":
            kept = "if-none-match" in fields and len(OBJECTS.get(name, bytes(_SMALL))) < _SMALL
            self._take(name, int(fields.get("content-length", 0)))
            self._answer(412 if kept else 200)
        elif method == "HEAD":
            self._answer(404)
        elif method == "DELETE":
            self._answer(204)
        elif "list-type" in query:
            self._answer(200, memoryview(_LIST))
        elif name in OBJECTS:
            self._answer(200, OBJECTS[name])
        else:
            self._answer(404, memoryview(b"<Error><Code>NoSuchKey</Code></Error>"))

    def _take(self, name: str, nbytes: int) -> None:
        target = OBJECTS.get(name)
        if target is None or len(target) != nbytes:
            target = OBJECTS[name] = memoryview(bytearray(nbytes))
        taken = min(nbytes, self._filled)
        target[:taken] = self._view[:taken]
        rest = bytes(self._view[taken : self._filled])
        self._view[: len(rest)] = rest
        self._filled = len(rest)
        while taken < nbytes:
            received = self._end.recv_into(target[taken:], 0, socket.MSG_WAITALL)
            if not received:
                raise EOFError
            taken += received

    def _answer(self, status: int, body: memoryview = _NONE) -> None:
        head = f'HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\nETag: "0"\r\n\r\n'.encode()
        sent = self._end.sendmsg([head, body])
        if sent < len(head) + len(body):
            self._end.sendall(body[sent - len(head) :])


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    while True:
        end, _ = listener.accept()
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=Client(end).serve, daemon=True).start()


if __name__ == "__main__":
    main()
