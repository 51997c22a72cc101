"""`kvcascade simulate`: a simulated engine over real stacks, with everything checked after each step."""

import logging
import sys
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING

import click

from kvcascade.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvcascade.testing.engine.simulation import Failure
    from kvcascade.testing.engine.workload import Action, Case

_COUNT = click.IntRange(min=1)


@click.command
@click.option("--seeds", type=_COUNT, default=20, show_default=True, help="How many histories to play.")
@click.option("--steps", type=_COUNT, default=500, show_default=True, help="Steps of the engine in each.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option(
    "--profile", default="all", show_default=True, help="What is drawn: all, calm, faults, disk, drafts, plain."
)
@click.option("--progress/--no-progress", default=None, help="Show a progress bar (default: on a terminal).")
def simulate(seeds: int, steps: int, seed: int, profile: str, progress: bool | None) -> None:
    """Plays random histories on a simulated engine, and checks every byte and invariant after each action.

    A seed decides everything: the engine, its stack, what requests come, what fails. Requests are batched,
    chunked, preempted and aborted, caches are reset, copies end when they like, tiers are slow and fail; see
    docs/simulation.md. When something goes wrong, the seed and the shortest history that shows it are printed,
    and the exit code is 1.
    """
    from kvcascade.testing.engine.simulation import Failure, play
    from kvcascade.testing.engine.workload import PROFILES, draw_actions, draw_case

    if profile not in PROFILES:
        near = "".join(f" did you mean {match!r}?" for match in get_close_matches(profile, PROFILES, n=1))
        raise ConfigError(f"--profile: {profile!r} is not a profile;{near} allowed: {', '.join(PROFILES)}")
    _silence()
    cases = (draw_case(number, profile) for number in range(seed, seed + seeds))
    with _bar(seeds * steps, progress) as advance:
        for case in cases:
            try:
                play(case, draw_actions(case, steps), advance)
            except Failure as failure:
                found = failure
                break
        else:
            found = None
    if found is None:
        click.echo(f"{seeds} histories of {steps} steps, seeds {seed} to {seed + seeds - 1}: everything held.")
        return
    _report(case, found)
    again = f"kvcascade simulate --seed {case.seed} --seeds 1 --steps {steps} --profile {profile}"
    click.echo(f"To see it again: {again}", err=True)
    raise SystemExit(1)


@contextmanager
def _bar(steps: int, show: bool | None) -> "Iterator[Callable[[Action], None]]":
    """Yields what moves a progress bar on stderr, by one for each step of an engine."""
    from rich.console import Console
    from rich.progress import Progress

    shown = sys.stderr.isatty() if show is None else show
    console = Console(stderr=True, force_terminal=True if show else None)
    with Progress(console=console, disable=not shown) as progress:
        task = progress.add_task("simulate", total=steps)
        yield lambda action: progress.advance(task, action.name == "step")


def _report(case: "Case", failure: "Failure") -> None:
    from kvcascade.testing.engine.simulation import shorten

    click.echo(f"seed {case.seed}: {failure}", err=True)
    click.echo(f"{case}", err=True)
    click.echo(f"shrinking a history of {len(failure.actions)} actions ...", err=True)
    shortest = shorten(case, failure)
    click.echo(f"The shortest history found, of {len(shortest.actions)} actions:", err=True)
    for action in shortest.actions:
        click.echo(f"  {action}", err=True)
    click.echo(str(shortest), err=True)


def _silence() -> None:
    """Faults that the simulation makes are no news."""
    logging.getLogger("kvcascade").addHandler(logging.NullHandler())
    logging.getLogger("kvcascade").propagate = False
