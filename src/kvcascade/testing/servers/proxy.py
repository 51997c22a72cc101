"""A TCP proxy that stands between a client and a real server, and spoils what passes through it."""

import socket
import threading
import time
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import Literal, Self

__all__ = ["Proxy"]

Side = Literal["client", "server"]
"""Whom the bytes are for: "client": replies; "server": requests."""

_PIECE = 1 << 16
_TICK = 0.01


class _Act(Enum):
    CUT = "cut"
    STALL = "stall"
    CORRUPT = "corrupt"


class _Fault:
    """What happens to a side once `after` more bytes have passed, whichever connection they belong to."""

    def __init__(self, act: _Act, after: int, times: int | None) -> None:
        self.act = act
        self.after = after
        self.left = after
        self.times = times


class Proxy:
    """Listens on a free port of 127.0.0.1 (`port`) for a server on `upstream_port`. A context manager.

    Faults are set from the test's thread and hold for all connections, those that are open too. `towards` says
    whose bytes are meant: "client" for replies, "server" for requests; `after` how many more of them pass first.
    Without a fault it changes nothing.

    Notes:
        `_lock` covers the faults and the list of connections. Each connection has two threads, one a direction.
    """

    def __init__(self, upstream_port: int, upstream_host: str = "127.0.0.1") -> None:
        self._upstream = (upstream_host, upstream_port)
        self._lock = threading.Lock()
        self._faults: dict[Side, _Fault] = {}
        self._delay = 0.0
        self._rate: float | None = None
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._accepted = 0
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._listen()

    @property
    def accepted(self) -> int:
        """Connections so far."""
        return self._accepted

    @property
    def open(self) -> int:
        """Connections now."""
        with self._lock:
            return len(self._pairs)

    # Faults

    def cut(self, towards: Side = "client", after: int = 0, times: int | None = 1) -> None:
        """Closes the connection in the middle of what it carries: `times` times, None for always."""
        self._set(towards, _Fault(_Act.CUT, after, times))

    def corrupt(self, towards: Side = "client", after: int = 0, times: int | None = 1) -> None:
        """Changes one byte."""
        self._set(towards, _Fault(_Act.CORRUPT, after, times))

    def stall(self, towards: Side = "client", after: int = 0) -> None:
        """Passes nothing on, and keeps connections open, until `heal`."""
        self._set(towards, _Fault(_Act.STALL, after, None))

    def slow(self, delay: float = 0.0, rate: float | None = None) -> None:
        """Holds every piece of at most 64 KiB for `delay` seconds, and passes `rate` bytes a second."""
        with self._lock:
            self._delay, self._rate = delay, rate

    def drop(self) -> None:
        """Closes all open connections, as a firewall or a load balancer does with idle ones."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            _close(*pair)

    def refuse(self) -> None:
        """Closes all connections; new ones are refused until `heal`."""
        _close(self._listener)
        self.drop()

    def heal(self) -> None:
        """Takes all faults away."""
        with self._lock:
            self._faults.clear()
            self._delay, self._rate = 0.0, None
        if self._listener.fileno() < 0 and not self._closed:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self._listen()

    def close(self) -> None:
        """Ends all connections and threads."""
        self._closed = True
        self.refuse()
        self.heal()
        for thread in self._threads:
            thread.join()
        self.drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What passes

    def _set(self, towards: Side, fault: _Fault) -> None:
        with self._lock:
            self._faults[towards] = fault

    def _listen(self) -> None:
        self._start(self._accept, self._listener)

    def _start(self, target: object, *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=arguments, name=f"proxy-{self.port}", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # closed
                return
            self._accepted += 1
            try:
                server = socket.create_connection(self._upstream)
            except OSError:
                _close(client)
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((client, server))
            self._start(self._pump, (client, server), "server")
            self._start(self._pump, (client, server), "client")

    def _pump(self, pair: tuple[socket.socket, socket.socket], towards: Side) -> None:
        source, target = pair if towards == "server" else (pair[1], pair[0])
        with suppress(OSError):
            while piece := source.recv(_PIECE):
                if not self._pass(piece, target, towards):
                    break
        _close(*pair)
        with self._lock:
            if pair in self._pairs:
                self._pairs.remove(pair)

    def _pass(self, piece: bytes, target: socket.socket, towards: Side) -> bool:
        """Sends a piece on, as far as the faults let it; False where the connection is to be cut."""
        pause = self._delay + (len(piece) / self._rate if self._rate else 0.0)
        if pause:
            time.sleep(pause)
        act, at = self._next_act(towards, len(piece))
        if act is None:
            target.sendall(piece)
            return True
        target.sendall(piece[:at])
        if act is _Act.CUT:
            return False
        if act is _Act.CORRUPT:
            target.sendall(bytes([piece[at] ^ 1]) + piece[at + 1 :])
            return True
        while self._stalled(towards):
            if target.fileno() < 0:
                return False
            time.sleep(_TICK)
        target.sendall(piece[at:])
        return True

    def _next_act(self, towards: Side, nbytes: int) -> tuple[_Act | None, int]:
        """What is to happen within the next bytes of a side, and at which of them."""
        with self._lock:
            fault = self._faults.get(towards)
            if fault is None:
                return None, 0
            if fault.left >= nbytes:
                fault.left -= nbytes
                return None, 0
            at, fault.left = fault.left, fault.after if fault.act is not _Act.STALL else 0
            if fault.times is not None:
                fault.times -= 1
                if not fault.times:
                    del self._faults[towards]
            return fault.act, at

    def _stalled(self, towards: Side) -> bool:
        with self._lock:
            fault = self._faults.get(towards)
            return fault is not None and fault.act is _Act.STALL


def _close(*ends: socket.socket) -> None:
    for end in ends:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
