"""Which stored chunks are worth moving: those that an engine which starts would find, the last used first."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .kept import Answers, batches, kept_in

if TYPE_CHECKING:
    from kvcascade.tiers import Reading, StoredChunk, StoredNamespace, TierSettings
    from kvcascade.types import Key, Namespace

__all__ = ["Choice", "Chosen", "Selected", "read", "select"]


class Choice(NamedTuple):
    """What is asked for."""

    tenant: str | None
    """The stack's `namespace`; None: any."""
    pattern: str | None = None
    prefix: str = ""
    written_since: float = 0.0
    """Unix time."""
    weights: str | None = None
    """Only chunks of these; None: of any."""


class Chosen(NamedTuple):
    """A chunk, and where it is."""

    tier: "TierSettings"
    kept: "StoredNamespace"
    chunk: "StoredChunk"


@dataclass(slots=True)
class Selected:
    """The chunks of one namespace and one version of the weights. Listed in memory, some 500 bytes each."""

    namespace: "Namespace"
    weights: str
    chunks: "dict[Key, Chosen]" = field(default_factory=dict)

    def recent_first(self) -> list[Chosen]:
        return sorted(self.chunks.values(), key=lambda one: one.chunk.entry.used, reverse=True)

    @property
    def used(self) -> float:
        """Unix time of the last use of any of them."""
        return max(one.chunk.entry.used for one in self.chunks.values())

    @property
    def largest(self) -> int:
        return max(one.chunk.entry.nbytes for one in self.chunks.values())


def select(
    tiers: "Iterable[TierSettings]", choice: Choice, answers: Answers, go_on: Callable[[], None]
) -> list[Selected]:
    """What the tiers keep of what is asked for, each chunk once; the namespace that was used last comes first."""
    found: dict[tuple[bytes, str], Selected] = {}
    for tier in tiers:
        with answers.of(tier):
            for kept in kept_in(tier, choice.tenant, choice.pattern):
                for chunk in kept.chunks(choice.prefix):
                    go_on()
                    weights = chunk.epoch.weights
                    if chunk.epoch.void or weights is None or chunk.entry.written < choice.written_since:
                        continue
                    if choice.weights in (None, weights):
                        place = (kept.namespace.digest, weights)
                        group = found.setdefault(place, Selected(kept.namespace, weights))
                        group.chunks.setdefault(chunk.entry.key, Chosen(tier, kept, chunk))
    return sorted(found.values(), key=lambda group: group.used, reverse=True)


def read(chosen: Iterable[Chosen], answers: Answers) -> "Iterator[list[tuple[Chosen, Reading]]]":
    """The chunks in their order, in batches of bounded memory. Where a tier does not answer, that is said, and its
    chunks are left out."""
    for batch in batches(chosen, lambda one: one.chunk.entry.nbytes):
        readings: dict[int, Reading] = {}
        for kept in {id(one.kept): one.kept for one in batch}.values():
            places = [i for i, one in enumerate(batch) if one.kept is kept]
            with answers.of(batch[places[0]].tier):
                readings.update(zip(places, kept.read([batch[i].chunk for i in places]), strict=True))
        yield [(batch[i], readings[i]) for i in sorted(readings)]
