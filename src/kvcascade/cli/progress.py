"""A progress bar on stderr, and Ctrl-C between two chunks."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

__all__ = ["PROGRESS", "interruptible", "progress_bar"]

PROGRESS = click.option(
    "--progress/--no-progress", default=None, help="Show a progress bar (default: on a terminal)."
)


@contextmanager
def progress_bar(what: str, show: bool | None) -> Iterator[Callable[[int, int], None]]:
    """Yields what moves the bar on, by so many chunks and bytes.

    Args:
        what: is done, in a word.
        show: None shows it on a terminal only.
    """
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    shown = sys.stderr.isatty() if show is None else show
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description} {task.fields[chunks]:,} chunks,"),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    console = Console(stderr=True, force_terminal=True if show else None)
    with Progress(*columns, console=console, disable=not shown, refresh_per_second=5) as progress:
        task = progress.add_task(what, total=None, chunks=0)
        chunks = 0

        def advance(more: int, nbytes: int) -> None:
            nonlocal chunks
            chunks += more
            progress.update(task, advance=nbytes, chunks=chunks)

        yield advance


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Yields what is to be called between two steps: after the first Ctrl-C it raises `KeyboardInterrupt`, so that
    no step is left half done. A second Ctrl-C comes at once."""
    from kvcascade.replay.interrupt import stop_on_interrupt

    with stop_on_interrupt() as asked:

        def go_on() -> None:
            if asked():
                raise KeyboardInterrupt

        yield go_on
