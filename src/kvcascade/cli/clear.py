"""`kvcascade clear`: removes what is ours."""

from typing import TYPE_CHECKING

import click

from .holdings import choose, print_holdings
from .kept import ALL_NAMESPACES, STACK, TIER, Answers, say_damaged

if TYPE_CHECKING:
    from kvcascade.tiers import Holding, TierSettings


@click.command
@STACK
@TIER
@ALL_NAMESPACES
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_context
def clear(ctx: click.Context, stack: str, name: str | None, all_namespaces: bool, yes: bool) -> None:
    """Removes what the tiers of a stack hold, after showing it and asking.

    Only what KVCascade has put there goes, and only what belongs to the stack's `namespace`. What an engine is
    using stays.
    """
    from kvcascade.configs import load_stack

    settings = load_stack(stack)
    tenant = None if all_namespaces else settings.namespace
    answers, held = Answers(), []
    for tier in choose(settings, name):
        with answers.of(tier):
            held.append((tier, _of(tenant, tier)))
    if held:
        print_holdings(held)
    chunks = sum(holding.chunks for _, holdings in held for holding in holdings)
    if not any(holdings for _, holdings in held):
        click.echo("There is nothing to remove." if held else "Nothing was removed.")
    elif yes or click.confirm(f"Remove these {chunks:,} chunks?"):
        for tier in [tier for tier, holdings in held if holdings]:
            with answers.of(tier):
                for line in tier.clear(tenant):
                    click.echo(f"{tier.name}: {line}")
    else:
        click.echo("Nothing was removed.")
        ctx.exit(1)
    ctx.exit(answers.code)


def _of(tenant: str | None, tier: "TierSettings") -> "list[Holding]":
    holdings = tier.holdings()
    if tenant is None:
        return holdings
    for holding in holdings:
        say_damaged(tier, holding.place, holding.tenant)
    return [holding for holding in holdings if holding.tenant == tenant]
