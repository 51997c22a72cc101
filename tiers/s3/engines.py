"""Which engines use a namespace of a bucket: each keeps an object there as a sign of life."""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from kvcascade.errors import TierError

from .bucket import Bucket
from .layout import Home

__all__ = ["BEAT_EVERY", "SILENT", "Presence", "Sign", "signs_of_life"]

BEAT_EVERY = 600.0
"""Seconds between two signs of life."""
SILENT = 1800.0
"""Seconds without one after which an engine counts as ended, whatever kept it from saying so."""


class Sign(NamedTuple):
    """The sign of life of one engine."""

    name: str
    """Of the object."""
    in_words: str
    """The process."""
    stamp: str
    """Of the epoch that it is in, in hexadecimal."""
    lives: bool


class Presence:
    """The sign of this process. Every call does I/O until `end`, and raises TierError where that fails."""

    def __init__(self, bucket: Bucket, home: Home) -> None:
        self._bucket = bucket
        self._home = home
        host = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in socket.gethostname())
        self._who = f"{host}~{os.getpid()}~{secrets.token_hex(4)}"
        self._name = ""

    def beat(self, stamp: bytes, end: float) -> None:
        """The engine lives, in this epoch."""
        name = f"{self._home.engines}{stamp.hex()}/{self._who}"
        self._bucket.write(name, json.dumps({"at": time.time()}).encode(), end)
        if self._name not in ("", name):
            self._remove(end)
        self._name = name

    def leave(self, end: float) -> None:
        """It ends. Where that can't be said it shows by and by."""
        if self._name:
            with suppress(TierError):
                self._remove(end)

    def _remove(self, end: float) -> None:
        for failure in self._bucket.delete([self._name], end):
            if failure is not None:
                raise failure


def signs_of_life(bucket: Bucket, home: Home, end: float) -> Iterator[Sign]:
    """The signs of all engines, of those that were killed, too.

    Raises:
        TierError: the bucket can't be listed.
    """
    now = time.time()
    for found in bucket.list(home.engines, lambda: end):
        stamp, _, who = found.name.removeprefix(home.engines).partition("/")
        host, _, rest = who.partition("~")
        if rest:
            in_words = f"process {rest.partition('~')[0]} on {host}"
            yield Sign(found.name, in_words, stamp, now - found.modified < SILENT)
