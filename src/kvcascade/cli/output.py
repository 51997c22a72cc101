"""Tables for a person."""

import sys
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["print_table"]

_WIDTH_OF_A_FILE = 160


def print_table(
    columns: Sequence[str], sections: Iterable[Iterable[Sequence[str]]], right: Sequence[str] = ()
) -> None:
    """Prints rows on stdout, a line between sections; columns named in `right` are aligned to the right. Long
    values are folded, never cut."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for rows in sections:
        for row in rows:
            table.add_row(*map(Text, row))
        table.add_section()
    Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE).print(table)
