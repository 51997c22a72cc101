"""What a replay found out: as a table for a person, and as JSON."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.table import Table

from kvcascade.configs.units import format_size
from kvcascade.manager.stats import Histogram, StackStats, TierStats

from .runner import Tally

__all__ = ["Report", "Sample", "render", "to_json"]


class Sample(NamedTuple):
    """The state after so many requests. Counts are since the start."""

    requests: int
    chunks: int
    hits: tuple[int, ...]
    """Chunks found in the GPU, then in each tier."""
    used: tuple[int, ...]
    """Bytes on each tier."""


@dataclass(slots=True)
class Report:
    """A replay that has ended, or was stopped."""

    trace: str
    chunk_bytes: int
    total: int
    """Requests that were to be played."""
    tally: Tally = field(default_factory=Tally)
    tiers: list[TierStats] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False
    skipped: int = 0
    """Broken lines of the trace that were left out."""
    samples: list[Sample] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """What hits are counted for: the GPU, then each tier."""
        return ["GPU", *(tier.name for tier in self.tiers)]

    def take(self, tally: Tally, stats: StackStats) -> None:
        """Notes the state now, and as a sample."""
        self.tally, self.tiers = tally, stats.tiers
        hits = (tally.gpu_hits, *(tier.hits for tier in stats.tiers))
        used = tuple(tier.bytes for tier in stats.tiers)
        self.samples.append(Sample(tally.requests, tally.chunks, hits, used))


def to_json(report: Report) -> dict[str, Any]:
    """The report as plain data: counts in chunks, sizes in bytes, times in seconds, rates as shares of 1."""
    tally = report.tally
    return {
        "trace": report.trace,
        "chunk_bytes": report.chunk_bytes,
        "requests": tally.requests,
        "requests_asked": report.total,
        "interrupted": report.interrupted,
        "skipped_lines": report.skipped,
        "seconds": round(report.seconds, 3),
        "chunks": tally.chunks,
        "hits": tally.gpu_hits + tally.loaded,
        "gpu_hits": tally.gpu_hits,
        "hit_rate": round(tally.hit_rate, 6),
        "prompt_tokens": tally.prompt_tokens,
        "prompt_tokens_without_prefill": tally.cached_tokens,
        "share_without_prefill": round(tally.cached_share, 6),
        "loaded": tally.loaded,
        "wrong_bytes": 0,
        "stored": tally.stored,
        "refused": tally.refused,
        "tiers": [_tier_json(tier, tally) for tier in report.tiers],
    }


def _tier_json(tier: TierStats, tally: Tally) -> dict[str, Any]:
    counts = ("chunks", "bytes", "capacity", "hits", "evictions", "written", "written_bytes", "read", "read_bytes")
    troubles = ("failed_writes", "failed_reads", "corrupt", "refused", "shed", "dropped", "timed_out")
    return {
        "name": tier.name,
        "type": tier.type,
        "up": tier.up,
        **{name: getattr(tier, name) for name in counts + troubles},
        "hit_rate": round(_share(tier.hits, tally.chunks), 6),
        "misses": {reason.value: number for reason, number in tier.misses.most_common()},
        "write_seconds": round(tier.write_latency.total, 3),
        "read_seconds": round(tier.read_latency.total, 3),
    }


def render(report: Report, console: Console) -> None:
    """Prints the report for a person."""
    console.print(Group(_table(report), *_words(report)), highlight=False)


_Row = tuple[str, Callable[[TierStats], str]]


def _table(report: Report) -> Table:
    table = Table(title=f"{report.trace} through {' -> '.join(tier.name for tier in report.tiers)}")
    table.add_column("")
    for tier in report.tiers:
        table.add_column(tier.name if tier.name == tier.type else f"{tier.name} ({tier.type})", justify="right")
    for section in _sections(report):
        for label, cell in section:
            table.add_row(label, *(cell(tier) for tier in report.tiers))
        table.add_section()
    return table


def _sections(report: Report) -> list[list[_Row]]:
    """The table's rows. Misses and troubles only where there are any."""
    reasons = sorted({reason for tier in report.tiers for reason in tier.misses}, key=lambda reason: reason.value)
    misses: list[_Row] = [
        (f"missed: {reason.value}", lambda tier, reason=reason: f"{tier.misses[reason]:,}")  # type: ignore[misc]
        for reason in reasons
    ]
    return [
        [
            ("hit rate", lambda tier: f"{_share(tier.hits, report.tally.chunks):.2%}"),
            ("chunks hit", lambda tier: f"{tier.hits:,}"),
            *misses,
        ],
        [
            ("chunks written", lambda tier: f"{tier.written:,}"),
            ("bytes written", lambda tier: format_size(tier.written_bytes)),
            ("write speed*", lambda tier: _speed(tier.written_bytes, tier.write_latency)),
            ("chunks read", lambda tier: f"{tier.read:,}"),
            ("bytes read", lambda tier: format_size(tier.read_bytes)),
            ("read speed*", lambda tier: _speed(tier.read_bytes, tier.read_latency)),
        ],
        [
            ("evicted chunks", lambda tier: f"{tier.evictions:,}"),
            ("chunks held", lambda tier: f"{tier.chunks:,}"),
            ("bytes held", _held),
            ("capacity", lambda tier: "no bound" if tier.capacity is None else format_size(tier.capacity)),
        ],
        _troubles(report),
    ]


def _troubles(report: Report) -> list[_Row]:
    names = ("refused", "shed", "dropped", "timed_out", "failed_writes", "failed_reads", "corrupt")
    return [
        (name.replace("_", " "), lambda tier, name=name: f"{getattr(tier, name):,}")  # type: ignore[misc]
        for name in names
        if any(getattr(tier, name) for tier in report.tiers)
    ]


def _words(report: Report) -> list[str]:
    tally = report.tally
    lines = [
        f"{tally.requests:,} requests in {report.seconds:.1f} s: {tally.prompt_tokens:,} prompt tokens "
        f"in {tally.chunks:,} chunks of {format_size(report.chunk_bytes)}.",
        f"[bold]{tally.hit_rate:.2%} of the chunks were found; {tally.cached_share:.2%} of the prompt tokens "
        "needed no prefill.[/bold]",
        f"{tally.loaded:,} chunks were loaded and compared byte for byte: 0 wrong bytes.",
    ]
    if tally.gpu_hits:
        lines.append(f"{tally.gpu_hits:,} chunks were found in the GPU's own cache, before the stack was asked.")
    if tally.refused:
        lines.append(f"{tally.refused:,} chunks were refused, since the first tier had no room for them.")
    down = [tier.name for tier in report.tiers if not tier.up]
    if down:
        lines.append(f"[yellow]Down at the end: {', '.join(down)}.[/yellow]")
    if report.skipped:
        lines.append(f"{report.skipped:,} broken lines of the trace were left out.")
    if report.interrupted:
        lines.append(
            f"[yellow]Stopped by Ctrl-C: {report.total - tally.requests:,} requests were not played.[/yellow]"
        )
    lines.append("[dim]* bytes over the seconds that the tier's jobs ran, summed over its threads[/dim]")
    return lines


def _share(part: int, whole: int | None) -> float:
    return part / whole if whole else 0.0


def _speed(nbytes: int, latency: Histogram) -> str:
    return f"{nbytes / latency.total / 1e9:.2f} GB/s" if nbytes and latency.total else "-"


def _held(tier: TierStats) -> str:
    full = "" if tier.capacity is None else f" ({_share(tier.bytes, tier.capacity):.0%})"
    return format_size(tier.bytes) + full
