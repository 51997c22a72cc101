"""What the commands that work on stored chunks have in common."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

import click

from kvcascade.errors import ConfigError, KVCascadeError

if TYPE_CHECKING:
    from kvcascade.tiers import StoredNamespace, TierSettings
    from kvcascade.types import Namespace

__all__ = [
    "ALL_NAMESPACES",
    "NAMESPACE",
    "STACK",
    "TIER",
    "Answers",
    "Throttle",
    "batches",
    "counted",
    "keeping",
    "kept_in",
    "say_damaged",
]

T = TypeVar("T")

BATCH_CHUNKS = 64
BATCH_BYTES = 32 << 20
"""Payload bytes that are in memory at once, where a chunk is not larger than that."""
SLICE = 0.2
"""Seconds; a longer pause would keep Ctrl-C waiting."""

STACK = click.argument("stack")
TIER = click.option("--tier", "name", metavar="NAME", help="Only this tier.")
ALL_NAMESPACES = click.option(
    "--all-namespaces", is_flag=True, help="Also what other tenants than the stack's `namespace` keep there."
)
NAMESPACE = click.option(
    "--namespace",
    "pattern",
    metavar="PATTERN",
    help="Only namespaces with a field like this ('model=llama*'), or whose digest begins so.",
)


class Answers:
    """Goes on with the other tiers where one does not answer, and remembers that for the exit code."""

    def __init__(self) -> None:
        self.code = 0
        self._said: set[str] = set()

    @contextmanager
    def of(self, tier: "TierSettings") -> Iterator[None]:
        """Around what is done with a tier: its trouble is a message."""
        try:
            yield
        except KVCascadeError as error:
            self._say(f"{tier.name}: {error}")
            self.code = max(self.code, 2 if isinstance(error, ConfigError) else 1)

    def _say(self, text: str) -> None:
        if text not in self._said:
            click.echo(text, err=True)
        self._said.add(text)


def counted(chunks: int) -> str:
    """ "1 chunk", "1,200 chunks"."""
    return f"{chunks:,} chunk{'' if chunks == 1 else 's'}"


def keeping(tiers: "Iterable[TierSettings]") -> "list[TierSettings]":
    """Those that keep something outside an engine."""
    from kvcascade.tiers import TierSettings

    return [tier for tier in tiers if type(tier).stored is not TierSettings.stored]


def kept_in(
    tier: "TierSettings", tenant: str | None, pattern: str | None = None, engine_id: str | None = None
) -> "Iterator[StoredNamespace]":
    """What a tier keeps of the namespaces of this tenant (None: of any) that the pattern fits.

    Raises:
        TierError: the medium can't be read.
    """
    for kept in tier.stored(engine_id):
        of = dict(kept.namespace.fields).get("tenant", "")
        if tenant is not None:
            say_damaged(tier, kept.place, of)
        if tenant in (None, of) and (pattern is None or _fits(kept.namespace, pattern)):
            yield kept


def say_damaged(tier: "TierSettings", place: str, tenant: str) -> None:
    """Names what is left alone because its description is damaged."""
    from kvcascade.tiers.stored import UNKNOWN

    if tenant == dict(UNKNOWN.fields)["tenant"]:
        click.echo(
            f"{tier.name}: {place} is left alone: its namespace.json is damaged, so nobody can say whose it is "
            "(--all-namespaces takes it in)",
            err=True,
        )


def _fits(namespace: "Namespace", pattern: str) -> bool:
    fields = [f"{name}={value}" for name, value in namespace.fields]
    texts = [str(namespace), *fields]
    return namespace.digest.hex().startswith(pattern) or any(fnmatchcase(text, pattern) for text in texts)


def batches(things: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Groups whose payloads, of `nbytes` each, fit into memory together."""
    batch: list[T] = []
    total = 0
    for thing in things:
        if batch and (len(batch) == BATCH_CHUNKS or total + nbytes(thing) > BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(thing)
        total += nbytes(thing)
    if batch:
        yield batch


class Throttle:
    """Keeps to a number of bytes a second, on the average since the beginning."""

    def __init__(
        self,
        rate: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._began = clock()
        self._bytes = 0

    def passed(self, nbytes: int, go_on: Callable[[], object] = lambda: None) -> None:
        """Waits until that many more bytes may have passed; `go_on` is called now and then, and may raise."""
        self._bytes += nbytes
        if self._rate is None:
            return
        while (ahead := self._bytes / self._rate - (self._clock() - self._began)) > 0:
            go_on()
            self._sleep(min(ahead, SLICE))
