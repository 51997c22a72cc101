"""`kvcascade verify`: are the bytes of what is stored right?"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from kvcascade.errors import ConfigError

from .holdings import choose
from .kept import ALL_NAMESPACES, STACK, TIER, Answers, Throttle, batches, kept_in
from .options import SHARE, SIZE
from .progress import PROGRESS, interruptible, progress_bar

if TYPE_CHECKING:
    from kvcascade.tiers import Reading, StoredChunk, StoredNamespace, TierSettings


@click.command
@STACK
@TIER
@ALL_NAMESPACES
@click.option("--sample", type=SHARE, default="100%", show_default=True, help="Check only a random share: 5%.")
@click.option("--rate", type=SIZE, help="Read at most so many bytes a second: 200MiB.")
@click.option(
    "--corrupt",
    type=click.Choice(["report", "remove", "quarantine"]),
    default="report",
    show_default=True,
    help="What happens to what is corrupt; quarantine keeps the latest few for inspection.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")
@PROGRESS
@click.pass_context
def verify(
    ctx: click.Context,
    stack: str,
    name: str | None,
    all_namespaces: bool,
    sample: float,
    rate: int | None,
    corrupt: str,
    as_json: bool,
    progress: bool | None,
) -> None:
    """Reads what the tiers hold, and checks that every byte is right, also beside running engines.

    What is written, evicted or reset meanwhile counts as gone, not as corrupt. A folder that an engine has to
    itself can be checked, but nothing is removed from it: the engine removes what it reads corrupt. Exit code 1
    where something is corrupt or can't be read.
    """
    from kvcascade.configs import load_stack

    settings = load_stack(stack)
    tenant = None if all_namespaces else settings.namespace
    answers, results = Answers(), list[_Result]()
    try:
        with interruptible() as go_on, progress_bar("verifying", progress) as advance:
            how = _How(sample, Throttle(rate), corrupt, go_on, advance, quiet=as_json)
            for tier in choose(settings, name):
                with answers.of(tier):
                    for kept in kept_in(tier, tenant):
                        results.append(_Result(tier, kept))
                        with answers.of(tier):
                            _verify(results[-1], how)
    finally:
        _print(results, corrupt, as_json)
    ctx.exit(max(answers.code, 0 if all(result.right == result.checked for result in results) else 1))


@dataclass(slots=True)
class _How:
    share: float
    throttle: Throttle
    corrupt: str
    go_on: Callable[[], None]
    advance: Callable[[int, int], None]
    quiet: bool


@dataclass(slots=True)
class _Result:
    tier: "TierSettings"
    kept: "StoredNamespace"
    right: int = 0
    nbytes: int = 0
    gone: int = 0
    failed: int = 0
    removed: int = 0
    flaws: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, str]] = field(default_factory=list)

    @property
    def corrupt(self) -> int:
        return self.flaws.total()

    @property
    def checked(self) -> int:
        return self.right + self.corrupt + self.failed


def _verify(result: _Result, how: _How) -> None:
    if how.corrupt != "report" and (process := result.kept.locked_by):
        raise ConfigError(
            f"{result.kept.place} is in use by {process}, which removes what it reads corrupt; leave --corrupt out"
        )
    if how.corrupt == "quarantine":
        result.kept.remove((), quarantine=True)  # says now where there is none
    for batch in batches(result.kept.chunks(share=how.share), lambda chunk: chunk.entry.nbytes):
        how.go_on()
        nbytes = sum(chunk.entry.nbytes for chunk in batch)
        bad = [
            chunk
            for chunk, reading in zip(batch, result.kept.read(batch), strict=True)
            if _count(result, chunk, reading, how)
        ]
        if bad and how.corrupt != "report":
            result.removed += result.kept.remove(bad, quarantine=how.corrupt == "quarantine").chunks
        how.advance(len(batch), nbytes)
        how.throttle.passed(nbytes, how.go_on)


def _count(result: _Result, chunk: "StoredChunk", reading: "Reading", how: _How) -> bool:
    """Counts what became of one chunk; whether it is corrupt."""
    from kvcascade.types import OutcomeKind

    kind = reading.outcome.kind
    if kind is OutcomeKind.OK:
        result.right += 1
        result.nbytes += len(reading.payload)
        return False
    if kind is OutcomeKind.MISSING:
        result.gone += 1
        return False
    why = reading.flaw.value if reading.flaw else str(reading.outcome.cause)
    result.wrong.append({"key": chunk.entry.key.hex(), "place": chunk.place, "why": why})
    if not how.quiet:
        click.echo(f"{result.tier.name}: {why}: {chunk.place} (key {chunk.entry.key.hex()})")
    if kind is OutcomeKind.CORRUPT:
        result.flaws[why] += 1
        return True
    result.failed += 1
    return False


def _print(results: list[_Result], corrupt: str, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([_to_json(result) for result in results], indent=2))
        return
    if not results:
        click.echo("There is nothing to verify.")
        return
    from kvcascade.configs.units import format_size

    from .output import print_table

    columns = [
        "tier",
        "namespace",
        "checked",
        "bytes right",
        "right",
        "corrupt",
        "can't be read",
        "gone meanwhile",
    ]
    rows = [
        [
            result.tier.name,
            str(result.kept.namespace),
            f"{result.checked:,}",
            format_size(result.nbytes),
            *(f"{count:,}" for count in (result.right, result.corrupt, result.failed, result.gone)),
            *([f"{result.removed:,}"] if corrupt != "report" else []),
        ]
        for result in results
    ]
    if corrupt != "report":
        columns.append("removed" if corrupt == "remove" else "quarantined")
    print_table(columns, [rows], right=columns[2:])


def _to_json(result: _Result) -> dict[str, Any]:
    return {
        "tier": result.tier.name,
        "namespace": dict(result.kept.namespace.fields),
        "checked": result.checked,
        "bytes_right": result.nbytes,
        "right": result.right,
        "corrupt": result.corrupt,
        "failed": result.failed,
        "gone": result.gone,
        "removed": result.removed,
        "wrong": result.wrong,
    }
