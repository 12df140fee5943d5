"""The shell of every HTML page, and what pages are made of: tables, keys, bars. One file each, nothing to download."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files

from meshwright.draw.markup import Content, Markup, element, join
from meshwright.draw.picture import paint, picture_style

# A quantity, or nothing: "42 µs", "75.65", "40.5%", "105 / 0.30", "-".
_QUANTITY = re.compile(r"[-–+<]?[\d.,]+( ?[^\W\d_]{0,3}|%)( / [\d.,]+)?|[-–]?")


def page(title: str, *parts: Content, narrow: bool = False) -> str:
    """Return a whole HTML page for light and dark mode; its heading is one of the `parts`."""
    style = picture_style() + (files("meshwright.draw") / "page.css").read_text(encoding="utf-8")
    head = (
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style)),
    )
    body = element("body", "\n", join(parts, "\n"), "\n", class_="narrow" if narrow else None)
    return f"<!doctype html>{element('html', element('head', head), body, lang='en')}\n"


def table(head: Sequence[Content], rows: Iterable[Sequence[Content]]) -> Markup:
    """Return an HTML table, scrollable where too wide; the first cell of a row is its header. head: empty for none.

    Columns of quantities are aligned to the right.
    """
    rows = list(rows)
    kinds = ["n" if _holds_quantities([row[at] for row in rows]) else None for at in range(len((*rows, head)[0]))]
    kinds[:1] = [None]
    lines = [element("thead", _table_row(head, kinds, "th"))] if head else []
    lines += [_table_row(row, kinds, "td") for row in rows]
    return element("div", element("table", join(lines, "\n")), class_="wide")


def _table_row(cells: Sequence[Content], kinds: Sequence[str | None], name: str) -> Markup:
    """Return a table row. kinds: class of each cell; name: tag of the cells after the first."""
    tags = ["th", *[name] * len(cells)]
    return element("tr", [element(tag, cell, class_=kind) for tag, cell, kind in zip(tags, cells, kinds, strict=False)])


def _holds_quantities(column: Sequence[Content]) -> bool:
    """Return True if all cells of a column are quantities or empty, and not all are empty."""
    texts = [cell for cell in column if isinstance(cell, str) and not isinstance(cell, Markup)]
    return len(texts) == len(column) and any(texts) and all(_QUANTITY.fullmatch(text) for text in texts)


def paragraph(*words: Content, muted: bool = False) -> Markup:
    """Return an HTML paragraph."""
    return element("p", *words, class_="muted" if muted else None)


def key(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return a legend of (text, style-sheet colour) entries."""
    swatches = ((element("i", style=f"background:{paint(colour)}"), words) for words, colour in entries)
    return element("p", join([element("span", swatch) for swatch in swatches], " "), class_="muted key")


def bar(*shares: float, colours: Sequence[str] = ("blue",), mark: float | None = None) -> Markup:
    """Return horizontal bars for a table cell, one below the other. shares: lengths, 0 to 1; mark: a
    position to mark."""
    bars = [
        element("i", style=f"width:{share:.1%};background:{paint(colour)}")
        for share, colour in zip(shares, colours, strict=True)
    ]
    marks = None if mark is None else element("b", style=f"left:{mark:.1%}")
    return element("div", bars, marks, class_="bar two" if len(bars) > 1 else "bar")
