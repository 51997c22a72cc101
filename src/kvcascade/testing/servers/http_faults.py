"""A misbehaving HTTP server: passes requests on to a real one, but for those that a test wants spoiled."""

import http.client
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import NamedTuple, Self
from xml.sax.saxutils import escape

from .base import HOST

__all__ = ["HttpFaults", "Reply", "Seen"]

_PIECE = 1 << 16
_PATIENCE = 60.0


class Seen(NamedTuple):
    """A request that has come."""

    method: str
    target: str
    fields: Mapping[str, str]
    """By name, in lower case."""


class Reply(NamedTuple):
    """An answer, before it is sent."""

    status: int
    fields: dict[str, str]
    body: bytes


class _Fault(NamedTuple):
    act: Callable[["_Handler", Seen], None]
    method: str
    """"" for any."""
    within: str
    """What the target holds."""


class HttpFaults:
    """Listens on a free port of 127.0.0.1 (`port`) for a server on `upstream_port`. A context manager.

    Faults are set from the test's thread. Each is for the next `times` requests of its `method` ("" for any) whose
    target holds `within`; the latest that was set comes first.

    Notes:
        `_lock` covers faults and what was seen. Each connection has a thread.
    """

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._seen: list[Seen] = []
        self._accepted = 0
        self._released = threading.Event()
        self._server = _Server((HOST, 0), _Handler, self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="http-faults")
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def seen(self) -> list[Seen]:
        """All requests so far, in their order."""
        with self._lock:
            return list(self._seen)

    @property
    def accepted(self) -> int:
        """Connections so far."""
        return self._accepted

    def forget(self) -> None:
        """Forgets what was seen."""
        with self._lock:
            self._seen.clear()

    # Faults

    def answer(
        self,
        status: int,
        code: str = "",
        message: str = "",
        method: str = "",
        within: str = "",
        times: int = 1,
        early: bool = False,
        **fields: str,
    ) -> None:
        """Answers with an error, in the words of S3. `early`: before the request's body has come, and closes.
        `fields` of the answer are written with underscores."""
        inside = "".join(
            f"<{name}>{escape(text)}</{name}>" for name, text in (("Code", code), ("Message", message)) if text
        )
        region = fields.pop("Region", "")
        inside += f"<Region>{escape(region)}</Region>" if region else ""
        body = f'<?xml version="1.0"?><Error>{inside}</Error>'.encode() if inside else b""
        named = {name.replace("_", "-"): value for name, value in fields.items()}
        self._add(lambda handler, seen: handler.reply(Reply(status, named, body), early), method, within, times)

    def alter(self, change: Callable[[Reply], Reply], method: str = "", within: str = "", times: int = 1) -> None:
        """Changes the real server's answer."""
        self._add(lambda handler, seen: handler.reply(change(handler.ask(seen))), method, within, times)

    def cut(self, after: int, method: str = "GET", within: str = "", times: int = 1) -> None:
        """Closes the connection after so many bytes of the answer's body."""
        self._add(lambda handler, seen: handler.reply(handler.ask(seen), cut=after), method, within, times)

    def hang(self, after: int | None = None, method: str = "", within: str = "", times: int = 1) -> None:
        """Sends so many bytes of the answer's body (None: not even a head), then nothing until `release`."""

        def act(handler: "_Handler", seen: Seen) -> None:
            if after is None:
                self._released.wait(_PATIENCE)
            handler.reply(handler.ask(seen), cut=after, before_cut=lambda: self._released.wait(_PATIENCE))

        self._add(act, method, within, times)

    def raw(self, sent: bytes, method: str = "", within: str = "", times: int = 1) -> None:
        """Sends these bytes for an answer (b"": none) and closes the connection."""
        self._add(lambda handler, seen: handler.raw(sent), method, within, times)

    def heal(self) -> None:
        """Takes all faults away."""
        with self._lock:
            self._faults.clear()

    def release(self) -> None:
        """Lets go what hangs."""
        self._released.set()

    def close(self) -> None:
        self.release()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For the threads of the connections

    def connected(self) -> None:
        with self._lock:
            self._accepted += 1

    def next_act(self, seen: Seen) -> Callable[["_Handler", Seen], None]:
        """What is to be done with a request."""
        with self._lock:
            self._seen.append(seen)
            for fault in reversed(self._faults):
                if fault.method in ("", seen.method) and fault.within in seen.target:
                    self._faults.remove(fault)
                    return fault.act
        return lambda handler, one: handler.reply(handler.ask(one))

    def _add(self, act: Callable[["_Handler", Seen], None], method: str, within: str, times: int) -> None:
        with self._lock:
            self._faults += [_Fault(act, method, within) for _ in range(times)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type["_Handler"], faults: HttpFaults) -> None:
        super().__init__(address, handler)
        self.faults = faults

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self._faults = self.server.faults
        self._faults.connected()
        self._upstream = http.client.HTTPConnection(HOST, self._faults._upstream_port, timeout=_PATIENCE)

    def finish(self) -> None:
        self._upstream.close()
        with suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base
        """Tests look at what was `seen`."""

    def handle_one_request(self) -> None:
        self.raw_requestline = self.rfile.readline(_PIECE)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        fields = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(self.command, self.path, fields)
        self._unread = int(fields.get("content-length", 0))
        self._faults.next_act(seen)(self, seen)

    def ask(self, seen: Seen) -> Reply:
        """The real server's answer."""
        body = self._read_body()
        self._upstream.request(seen.method, seen.target, body, dict(seen.fields))
        answer = self._upstream.getresponse()
        fields = {name: value for name, value in answer.getheaders() if name.lower() != "transfer-encoding"}
        reply = Reply(answer.status, fields, answer.read())
        if answer.will_close:
            self._upstream.close()
        return reply

    def reply(
        self,
        reply: Reply,
        early: bool = False,
        cut: int | None = None,
        before_cut: Callable[[], object] = lambda: None,
    ) -> None:
        if not early:
            self._read_body()
        length = next((value for name, value in reply.fields.items() if name.lower() == "content-length"), None)
        fields = reply.fields if length is not None else {**reply.fields, "Content-Length": str(len(reply.body))}
        lines = [
            f"HTTP/1.1 {reply.status} Because",
            *(f"{name}: {value}" for name, value in fields.items()),
            "",
            "",
        ]
        body = reply.body if self.command != "HEAD" else b""
        self.wfile.write("\r\n".join(lines).encode("latin-1") + (body if cut is None else body[:cut]))
        if cut is not None:
            before_cut()
        if cut is not None or early:
            self.close_connection = True

    def raw(self, sent: bytes) -> None:
        self._read_body()
        self.wfile.write(sent)
        self.close_connection = True

    def _read_body(self) -> bytes:
        body = self.rfile.read(self._unread)
        self._unread = 0
        return body
