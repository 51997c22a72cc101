"""`kvcascade clear`: removes what is ours."""

from typing import TYPE_CHECKING

import click

from kvcascade.errors import ConfigError, KVCascadeError

from .holdings import choose, print_holdings

if TYPE_CHECKING:
    from kvcascade.tiers import Holding, TierSettings


@click.command
@click.argument("stack")
@click.option("--tier", "name", metavar="NAME", help="Only this tier.")
@click.option(
    "--all-namespaces", is_flag=True, help="Also what other tenants than the stack's `namespace` keep there."
)
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
    held = [(tier, _of(tenant, tier.holdings())) for tier in choose(settings, name)]
    print_holdings(held)
    chunks = sum(holding.chunks for _, holdings in held for holding in holdings)
    if not any(holdings for _, holdings in held):
        click.echo("There is nothing to remove.")
    elif yes or click.confirm(f"Remove these {chunks:,} chunks?"):
        ctx.exit(max(_clear(tier, tenant) for tier, holdings in held if holdings))
    else:
        click.echo("Nothing was removed.")
        ctx.exit(1)


def _of(tenant: str | None, holdings: "list[Holding]") -> "list[Holding]":
    return [holding for holding in holdings if tenant in (None, holding.tenant)]


def _clear(tier: "TierSettings", tenant: str | None) -> int:
    """Clears one tier, so that another one's trouble does not keep it from that. Returns the exit code."""
    try:
        for line in tier.clear(tenant):
            click.echo(f"{tier.name}: {line}")
    except KVCascadeError as error:
        click.echo(f"{tier.name}: {error}", err=True)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
