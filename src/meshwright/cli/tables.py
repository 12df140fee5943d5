"""Rich tables of the commands, without lines between cells."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

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


class FittedTable:
    """Rich renderable of `table` that leaves out optional columns if the console is too narrow for all of them, so that
    names are not folded to a few characters per line. optional: groups of columns, each a set of headers that is left
    out as a whole, in the order in which they are left out."""

    def __init__(self, table: Table, optional: Sequence[Collection[str]]) -> None:
        """Wrap `table`; arguments: see the class."""
        self.table, self.optional = table, optional

    def __rich_console__(self, console: Any, options: Any) -> Any:
        """Yield the table without the columns for which the console is too narrow, as rich's console protocol asks.
        console, options: passed by rich; `options.max_width` is the console's width."""
        from rich.measure import Measurement

        table = self.table
        for headers in self.optional:
            if Measurement.get(console, options.update(width=10_000), table).maximum <= options.max_width:
                break
            table = _remove_columns(table, headers)
        yield table


def _remove_columns(table: Table, headers: Collection[str]) -> Table:
    """Return a copy of `table` (made by `make_table`) without the columns whose headers are in `headers`."""
    from rich.table import Table

    kept = [column for column in table.columns if column.header not in headers]
    copy = Table(box=None, pad_edge=False, header_style="bold")
    for column in kept:
        copy.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow)
    for cells in zip(*(column.cells for column in kept), strict=True):
        copy.add_row(*cells)
    return copy
