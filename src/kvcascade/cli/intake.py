"""Putting chunks of one namespace into a tier, as an engine would, but without pushing anything out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self

import click

from kvcascade.errors import ConfigError, TierError

if TYPE_CHECKING:
    from kvcascade.tiers import StoredNamespace, Tier, TierSettings
    from kvcascade.types import Buffer, Key, Namespace

__all__ = ["Incoming", "Intake", "Taken", "print_taken"]


class Incoming(NamedTuple):
    """A chunk that comes in."""

    key: "Key"
    payload: "Buffer"
    written: float
    """Unix time of its first write."""


@dataclass(slots=True)
class Taken:
    """What became of the chunks."""

    stored: int = 0
    nbytes: int = 0
    """Payload bytes of those."""
    there: int = 0
    """Were there already."""
    no_room: int = 0
    expired: int = 0
    """Are older than the tier's `ttl`."""
    failed: int = 0
    cause: TierError | None = None
    """Of the last failure."""


class Intake:
    """A tier, open for one namespace. Of what comes, the first counts as used last; what is there keeps its times.

    Raises, on opening:
        ConfigError: an engine has the tier to itself, or it can't be opened as it is described.
        TierError: the medium failed.
    """

    def __init__(
        self, settings: "TierSettings", namespace: "Namespace", weights: str, chunk_bytes: int, engine_id: str
    ) -> None:
        from kvcascade.tiers import OpenContext

        self._settings = settings
        kept = settings.stored(engine_id)
        for one in kept:
            if process := one.locked_by:
                raise ConfigError(f"{one.place} is in use by {process}; end it first. Nothing was stored")
        mine = [one for one in kept if one.namespace.digest == namespace.digest]
        others = [one for one in kept if one not in mine]
        largest = _largest(mine, chunk_bytes) if hasattr(settings, "eviction") else chunk_bytes
        self._tier = settings.open(OpenContext(namespace, largest, engine_id, weights))
        self._room = _room(self._tier, settings, mine, others)
        self._stored: list[Key] = []
        self.taken = Taken()

    def lacking(self, keys: Sequence["Key"]) -> list[bool]:
        """Which of them are not there yet; counts the others.

        Raises:
            TierError: the medium can't say.
        """
        there = self._tier.exists(keys)
        self.taken.there += sum(there)
        return [not one for one in there]

    @property
    def full(self) -> bool:
        """Nothing more is taken."""
        return self._room is not None and self._room <= 0

    def put(self, chunks: Sequence[Incoming]) -> None:
        """Stores what is not there yet, as far as there is room."""
        wanted = []
        for chunk in compress(chunks, self.lacking([chunk.key for chunk in chunks])):
            if self._expired(chunk.written):
                self.taken.expired += 1
            elif self._reserve(len(chunk.payload)):
                wanted.append(chunk)
            else:
                self.taken.no_room += 1
        self._write(wanted)

    def _expired(self, written: float) -> bool:
        return self._settings.ttl is not None and time.time() - written > self._settings.ttl

    def _reserve(self, nbytes: int) -> bool:
        if self._room is None:
            return True
        needed = self._tier.footprint(nbytes)
        if needed > self._room:
            self._room = 0  # what comes later was used less recently: it does not go before this one
            return False
        self._room -= needed
        return True

    def _write(self, chunks: Sequence[Incoming]) -> None:
        from kvcascade.types import OutcomeKind

        outcomes = self._tier.write([chunk.key for chunk in chunks], [chunk.payload for chunk in chunks])
        for chunk, outcome in zip(chunks, outcomes, strict=True):
            if outcome.ok:
                self.taken.stored += 1
                self.taken.nbytes += len(chunk.payload)
                self._stored.append(chunk.key)
            elif outcome.kind is OutcomeKind.REFUSED:
                self.taken.no_room += 1
                self._room = 0
            else:
                self.taken.failed += 1
                self.taken.cause = outcome.cause

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._tier.touch(self._stored[::-1])
        finally:
            self._tier.close()


def print_taken(rows: "Sequence[tuple[TierSettings, Namespace, Taken]]") -> None:
    """A table, one line for each tier and namespace; what failed is said on stderr."""
    from kvcascade.configs.units import format_size

    from .output import print_table

    columns = ("tier", "namespace", "stored", "bytes", "there already", "no room", "too old", "failed")
    cells = [
        (
            tier.name,
            str(namespace),
            f"{taken.stored:,}",
            format_size(taken.nbytes),
            *(f"{count:,}" for count in (taken.there, taken.no_room, taken.expired, taken.failed)),
        )
        for tier, namespace, taken in rows
    ]
    if cells:
        print_table(columns, [cells], right=columns[2:])
    for tier, _, taken in rows:
        if taken.cause is not None:
            click.echo(f"{tier.name}: {taken.cause}", err=True)


def _largest(mine: "Sequence[StoredNamespace]", chunk_bytes: int) -> int:
    """The size that the tier's space is divided by: that of the chunks which are there, where they are larger."""
    there = max((chunk.entry.nbytes for kept in mine for chunk in kept.chunks()), default=0)
    return max(there, chunk_bytes)


def _room(
    tier: "Tier",
    settings: "TierSettings",
    mine: "Sequence[StoredNamespace]",
    others: "Sequence[StoredNamespace]",
) -> int | None:
    """Bytes that may be written without pushing anything out; None where there is no bound."""
    from kvcascade.configs.schema import Watermarks

    usage = tier.usage()
    capacity: int | None = usage.capacity or getattr(settings, "capacity", None)
    if capacity is None:
        return None
    if tier.capabilities.shared:  # above it the tier itself makes room
        capacity = int(capacity * getattr(settings, "watermarks", Watermarks()).high)
    # What a shared tier says of its usage is only what this process has written.
    used = usage.bytes if tier.capabilities.bounded else _bytes(mine)
    return capacity - used - _bytes(others)


def _bytes(kept: "Sequence[StoredNamespace]") -> int:
    return sum(one.holding().bytes for one in kept)
