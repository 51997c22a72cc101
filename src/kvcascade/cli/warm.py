"""`kvcascade warm`: fills the tiers above from one below, before an engine starts."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from kvcascade.errors import ConfigError

from .holdings import choose
from .intake import Incoming, Intake, print_taken
from .kept import NAMESPACE, STACK, Answers, batches, keeping
from .options import SIZE
from .progress import PROGRESS, interruptible, progress_bar
from .selection import Choice, Chosen, Selected, read, select

if TYPE_CHECKING:
    from kvcascade.configs import StackSettings
    from kvcascade.tiers import TierSettings
    from kvcascade.types import Namespace

    from .intake import Taken

    Row = tuple[TierSettings, Namespace, Taken]

_PRIMARY = "The primary tier is memory of an engine: it is filled by promotion, as prompts come"


@click.command
@STACK
@click.option(
    "--from", "source", metavar="TIER", help="From this tier (default: the last one that keeps something)."
)
@click.option("--into", "target", metavar="TIER", help="Into this tier (default: all above that keep something).")
@click.option("--limit", type=SIZE, help="At most so many bytes into each tier: 50GiB.")
@NAMESPACE
@click.option("--engine", default="0", show_default=True, metavar="ID", help="Whose folder of a private tier.")
@PROGRESS
@click.pass_context
def warm(
    ctx: click.Context,
    stack: str,
    source: str | None,
    target: str | None,
    limit: int | None,
    pattern: str | None,
    engine: str,
    progress: bool | None,
) -> None:
    """Loads what was used last in a tier into the tiers above it, before an engine starts: a new machine's empty
    disk from the shared directory, say.

    The last used chunks come first, until there is no room or --limit is reached. What is there already stays, and
    nothing is pushed out. Only what is of the stack's `namespace` and `weights_version` is loaded.

    The primary tier is memory of an engine, and can't be warmed from outside. A folder that a running engine has
    to itself is refused.
    """
    from kvcascade.configs import load_stack

    settings = load_stack(stack)
    below, above = _ends(settings, source, target)
    answers, rows = Answers(), list["Row"]()
    choice = Choice(settings.namespace, pattern, weights=settings.weights_version)
    try:
        with interruptible() as go_on, progress_bar("warming", progress) as advance:
            found = select([below], choice, answers, go_on)
            for tier in above:
                with answers.of(tier):
                    left = limit
                    for selected in found:
                        with Intake(
                            tier, selected.namespace, selected.weights, selected.largest, engine
                        ) as intake:
                            rows.append((tier, selected.namespace, intake.taken))
                            _fill(intake, selected, left, answers, go_on, advance)
                        left = None if left is None else max(0, left - intake.taken.nbytes)
    finally:
        print_taken(rows)
    if not rows and not answers.code:
        click.echo(f"{below.name} holds nothing that an engine of this stack would find.")
    ctx.exit(answers.code or int(any(taken.failed for _, _, taken in rows)))


def _ends(
    settings: "StackSettings", source: str | None, target: str | None
) -> "tuple[TierSettings, list[TierSettings]]":
    """The tier to load from, and those to load into.

    Raises:
        ConfigError: there is nothing to load from or into.
    """
    tiers = keeping(choose(settings))
    if target == settings.primary.name:
        raise ConfigError(f"--into {target}: {_PRIMARY}")
    below = keeping(choose(settings, source))[-1:] or tiers[-1:]
    if not below:
        raise ConfigError("no tier of this stack keeps anything outside an engine")
    above = tiers[: tiers.index(below[0])]
    if target is not None:
        above = [tier for tier in choose(settings, target) if tier in above]
    if not above:
        which = (
            f"--into {target}: that is not above {below[0].name}"
            if target
            else f"nothing above {below[0].name} keeps anything outside an engine"
        )
        raise ConfigError(f"{which}. {_PRIMARY}")
    return below[0], above


def _fill(
    intake: Intake,
    selected: Selected,
    limit: int | None,
    answers: Answers,
    go_on: Callable[[], None],
    advance: Callable[[int, int], None],
) -> None:
    """What can't be read is left out: `kvcascade verify` tells more of it."""
    for batch in read(_wanted(intake, selected, limit), answers):
        go_on()
        right = [(one.chunk.entry, reading.payload) for one, reading in batch if reading.outcome.ok]
        intake.put([Incoming(entry.key, payload, entry.written) for entry, payload in right])
        advance(len(right), sum(len(payload) for _, payload in right))


def _wanted(intake: Intake, selected: Selected, limit: int | None) -> Iterator[Chosen]:
    """What is not there yet, the last used first, until the tier is full or the limit is reached."""
    for batch in batches(selected.recent_first(), lambda one: one.chunk.entry.nbytes):
        lacking = intake.lacking([one.chunk.entry.key for one in batch])
        for one, lacks in zip(batch, lacking, strict=True):
            if not lacks:
                continue
            if intake.full:
                intake.taken.no_room += 1
                continue
            if limit is not None:
                limit -= one.chunk.entry.nbytes
                if limit < 0:
                    return
            yield one
