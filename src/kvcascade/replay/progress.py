"""A progress bar on stderr."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from .runner import Tally

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(total: int, show: bool | None = None) -> Iterator[Callable[[Tally], None]]:
    """Yields a function that moves the bar to a tally's number of requests.

    Args:
        total: requests in all.
        show: None shows it on a terminal only.
    """
    shown = sys.stderr.isatty() if show is None else show
    columns = (
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("requests, hit rate {task.fields[hit_rate]:.3f},"),
        TimeRemainingColumn(),
        TextColumn("to go"),
    )
    console = Console(stderr=True, force_terminal=True if show else None)
    with Progress(*columns, console=console, disable=not shown, refresh_per_second=5) as progress:
        task = progress.add_task("replay", total=total, hit_rate=0.0)
        yield lambda tally: progress.update(task, completed=tally.requests, hit_rate=tally.hit_rate)
