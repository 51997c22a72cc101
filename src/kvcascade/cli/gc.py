"""`kvcascade gc`: removes what is of no use any more, or what is asked for."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import click

from kvcascade.errors import ConfigError

from .holdings import choose
from .kept import ALL_NAMESPACES, NAMESPACE, STACK, TIER, Answers, counted, kept_in
from .options import DURATION, HEX
from .progress import PROGRESS, interruptible, progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from kvcascade.tiers import Removed, StoredChunk, StoredNamespace, TierSettings


@click.command
@STACK
@TIER
@NAMESPACE
@click.option("--older-than", type=DURATION, help="Chunks that were written longer ago: 7d.")
@click.option("--unused-for", type=DURATION, help="Chunks that were last used longer ago: 1d.")
@click.option("--prefix", type=HEX, help="Chunks whose key begins so.")
@ALL_NAMESPACES
@click.option("--dry-run", is_flag=True, help="Only show what would go.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@PROGRESS
@click.pass_context
def gc(
    ctx: click.Context,
    stack: str,
    name: str | None,
    pattern: str | None,
    older_than: float | None,
    unused_for: float | None,
    prefix: str | None,
    all_namespaces: bool,
    dry_run: bool,
    yes: bool,
    progress: bool | None,
) -> None:
    """Removes what is of no use any more, after showing it and asking.

    Without criteria that is what nobody can ever read again: chunks of epochs that are void and that no running
    engine is in, temporaries of killed engines, empty folders; and what lies above the capacity of a shared
    directory, of whichever namespace, where no engine sees to that. With --namespace, --older-than, --unused-for
    or --prefix it is the chunks that all of these fit, of any epoch.

    Only what belongs to the stack's `namespace` goes. A directory that engines share is cleaned beside them; what
    one engine has to itself stays.
    """
    from kvcascade.configs import load_stack

    settings = load_stack(stack)
    criteria = _Criteria(pattern, older_than, unused_for, prefix, time.time())
    tenant = None if all_namespaces else settings.namespace
    answers, tiers = Answers(), choose(settings, name)
    if dry_run or not yes:
        planned = _go(tiers, tenant, criteria, True, answers, progress)
        _print(planned)
        if not planned or dry_run:
            click.echo("Nothing was removed (--dry-run)." if planned else "There is nothing to remove.")
            ctx.exit(answers.code)
        if not click.confirm(f"Remove {_sum(planned)}?"):
            click.echo("Nothing was removed.")
            ctx.exit(1)
        answers = Answers()
    done = _go(tiers, tenant, criteria, False, answers, progress)
    for one in done:
        click.echo(f"{one.tier}: removed {_in_words(one.removed)} of {one.place}")
    if not done:
        click.echo("There is nothing to remove.")
    ctx.exit(answers.code)


class _Criteria(NamedTuple):
    pattern: str | None
    older_than: float | None
    unused_for: float | None
    prefix: str | None
    now: float

    @property
    def given(self) -> bool:
        return any(one is not None for one in self[:4])

    def fit(self, chunk: "StoredChunk") -> bool:
        written, used = self.now - chunk.entry.written, self.now - chunk.entry.used
        return written >= (self.older_than or 0) and used >= (self.unused_for or 0)


class _Done(NamedTuple):
    tier: str
    place: str
    namespace: str
    removed: "Removed"


def _go(
    tiers: "list[TierSettings]",
    tenant: str | None,
    criteria: _Criteria,
    dry_run: bool,
    answers: Answers,
    progress: bool | None,
) -> list[_Done]:
    """Removes, or only counts; one for each namespace in which there is something."""
    done = []
    with _going(criteria) as go_on, progress_bar("looking at" if dry_run else "removing", progress) as advance:
        for tier in tiers:
            with answers.of(tier):
                if not criteria.given:
                    removed = tier.sweep(dry_run)
                    if removed != (0, 0, 0):
                        done.append(_Done(tier.name, f"{tier.name} as a whole", "", removed))
                for kept in list(kept_in(tier, tenant, criteria.pattern)):
                    with answers.of(tier):
                        removed = _remove(kept, criteria, dry_run, go_on, advance)
                        if removed != (0, 0, 0):
                            done.append(_Done(tier.name, kept.place, str(kept.namespace), removed))
    return done


def _going(criteria: _Criteria) -> "AbstractContextManager[Callable[[], None]]":
    """What is swept may be left at any point: then Ctrl-C comes at once."""
    return interruptible() if criteria.given else nullcontext(lambda: None)


def _remove(
    kept: "StoredNamespace",
    criteria: _Criteria,
    dry_run: bool,
    go_on: "Callable[[], None]",
    advance: "Callable[[int, int], None]",
) -> "Removed":
    from kvcascade.tiers import Removed

    go_on()
    if not criteria.given:
        return kept.sweep(dry_run)

    def fitting() -> "Iterator[StoredChunk]":
        for chunk in kept.chunks(criteria.prefix or ""):
            go_on()
            advance(1, chunk.entry.nbytes)
            if criteria.fit(chunk):
                yield chunk

    if process := kept.locked_by:
        if next(fitting(), None) is None:
            return Removed()
        raise ConfigError(f"{kept.place} is in use by {process}; end it first. What it holds stays")
    if not dry_run:
        return kept.remove(fitting())
    sizes = [chunk.entry.nbytes for chunk in fitting()]
    return Removed(len(sizes), sum(sizes))


def _sum(planned: list[_Done]) -> str:
    from kvcascade.tiers import Removed

    total = Removed()
    for one in planned:
        total = total.plus(one.removed)
    return _in_words(total)


def _in_words(removed: "Removed") -> str:
    from kvcascade.configs.units import format_size

    others = f" and {removed.others:,} other files and folders" if removed.others else ""
    return f"{counted(removed.chunks)}{others} ({format_size(removed.bytes)})"


def _print(planned: list[_Done]) -> None:
    from kvcascade.configs.units import format_size

    from .output import print_table

    if planned:
        columns = ("tier", "place", "namespace", "chunks", "bytes", "other files")
        rows = [
            (
                one.tier,
                one.place,
                one.namespace,
                f"{one.removed.chunks:,}",
                format_size(one.removed.bytes),
                f"{one.removed.others:,}",
            )
            for one in planned
        ]
        print_table(columns, [rows], right=columns[3:])
