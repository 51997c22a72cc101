"""One replay from its start to its end: stack, player, samples, progress, Ctrl-C."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from kvcascade.configs import StackSettings
from kvcascade.stack import build
from kvcascade.tiers import Tier

from .content import Content
from .interrupt import stop_on_interrupt
from .progress import progress_bar
from .report import Report
from .runner import Player, Tally, namespace_of
from .trace import Request, Trace

__all__ = ["Playback", "replay"]

_SAMPLES = 400


@dataclass(frozen=True, slots=True)
class Playback:
    """How a trace is played."""

    chunk_bytes: int = 64 << 10
    skip: int = 0
    """Requests at the start of the trace that are not played."""
    limit: int | None = None
    """Requests to play after those; None for all."""
    concurrency: int = 1
    """Requests that are active at a time."""
    gpu_chunks: int = 0
    """Size of the GPU's own cache in front of the stack."""
    progress: bool | None = None
    """Whether to show a progress bar on stderr; None shows it on a terminal."""

    def requests(self, trace: Trace) -> Iterator[Request]:
        """Those that are to be played."""
        return islice(trace, self.skip, None if self.limit is None else self.skip + self.limit)


def replay(
    trace: Trace,
    settings: StackSettings,
    how: Playback,
    wrap: Callable[[str, Tier], Tier] | None = None,
) -> Report:
    """Plays a trace through a stack that is built for it, and shut down after it.

    The trace is read twice: once to find what is wrong with it before any work is done. Ctrl-C aborts the active
    requests and returns what was done so far; for the main thread only. `wrap` may put something in front of a
    tier, by its name.

    Raises:
        ConfigError: trace or stack can't be used.
        WrongBytesError: a load brought other bytes than were stored.
        StuckError: the stack hangs.
        KeyboardInterrupt: at the second Ctrl-C. The stack is shut down then, too.
    """
    total = sum(1 for _ in how.requests(trace))
    every = max(1, total // _SAMPLES)
    report = Report(trace.name, how.chunk_bytes, total)
    namespace = namespace_of(trace.name, how.chunk_bytes)
    with (
        stop_on_interrupt() as stopped,
        progress_bar(total, how.progress) as show,
        build(settings, namespace, how.chunk_bytes, wrap=wrap) as manager,
    ):

        def on_finish(tally: Tally) -> None:
            show(tally)
            if tally.requests % every == 0:
                report.take(tally, manager.get_stats())

        player = Player(
            manager,
            Content(),
            concurrency=how.concurrency,
            gpu_chunks=how.gpu_chunks,
            stopped=stopped,
            on_finish=on_finish,
        )
        began = time.monotonic()
        player.play(how.requests(trace))
        report.seconds = time.monotonic() - began
        report.take(player.tally, manager.get_stats())
    report.interrupted = player.tally.requests < total
    report.skipped = trace.skipped
    return report
