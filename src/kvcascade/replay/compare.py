"""The what-if: what caches of given sizes would have found in a trace, by policy, without moving bytes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kvcascade.configs import StackSettings
from kvcascade.configs.registry import EVICTION, known, nearest, resolve
from kvcascade.configs.schema import PromoteAfter, SecondarySettings, TierBase, Watermarks
from kvcascade.configs.units import format_size, parse_size
from kvcascade.errors import ConfigError
from kvcascade.tiers.base import Probe, TierSettings
from kvcascade.tiers.host import HostSettings

from .driven import Driven
from .simulate import POLICIES, HitCount, Prompt, lru, simulate
from .simulate_stack import StackHits, TierModel, simulate_stack

__all__ = [
    "Capacity",
    "Comparison",
    "compare",
    "comparison_json",
    "models_of",
    "parse_capacities",
    "parse_policies",
    "render_comparison",
]

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True, slots=True)
class Capacity:
    """A size that a cache is simulated with, as the user gave it: one of the two is set."""

    text: str
    percent: float | None = None
    chunks: int | None = None

    def of(self, distinct: int) -> int:
        """In chunks, of a trace with so many distinct ones; rounded down.

        Raises:
            ConfigError: that is less than one chunk.
        """
        chunks = self.chunks if self.chunks is not None else int(distinct * (self.percent or 0.0) / 100)
        if chunks < 1:
            raise ConfigError(f"--capacity {self.text}: is less than one chunk; allowed: one chunk or more")
        return chunks


def parse_policies(text: str) -> list[str]:
    """The policies of "lru,optimal": those with a plain simulation, and all that are installed.

    Raises:
        ConfigError: one is not known.
    """
    names = [name.strip() for name in text.split(",")]
    allowed = [*POLICIES, *sorted(known(EVICTION).keys() - POLICIES.keys())]
    for name in names:
        if name not in allowed:
            hint = nearest(name, allowed)
            raise ConfigError(f"--compare: unknown policy {name!r}{hint}; allowed: {', '.join(allowed)}")
    return list(dict.fromkeys(names))


def _simulate(name: str, prompts: Sequence[Prompt], chunks: int) -> HitCount:
    """By a plain simulation, or where there is none by the policy's own class."""
    if name in POLICIES:
        return POLICIES[name](prompts, chunks)
    return simulate(partial(Driven, resolve(EVICTION, name)), prompts, chunks)


def parse_capacities(text: str, chunk_bytes: int) -> list[Capacity]:
    """The capacities of "1%,500,2GiB": shares of a trace's distinct chunks, chunks, or bytes.

    Raises:
        ConfigError: one is none of these.
    """
    return [_capacity(each.strip(), chunk_bytes) for each in text.split(",")]


def _capacity(text: str, chunk_bytes: int) -> Capacity:
    if match := _PERCENT.fullmatch(text):
        return Capacity(text, percent=float(match[1]))
    if text.isdecimal():
        return Capacity(text, chunks=int(text))
    try:
        return Capacity(text, chunks=parse_size(text) // chunk_bytes)
    except ValueError as error:
        raise ConfigError(
            f"--capacity {text!r}: {error}. Allowed: a share of the distinct chunks (5%), "
            "a number of chunks (5000), or a size (2GiB)"
        ) from error


def models_of(settings: StackSettings, chunk_bytes: int) -> list[TierModel]:
    """The tiers of a stack as the simulation sees them, from the top: how much each holds, and its policies.

    Raises:
        ConfigError: a tier holds no chunk.
    """
    models = [_model(tier, chunk_bytes) for tier in settings.tiers]
    for model in models:
        if model.chunks is not None and model.chunks < 1:
            raise ConfigError(f"the tier {model.name!r} holds no chunk of {format_size(chunk_bytes)}")
    return models


def _model(tier: TierBase, chunk_bytes: int) -> TierModel:
    probe = tier.probe(chunk_bytes) if isinstance(tier, HostSettings | TierSettings) else Probe()
    chunks = probe.chunks
    eviction = getattr(tier, "eviction", None) or "lru"
    if not isinstance(tier, SecondarySettings):
        marks = getattr(tier, "watermarks", Watermarks())
        return TierModel(tier.name, chunks, watermarks=(marks.high, marks.low), eviction=eviction)
    promote = tier.promote
    after = promote.after if isinstance(promote, PromoteAfter) else {"always": 1, "never": inf}[promote]
    soft = (probe.soft.high, probe.soft.low) if probe.soft is not None else None
    return TierModel(
        tier.name, chunks, tier.write, tier.fill, after, tier.admit_after, eviction=eviction, soft=soft
    )


class Row(NamedTuple):
    """One capacity, and what each policy would have found with it."""

    capacity: Capacity
    chunks: int
    found: list[HitCount]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What caches would have found in one trace."""

    trace: str
    requests: int
    distinct: int
    """Chunks that are different ones."""
    infinite: HitCount
    policies: list[str]
    rows: list[Row]
    tiers: list[TierModel]
    """Those of the stack that was simulated too; [] for none."""
    stack: StackHits


def compare(
    trace: str,
    prompts: Sequence[Prompt],
    policies: list[str],
    capacities: list[Capacity],
    tiers: list[TierModel],
) -> Comparison:
    """Simulates one tier by each policy and capacity, and the tiers as a stack.

    Raises:
        ConfigError: a capacity is less than one chunk of this trace.
    """
    distinct = len({chunk for prompt in prompts for chunk in prompt})
    rows = [
        Row(capacity, chunks, [_simulate(name, prompts, chunks) for name in policies])
        for capacity, chunks in ((capacity, capacity.of(distinct)) for capacity in capacities)
    ]
    stack = simulate_stack(prompts, tiers)
    return Comparison(trace, len(prompts), distinct, lru(prompts, None), policies, rows, tiers, stack)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data: capacities in chunks, rates as shares of 1."""
    stack = {
        "hit_rate": round(comparison.stack.rate, 6),
        "tiers": [
            {"name": tier.name, "chunks": tier.chunks, "hits": hits, "written": written}
            for tier, hits, written in zip(
                comparison.tiers, comparison.stack.tiers, comparison.stack.written, strict=True
            )
        ],
    }
    return {
        "trace": comparison.trace,
        "requests": comparison.requests,
        "chunks": comparison.infinite.chunks,
        "distinct_chunks": comparison.distinct,
        "infinite": round(comparison.infinite.rate, 6),
        "capacities": [
            {"capacity": row.capacity.text, "chunks": row.chunks, "hit_rate": _rates(comparison, row)}
            for row in comparison.rows
        ],
        "stack": stack if comparison.tiers else None,
    }


def _rates(comparison: Comparison, row: Row) -> dict[str, float]:
    return {name: round(found.rate, 6) for name, found in zip(comparison.policies, row.found, strict=True)}


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Prints the comparison for a person."""
    table = Table(title=comparison.trace, title_justify="left")
    for heading in ("capacity", "chunks", *comparison.policies):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        table.add_row(row.capacity.text, f"{row.chunks:,}", *(f"{found.rate:.4f}" for found in row.found))
    table.add_section()
    infinite = [f"{comparison.infinite.rate:.4f}"] * len(comparison.policies)
    table.add_row("infinite", f"{comparison.distinct:,}", *infinite)
    chunks = comparison.infinite.chunks
    counts = f"{comparison.requests:,} requests, {chunks:,} chunks, {comparison.distinct:,} of them distinct"
    console.print(table, counts, highlight=False)
    if comparison.tiers:
        _render_stack(comparison, console)


def _render_stack(comparison: Comparison, console: Console) -> None:
    stack = comparison.stack
    table = Table(title=f"{comparison.trace}, the stack simulated", title_justify="left")
    table.add_column("tier")
    for heading in ("chunks", "hits", "hit rate", "written"):
        table.add_column(heading, justify="right")
    for tier, hits, written in zip(comparison.tiers, stack.tiers, stack.written, strict=True):
        size = "no bound" if tier.chunks is None else f"{tier.chunks:,}"
        table.add_row(tier.name, size, f"{hits:,}", f"{hits / stack.chunks:.4f}", f"{written:,}")
    table.add_section()
    table.add_row("whole stack", "", f"{sum(stack.tiers):,}", f"{stack.rate:.4f}")
    console.print(table, highlight=False)
