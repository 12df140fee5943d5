"""HTML pages in one file without external resources, and their tables, paragraphs, legends and bars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files

from meshwright.draw.markup import Content, Markup, element, join
from meshwright.draw.picture import css_var, make_picture_style

# A quantity, or an empty cell: "42 µs", "75.65", "40.5%", "105 / 0.30", "-".
_QUANTITY = re.compile(r"[-–+<]?[\d.,]+( ?[^\W\d_]{0,3}|%)( / [\d.,]+)?|[-–]?")


def page(title: str, *parts: Content, narrow: bool = False) -> str:
    """Return a complete HTML page, for light and dark mode, whose body consists of `parts` (texts and markup). title:
    title of the browser tab only; a heading must be among `parts`. narrow: True for the style sheet's narrow text
    column."""
    style = make_picture_style() + (files("meshwright.draw") / "page.css").read_text(encoding="utf-8")
    head = (
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    boxed = [_wrap_picture(part) for part in parts]
    body = element("body", "\n", join(boxed, "\n"), "\n", class_="narrow" if narrow else None)
    return f"<!doctype html>{element('html', element('head', head), body, lang='en')}\n"


def _wrap_picture(part: Content) -> Content:
    """Wrap `part`, if it is an SVG picture, in an HTML box that scrolls horizontally on a narrow screen; return other
    content unchanged."""
    return element("div", part, class_="chart") if isinstance(part, Markup) and part.startswith("<svg") else part


def table(head: Sequence[Content], rows: Iterable[Sequence[Content]]) -> Markup:
    """Return an HTML table, which scrolls horizontally if the table is too wide.

    head: cells of the header line, empty for no header. rows: cells of each line; the first cell of a line is its
    header. Columns that hold only quantities (numbers with an optional unit) are aligned to the right, except the first
    column.
    """
    rows = list(rows)
    kinds = ["n" if _holds_quantities([row[at] for row in rows]) else None for at in range(len((*rows, head)[0]))]
    kinds[:1] = [None]
    lines = [element("thead", _make_table_row(head, kinds, "th"))] if head else []
    lines += [_make_table_row(row, kinds, "td") for row in rows]
    return element("div", element("table", join(lines, "\n")), class_="wide")


def _make_table_row(cells: Sequence[Content], kinds: Sequence[str | None], name: str) -> Markup:
    """Return an HTML table row, whose first cell is the row's header.

    cells: contents. kinds: CSS class of each cell, None for no class. name: tag of the other cells, "td" or "th".
    """
    tags = ["th", *[name] * len(cells)]
    return element("tr", [element(tag, cell, class_=kind) for tag, cell, kind in zip(tags, cells, kinds, strict=False)])


def _holds_quantities(column: Sequence[Content]) -> bool:
    """Return True if every cell of a column is empty or a number with an optional unit, and at least one cell is not
    empty."""
    texts = [cell for cell in column if isinstance(cell, str) and not isinstance(cell, Markup)]
    return len(texts) == len(column) and any(texts) and all(_QUANTITY.fullmatch(text) for text in texts)


def paragraph(*words: Content, muted: bool = False) -> Markup:
    """Return an HTML paragraph with the content `words`. muted: True for a paler colour."""
    return element("p", *words, class_="muted" if muted else None)


def legend(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return a chart's legend as HTML. entries: (text, style-sheet colour of its colour sample, such as "blue")."""
    swatches = ((element("i", style=f"background:{css_var(colour)}"), words) for words, colour in entries)
    return element("p", join([element("span", swatch) for swatch in swatches], " "), class_="muted key")


def bar(*shares: float, colours: Sequence[str] = ("blue",), mark: float | None = None) -> Markup:
    """Return the HTML of one or more horizontal bars, one below the other, for a table cell.

    shares: length of each bar as a fraction of the cell's width, 0 to 1. colours: style-sheet colour of each bar, such
    as "blue". mark: position of a vertical mark, 0 to 1, None for no mark.
    """
    bars = [
        element("i", style=f"width:{share:.1%};background:{css_var(colour)}")
        for share, colour in zip(shares, colours, strict=True)
    ]
    marks = None if mark is None else element("b", style=f"left:{mark:.1%}")
    return element("div", bars, marks, class_="bar two" if len(bars) > 1 else "bar")
