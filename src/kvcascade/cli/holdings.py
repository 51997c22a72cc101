"""What `ls` and `clear` have in common: the tiers of a stack, and a table of what they hold."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from kvcascade.errors import ConfigError

if TYPE_CHECKING:
    from kvcascade.configs import StackSettings
    from kvcascade.tiers import Holding, TierSettings

__all__ = ["choose", "print_holdings"]


def choose(settings: "StackSettings", name: str | None = None) -> "list[TierSettings]":
    """The tiers behind the primary one, or the one of that name.

    Raises:
        ConfigError: there is none of that name, or it is the primary one.
    """
    from kvcascade.configs.registry import nearest
    from kvcascade.tiers import TierSettings

    tiers = [tier for tier in settings.secondary if isinstance(tier, TierSettings)]
    if name is None:
        return tiers
    if name == settings.primary.name:
        raise ConfigError(
            f"--tier {name}: the primary tier is memory of an engine; nothing of it is kept outside one"
        )
    names = [tier.name for tier in tiers]
    if name not in names:
        raise ConfigError(
            f"--tier {name}: no such tier{nearest(name, names)}; allowed: {', '.join(names) or 'none'}"
        )
    return [tiers[names.index(name)]]


def print_holdings(held: "Sequence[tuple[TierSettings, Sequence[Holding]]]") -> None:
    """A table, one line a namespace; a tier that holds nothing gets a line too."""
    from .output import print_table

    if not held:
        click.echo("No tier of this stack keeps anything outside an engine.")
        return
    now = time.time()
    sections = [
        [_row(tier.name, holding, now) for holding in holdings] or [(tier.name, "holds nothing", *[""] * 5)]
        for tier, holdings in held
    ]
    columns = ("tier", "place", "namespace", "chunks", "bytes", "age", "in use by")
    print_table(columns, sections, right=("chunks", "bytes"))


def _row(name: str, holding: "Holding", now: float) -> tuple[str, ...]:
    from kvcascade.configs.units import format_size

    size = format_size(holding.bytes)
    return (
        name,
        holding.place,
        holding.namespace,
        f"{holding.chunks:,}",
        size,
        _age(holding, now),
        holding.used_by,
    )


def _age(holding: "Holding", now: float) -> str:
    """ "2m to 3d": since the last write, since the first one."""
    from kvcascade.configs.units import format_duration

    if holding.oldest is None or holding.newest is None:
        return ""
    ages = [format_duration(max(0, round(now - written))) for written in (holding.newest, holding.oldest)]
    return " to ".join(dict.fromkeys(ages))
