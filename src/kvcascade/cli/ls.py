"""`kvcascade ls`: what each tier holds."""

import click

from .holdings import choose, print_holdings
from .kept import STACK, Answers


@click.command
@STACK
@click.pass_context
def ls(ctx: click.Context, stack: str) -> None:
    """Shows what each tier of a stack holds, also without an engine running: where, of which namespace, chunks,
    bytes, how long ago it was written, and which process uses it.

    The primary tier is memory of an engine; it holds nothing outside one.
    """
    from kvcascade.configs import load_stack

    answers = Answers()
    held = []
    for tier in choose(load_stack(stack)):
        with answers.of(tier):
            held.append((tier, tier.holdings()))
    if held or not answers.code:
        print_holdings(held)
    ctx.exit(answers.code)
