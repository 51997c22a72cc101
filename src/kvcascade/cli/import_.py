"""`kvcascade import`: chunks from a file."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from kvcascade.errors import ConfigError, TierRefused, TierUnavailable

from .holdings import choose
from .intake import Incoming, Intake, Taken, print_taken
from .kept import STACK, batches, counted, keeping
from .progress import PROGRESS, interruptible, progress_bar

if TYPE_CHECKING:
    from kvcascade.configs import StackSettings
    from kvcascade.tiers import TierSettings
    from kvcascade.tiers.archive import ArchivedChunk, ArchiveReader, Damage, Section

PIPE = "-"


@click.command(name="import")
@STACK
@click.argument("file")
@click.option(
    "--tier", "name", metavar="NAME", help="Into this tier (default: the last one that keeps something)."
)
@click.option("--engine", default="0", show_default=True, metavar="ID", help="Whose folder of a private tier.")
@click.option(
    "--all-namespaces", is_flag=True, help="Also what belongs to other tenants than the stack's `namespace`."
)
@PROGRESS
@click.pass_context
def import_(
    ctx: click.Context,
    stack: str,
    file: str,
    name: str | None,
    engine: str,
    all_namespaces: bool,
    progress: bool | None,
) -> None:
    """Puts the chunks of an archive, made by `kvcascade export`, into a tier, where engines find them.

    FILE is the archive; "-" is the standard input. Every chunk is verified. What is there already stays, and
    nothing is pushed out: the last used chunks come first, as far as there is room. Chunks of weights that the
    stack does not name (`weights_version`) are left out.

    A folder that an engine has to itself is refused; a directory that engines share is filled beside them. Exit
    code 1 where the archive is damaged or cut off; what is right in it was stored all the same.
    """
    from kvcascade.configs import load_stack

    settings = load_stack(stack)
    tier = _target(settings, name)
    tenant = None if all_namespaces else settings.namespace
    importing = _Import(file, tier, settings.weights_version, tenant, engine)
    try:
        with _open(file) as source, interruptible() as go_on, progress_bar("importing", progress) as advance:
            importing.run(source, go_on, advance)
    finally:
        importing.report()
    if importing.empty:
        click.echo("There was nothing to import.")
    ctx.exit(0 if importing.whole else 1)


def _target(settings: "StackSettings", name: str | None) -> "TierSettings":
    tiers = keeping(choose(settings, name))
    if not tiers:
        nothing = f"--tier {name}: this tier keeps nothing" if name else "no tier of this stack keeps anything"
        raise ConfigError(f"{nothing} outside an engine")
    return tiers[-1]


@contextmanager
def _open(file: str) -> Iterator[BinaryIO]:
    """
    Raises:
        ConfigError: there is no such file, or it may not be read.
        TierUnavailable: it can't be read now.
    """
    try:
        if file == PIPE:
            if sys.stdin.isatty():
                raise ConfigError("where is the archive? Send it to the standard input, or name a file")
            yield sys.stdin.buffer
        else:
            with Path(file).open("rb", buffering=1 << 20) as source:
                yield source
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except OSError as error:
        raise TierUnavailable(f"{file} can't be read: {error.strerror}") from error


class _Import:
    """Section by section, each into the tier opened for its namespace."""

    def __init__(self, file: str, tier: "TierSettings", weights: str, tenant: str | None, engine: str) -> None:
        self._file = "the standard input" if file == PIPE else file
        self._tier = tier
        self._weights = weights
        self._tenant = tenant
        self._engine = engine
        self._taken: list[tuple[Section, Taken]] = []
        self._left_out: list[str] = []
        self._damage: Counter[str] = Counter()
        self._cut: TierRefused | None = None

    @property
    def empty(self) -> bool:
        return not (self._taken or self._left_out or self._damage or self._cut)

    @property
    def whole(self) -> bool:
        """Whether all of the archive was right, and nothing failed."""
        return not (self._cut or self._damage or any(taken.failed for _, taken in self._taken))

    def run(self, source: BinaryIO, go_on: Callable[[], None], advance: Callable[[int, int], None]) -> None:
        from kvcascade.tiers.archive import ArchiveReader

        for section, things in groupby(self._until_cut(ArchiveReader(source, self._file)), key=itemgetter(0)):
            if why := self._refused(section):
                self._left_out.append(
                    f"{self._file}: left out {counted(section.chunks)} of {section.namespace}: {why}"
                )
                continue
            chunks = self._undamaged(thing for _, thing in things)
            with Intake(self._tier, section.namespace, section.weights, section.largest, self._engine) as intake:
                self._taken.append((section, intake.taken))
                for batch in batches(chunks, lambda chunk: len(chunk.payload)):
                    go_on()
                    intake.put(batch)
                    advance(len(batch), sum(len(chunk.payload) for chunk in batch))

    def _refused(self, section: "Section") -> str:
        tenant = dict(section.namespace.fields).get("tenant", "")
        if self._tenant not in (None, tenant):
            return f"they are of the tenant {tenant!r}; --all-namespaces takes them"
        if section.weights != self._weights:
            return f"they are of the weights_version {section.weights!r}, and the stack names {self._weights!r}"
        return ""

    def _until_cut(self, archive: "ArchiveReader") -> "Iterator[tuple[Section, ArchivedChunk | Damage]]":
        """What can be read: what comes before a cut is not lost."""
        try:
            yield from archive
        except TierRefused as error:
            self._cut = error

    def _undamaged(self, things: "Iterable[ArchivedChunk | Damage]") -> Iterator[Incoming]:
        for thing in things:
            if len(thing) == 3:
                yield Incoming(*thing)
            else:
                self._damage[thing.what] += 1

    def report(self) -> None:
        print_taken([(self._tier, section.namespace, taken) for section, taken in self._taken])
        for text in self._left_out:
            click.echo(text, err=True)
        for what, count in self._damage.items():
            click.echo(f"{self._file}: left out, being damaged ({what}): {counted(count)}", err=True)
        if self._cut is not None:
            stored = sum(taken.stored for _, taken in self._taken)
            click.echo(f"{self._cut}; stored from before that: {counted(stored)}", err=True)
