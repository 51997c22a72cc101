"""Which engines run: each keeps a key on the server that says so, and expires when nobody renews it.

The server's list of clients tells it, too, where the user may see it; but not of an engine whose connections were
closed because they were idle, nor by its name where CLIENT SETNAME is not permitted.
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from kvcascade.errors import TierError, TierRefused

from .chunks import Names, client_name
from .exchange import Exchange, plain
from .listing import scan
from .replies import Refusal

__all__ = ["BEAT_EVERY", "SILENT", "Presence", "engines_of", "in_words", "new_identity"]

BEAT_EVERY = 60.0
"""Seconds between two signs of life."""
SILENT = 300.0
"""Seconds without one after which an engine counts as ended, whatever kept it from saying so."""


def new_identity() -> str:
    """Of an engine of this process: HOST~PID~TOKEN."""
    host = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in socket.gethostname())
    return f"{host}~{os.getpid()}~{secrets.token_hex(4)}"


def in_words(who: str) -> str:
    """The process behind an identity."""
    host, _, rest = who.partition("~")
    return f"process {rest.partition('~')[0]} on {host}" if rest else who


class Presence:
    """The sign of one engine. Every call does I/O."""

    def __init__(self, name: bytes, exchange: Exchange, clock: Callable[[], float] = time.monotonic) -> None:
        """`name`: of the sign."""
        self._name = name
        self._exchange = exchange
        self._clock = clock
        self._stamp = b""
        self._due = float("-inf")

    def beat(self, stamp: bytes) -> None:
        """The engine lives, in this epoch: said now and then. A full server keeps what it was told last.

        Raises:
            TierError: it can't be told.
        """
        if stamp == self._stamp and self._clock() < self._due:
            return
        pause = round(SILENT * 1000)
        name = self._name
        (answer,) = self._exchange.ask([plain(name, "SET", name, stamp.hex(), "PX", pause)])
        if isinstance(answer, Refusal) and answer.code == "OOM":
            self._exchange.ask([plain(name, "PEXPIRE", name, pause)])
        else:
            self._exchange.checked(name, answer)
            self._stamp = stamp
        self._due = self._clock() + BEAT_EVERY

    def leave(self) -> None:
        """It ends. Where that can't be said it shows by and by."""
        if self._stamp:
            with suppress(TierError):
                self._exchange.command(self._name, "UNLINK", self._name)


def engines_of(exchange: Exchange, names: Names, digest: str) -> dict[str, str | None]:
    """The engines of a namespace, and the stamp of the epoch each is in, in hexadecimal; None where only its
    connection is known.

    Raises:
        TierError: the servers can't be asked.
    """
    found: dict[str, str | None] = {}
    base = names.engine("")
    for batch in scan(exchange, base):
        for name, answer in zip(batch, exchange.ask([plain(name, "GET", name) for name in batch]), strict=True):
            stamp = exchange.checked(name, answer)
            if isinstance(stamp, bytes):
                found[name[len(base) :].decode(errors="replace")] = stamp.decode(errors="replace")
    for who in _connected(exchange, client_name(digest)):
        found.setdefault(who, None)
    return found


def _connected(exchange: Exchange, name: str) -> set[str]:
    """Who is connected by a name that begins like this; as far as the user may see it."""
    found: set[str] = set()
    for where in exchange.links.route.primaries():
        try:
            clients = exchange.command_at(where, "CLIENT", "LIST")
        except TierRefused:
            return found
        words = clients.decode(errors="replace").split() if isinstance(clients, bytes) else []
        found |= {word.removeprefix(f"name={name}") for word in words if word.startswith(f"name={name}")}
    return found
