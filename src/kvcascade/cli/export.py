"""`kvcascade export`: chunks into a file."""

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from kvcascade import __version__
from kvcascade.errors import ConfigError, TierUnavailable

from .holdings import choose
from .kept import ALL_NAMESPACES, NAMESPACE, STACK, TIER, Answers, counted, keeping
from .options import DURATION, HEX
from .progress import PROGRESS, interruptible, progress_bar
from .selection import Choice, Selected, read, select

if TYPE_CHECKING:
    from kvcascade.tiers.archive import ArchiveWriter, Section

PIPE = "-"


@click.command
@STACK
@click.argument("file")
@TIER
@NAMESPACE
@click.option("--prefix", type=HEX, help="Only chunks whose key begins so.")
@click.option("--newer-than", type=DURATION, help="Only chunks that were written since: 7d.")
@ALL_NAMESPACES
@PROGRESS
@click.pass_context
def export(
    ctx: click.Context,
    stack: str,
    file: str,
    name: str | None,
    pattern: str | None,
    prefix: str | None,
    newer_than: float | None,
    all_namespaces: bool,
    progress: bool | None,
) -> None:
    """Writes what the tiers hold into one file, for `kvcascade import`: each chunk once, and verified.

    FILE must not exist; it is there when it is whole. "-" is the standard output. Chunks that an engine which
    starts would not find, after a reset, are left out. Works beside running engines.
    """
    from kvcascade.configs import load_stack

    settings = load_stack(stack)
    since = time.time() - newer_than if newer_than is not None else 0.0
    choice = Choice(None if all_namespaces else settings.namespace, pattern, prefix or "", since)
    answers = Answers()
    with _open(file) as target, interruptible() as go_on, progress_bar("exporting", progress) as advance:
        found = select(keeping(choose(settings, name)), choice, answers, go_on)
        exported, lost = _export(found, target, answers, go_on, advance)
    _say(exported, lost, file)
    ctx.exit(answers.code or (1 if lost else 0))


def _export(
    found: list[Selected],
    target: BinaryIO,
    answers: Answers,
    go_on: Callable[[], None],
    advance: Callable[[int, int], None],
) -> "tuple[ArchiveWriter, int]":
    """Writes all of it; what was written, and how many chunks were not right or can't be read."""
    from kvcascade.tiers.archive import ArchiveWriter
    from kvcascade.types import OutcomeKind

    archive = ArchiveWriter(target, f"kvcascade {__version__}")
    lost = 0
    for selected in found:
        archive.begin(_section(selected))
        for batch in read(selected.recent_first(), answers):
            for chosen, reading in batch:
                go_on()
                entry = chosen.chunk.entry
                if reading.outcome.ok:
                    archive.add(entry.key, reading.payload, entry.written, reading.sequence)
                    advance(1, len(reading.payload))
                elif reading.outcome.kind is not OutcomeKind.MISSING:
                    lost += 1
    archive.end()
    return archive, lost


def _section(selected: Selected) -> "Section":
    from kvcascade.tiers.archive import Section

    sizes = [one.chunk.entry.nbytes for one in selected.chunks.values()]
    return Section(selected.namespace, selected.weights, len(sizes), sum(sizes), max(sizes))


def _say(archive: "ArchiveWriter", lost: int, file: str) -> None:
    from kvcascade.configs.units import format_size

    where = "the standard output" if file == PIPE else file
    click.echo(f"Wrote {counted(archive.chunks)} ({format_size(archive.bytes)}) to {where}.", err=True)
    if lost:
        click.echo(
            f"Left out, being corrupt or not readable: {counted(lost)}. `kvcascade verify` tells more.", err=True
        )


@contextmanager
def _open(file: str) -> Iterator[BinaryIO]:
    """What to write to; afterwards it is at its place, whole, or not at all.

    Raises:
        ConfigError: there is something already, or it can't be written.
        TierUnavailable: there is no room, or the reader of a pipe has ended.
    """
    try:
        if file == PIPE:
            if sys.stdout.isatty():
                raise ConfigError("an archive is not for reading; send the standard output to a file or a program")
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        else:
            with _whole(Path(file)) as target:
                yield target
    except (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except OSError as error:
        raise TierUnavailable(f"{file} can't be written: {error.strerror}") from error


@contextmanager
def _whole(path: Path) -> Iterator[BinaryIO]:
    """A file with a name of its own until it is whole. One that a killed export has left is taken over."""
    if path.exists():
        raise ConfigError(f"{path} is there already; remove it, or give another name")
    partial = path.with_name(path.name + ".partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb", buffering=1 << 20) as target:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{partial} is being written by another export") from None
        try:
            os.ftruncate(fd, 0)
            yield target
            target.flush()
            os.fsync(fd)
            _name(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _name(partial: Path, path: Path) -> None:
    """Gives the file its name, unless there is one of that name by now."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        partial.rename(path)  # a file system without links
