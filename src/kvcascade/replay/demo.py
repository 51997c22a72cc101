"""What `make run` shows: a part of a real trace through a stack, and the stack after a restart."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from kvcascade.configs import load_stack
from kvcascade.configs.units import format_size
from kvcascade.errors import KVCascadeError

from .playback import Playback, replay
from .plot import check_plot, plot
from .report import render
from .trace import Trace

_HOST = 128 << 20
_DISK = 768 << 20
_CHUNK = 32 << 10
_REQUESTS = 2500
"""With these about 45,000 chunks are written: 1.5 GiB."""
_AGAIN = 250
"""Requests that are played again after the restart; their chunks are still on disk."""


def main(stack: str = "embedded") -> int:
    """Runs the demo on a stack, a file or one that ships; returns the exit code."""
    console = Console()
    picture = Path("kvcascade-demo.png").resolve()
    try:
        check_plot(picture)
        with _temporary_folder() as folder:
            return _show(stack, folder, picture, console)
    except KVCascadeError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


@contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder that is removed at the end, whatever is pressed meanwhile."""
    folder = TemporaryDirectory(prefix="kvcascade-demo-")
    try:
        yield folder.name
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        folder.cleanup()
        signal.signal(signal.SIGINT, before)


def _show(name: str, folder: str, picture: Path, console: Console) -> int:
    os.environ.update(KVCASCADE_DIR=folder, KVCASCADE_HOST=str(_HOST), KVCASCADE_DISK=str(_DISK))
    os.environ.setdefault("KVCASCADE_SHARED", f"{folder}/shared")
    stack, trace = load_stack(name), Trace("conversation")
    host = stack.primary.capacity
    below = ", ".join(f"{tier.name} ({tier.type})" for tier in stack.secondary) or "nothing"
    console.print(
        f"The first {_REQUESTS:,} requests of a real conversation trace, chunks of {format_size(_CHUNK)}, through "
        f"the stack {name}: {format_size(host)} of host memory, below it {below}. Temporary folder: {folder}."
    )
    report = replay(trace, stack, Playback(_CHUNK, limit=_REQUESTS))
    render(report, console)
    plot(report, picture)
    console.print(f"Plot: {picture}", soft_wrap=True)
    if report.interrupted:
        return 130
    again = replay(trace, stack, Playback(_CHUNK, skip=_REQUESTS - _AGAIN, limit=_AGAIN))
    tally = again.tally
    console.print(
        f"[bold]After a restart[/bold] of the stack the last {tally.requests:,} requests came again: "
        f"{tally.hit_rate:.1%} of their {tally.chunks:,} chunks were found, "
        f"{sum(tier.hits for tier in again.tiers[1:]):,} below host memory; 0 wrong bytes."
    )
    return 130 if again.interrupted else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
