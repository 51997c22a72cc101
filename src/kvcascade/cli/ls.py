"""`kvcascade ls`: what each tier holds."""

import click

from kvcascade.errors import TierError

from .holdings import choose, print_holdings


@click.command
@click.argument("stack")
@click.pass_context
def ls(ctx: click.Context, stack: str) -> None:
    """Shows what each tier of a stack holds, also without an engine running: where, of which namespace, chunks,
    bytes, how long ago it was written, and which process uses it.

    The primary tier is memory of an engine; it holds nothing outside one.
    """
    from kvcascade.configs import load_stack

    held, failures = [], []
    for tier in choose(load_stack(stack)):
        try:
            held.append((tier, tier.holdings()))
        except TierError as error:
            failures.append(f"{tier.name}: {error}")
    if held or not failures:
        print_holdings(held)
    for failure in failures:
        click.echo(failure, err=True)
    ctx.exit(1 if failures else 0)
