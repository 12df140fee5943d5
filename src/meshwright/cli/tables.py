"""Rich tables of the commands, without lines between cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def make_table(first: str, *numbers: str) -> Table:
    """Return a rich table without rows. first: header of the first column, whose text is wrapped; numbers: headers of
    the further columns, which are right-aligned."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def make_fact_table() -> Table:
    """Return an empty table of two columns without headers: a bold name and its value."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table
