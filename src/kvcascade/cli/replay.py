"""`kvcascade replay`: a request trace through a stack, or the what-if that moves no bytes."""

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvcascade.errors import ConfigError

from .options import SIZE

if TYPE_CHECKING:
    from kvcascade.configs import StackSettings
    from kvcascade.replay.playback import Playback
    from kvcascade.replay.trace import Trace

_INTERRUPTED = 130
_COUNT = click.IntRange(min=1)


@click.command
@click.argument("trace", required=False)
@click.option("--stack", metavar="STACK.yaml", help="The stack: a file, or the name of one that is installed.")
@click.option("--chunk-bytes", type=SIZE, default="64KiB", show_default=True, help="Bytes of a chunk.")
@click.option("--limit", type=_COUNT, help="Play only the first so many requests.")
@click.option("--concurrency", type=_COUNT, default=1, show_default=True, help="Requests active at a time.")
@click.option(
    "--gpu-chunks",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Chunks of a GPU cache in front of the stack.",
)
@click.option("--skip-bad", is_flag=True, help="Leave out broken lines of the trace, and count them.")
@click.option(
    "--compare",
    metavar="POLICIES",
    help="Simulate only: lru, arc, s3fifo, optimal, or other eviction policies, separated by commas.",
)
@click.option(
    "--capacity",
    default="1%,5%,10%,20%",
    show_default=True,
    help="With --compare: shares of the distinct chunks, chunks, or sizes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, and nothing else, on stdout.")
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Draw the replay into this file.")
@click.option("--progress/--no-progress", default=None, help="Show a progress bar (default: on a terminal).")
def replay(
    trace: str | None,
    stack: str | None,
    chunk_bytes: int,
    limit: int | None,
    concurrency: int,
    gpu_chunks: int,
    skip_bad: bool,
    compare: str | None,
    capacity: str,
    as_json: bool,
    plot_path: Path | None,
    progress: bool | None,
) -> None:
    """Plays a request trace through a stack, as an engine would, and compares every byte that is loaded.

    TRACE is a file (one JSON object a line, gzip or plain) or a bundled trace: conversation, synthetic.

    With --compare nothing is stored: it prints what caches of the given capacities would have found, in all
    bundled traces where no TRACE is given; with --stack also what the stack's tiers would have found.
    """
    from kvcascade.replay.trace import BUNDLED, Trace

    if compare is not None:
        _refuse_beside_compare({"--plot": plot_path, "--gpu-chunks": gpu_chunks, "--concurrency": concurrency - 1})
        traces = [Trace(name, skip_bad) for name in ([trace] if trace else BUNDLED)]
        _compare(traces, compare, capacity, stack, chunk_bytes, limit, as_json)
        return
    from kvcascade.replay.playback import Playback

    if trace is None:
        raise ConfigError(f"which trace? Give a file, or the name of a bundled trace: {', '.join(BUNDLED)}")
    if stack is None:
        raise ConfigError(
            "which stack? Give --stack STACK.yaml, or the name of one that is installed: --stack embedded"
        )
    how = Playback(chunk_bytes, limit=limit, concurrency=concurrency, gpu_chunks=gpu_chunks, progress=progress)
    _play(Trace(trace, skip_bad), _load(stack), how, as_json, plot_path)


def _refuse_beside_compare(options: dict[str, object]) -> None:
    """Options of a replay mean nothing where nothing is played."""
    for name, given in options.items():
        if given:
            raise ConfigError(f"{name} goes with a replay; with --compare nothing is played")


def _load(stack: str) -> "StackSettings":
    from kvcascade.configs import load_stack

    return load_stack(stack)


def _play(
    trace: "Trace", settings: "StackSettings", how: "Playback", as_json: bool, plot_path: Path | None
) -> None:
    from rich.console import Console

    from kvcascade.replay.playback import replay as play
    from kvcascade.replay.plot import check_plot, plot
    from kvcascade.replay.report import render, to_json

    if plot_path:
        check_plot(plot_path)
    report = play(trace, settings, how)
    if as_json:
        click.echo(json.dumps(to_json(report), indent=2))
    else:
        render(report, Console())
    if plot_path:
        plot(report, plot_path)
        click.echo(f"plot: {plot_path}", err=as_json)
    if report.interrupted:
        raise SystemExit(_INTERRUPTED)


def _compare(
    traces: "list[Trace]",
    policies: str,
    capacities: str,
    stack: str | None,
    chunk_bytes: int,
    limit: int | None,
    as_json: bool,
) -> None:
    from rich.console import Console

    from kvcascade.replay.compare import compare, models_of, parse_capacities, parse_policies
    from kvcascade.replay.compare import comparison_json as to_json
    from kvcascade.replay.compare import render_comparison as render

    names, sizes = parse_policies(policies), parse_capacities(capacities, chunk_bytes)
    tiers = models_of(_load(stack), chunk_bytes) if stack else []
    results = []
    for trace in traces:
        prompts = [request.hash_ids for request in islice(trace, limit)]
        results.append(compare(trace.name, prompts, names, sizes, tiers))
    if as_json:
        click.echo(json.dumps([to_json(result) for result in results], indent=2))
        return
    for result in results:
        render(result, Console())
