"""Messages between the processes of one engine, and a file descriptor with them, over a Unix socket that has no
file (an abstract one). Processes of other users are not listened to."""

import json
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from kvcascade.errors import ConfigError

__all__ = ["address", "ask", "connected", "receive_checked", "send"]

logger = logging.getLogger("kvcascade")

_SIZE = struct.Struct("<I")
_CREDENTIALS = struct.Struct("<3i")  # pid, uid, gid
_LONGEST = 1 << 20
_PATIENCE = 10.0


def address(engine_id: str) -> str:
    return f"\0kvcascade/{os.geteuid()}/{engine_id}"


@contextmanager
def connected(engine_id: str) -> Iterator[socket.socket | None]:
    """None where nobody of this user listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(address(engine_id))
        except OSError:
            yield None
            return
        yield connection if _is_ours(connection) else None


def ask(connection: socket.socket, hello: dict[str, Any], end: float) -> tuple[dict[str, Any], int]:
    """Sends a hello; returns the answer and its file descriptor, which the caller closes.

    Args:
        end: when to give up, by the monotonic clock.

    Raises:
        ConfigError: there is no descriptor in the answer, or no answer.
    """
    connection.settimeout(max(1.0, end - time.monotonic()))
    try:
        send(connection, hello)
        answer, fd = _receive(connection)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the host pool was not handed over: {error}") from error
    if fd is None:
        raise ConfigError(answer.get("error", "the host pool was not handed over"))
    return answer, fd


def receive_checked(connection: socket.socket) -> dict[str, Any] | None:
    """A message; None where it is of another user, or none that can be read."""
    connection.settimeout(_PATIENCE)
    try:
        return _receive(connection)[0] if _is_ours(connection) else None
    except (OSError, ValueError) as error:
        logger.debug("a connection to the host pool is of no use: %s", error)
        return None


def send(connection: socket.socket, message: dict[str, Any], fd: int | None = None) -> None:
    raw = json.dumps(message).encode()
    socket.send_fds(connection, [_SIZE.pack(len(raw))], [] if fd is None else [fd])
    connection.sendall(raw)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], int | None]:
    size, fds, _, _ = socket.recv_fds(connection, _SIZE.size, 1)
    with ExitStack() as undo:
        for fd in fds:
            undo.callback(os.close, fd)
        raw = _read(connection, _SIZE.unpack(size)[0]) if len(size) == _SIZE.size else b""
        message = json.loads(raw)
        if not isinstance(message, dict):
            raise ValueError("a message that is no mapping")
        undo.pop_all()
    return message, fds[0] if fds else None


def _read(connection: socket.socket, size: int) -> bytes:
    if size > _LONGEST:
        raise ValueError(f"a message of {size} bytes")
    raw = b""
    while len(raw) < size:
        piece = connection.recv(size - len(raw))
        if not piece:
            raise ValueError("the connection was closed")
        raw += piece
    return raw


def _is_ours(connection: socket.socket) -> bool:
    """Whether the other side is a process of this user."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1]) == os.geteuid()
