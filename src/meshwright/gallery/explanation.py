"""A worked example after its run: steps of text, tables and pictures, and the figures that come out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from meshwright.documents import to_json_dict
from meshwright.draw.markup import Markup


@dataclass(frozen=True)
class Text:
    """Step of a worked example: a paragraph, or a formula with its numbers. words: the text."""

    words: str


@dataclass(frozen=True)
class Table:
    """Step of a worked example: a table. title: line above it. head: column names. rows: cells of each
    row as text."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def numeric(self) -> list[bool]:
        """One value per column: True if all of its non-empty cells are single numbers (with or without unit). Such
        columns are right-aligned."""
        columns = zip(*self.rows, strict=True)
        return [all(_NUMBER.match(cell) and not _VECTOR.match(cell) for cell in column if cell) for column in columns]


@dataclass(frozen=True)
class Figure:
    """Step of a worked example: a picture. name: name of the picture's file in docs/pictures, without ".svg". caption:
    line below the picture. draw: function that returns the picture as SVG. draw_text: function that returns the picture
    as text for a terminal with the given number of columns, None if there is none."""

    name: str
    caption: str
    draw: Callable[[], Markup]
    draw_text: Callable[[int], str] | None = None


COLUMNS = 78
"""Width of a picture as text in characters, where it is not for a terminal."""
_NUMBER = re.compile(r"[+\-−]?\d")
_VECTOR = re.compile(r"\S+ (\S+ )?[-\d]")  # 1 20 300; or a formula such as 2 bytes × 175

Step: TypeAlias = Text | Table | Figure


class ExampleWriter:
    """Collector of the steps and results of a worked example while it is computed: the example's function appends the
    steps to show, and records results.

    steps (attribute): `Text`, `Table` and `Figure` objects in the order in which they are shown. results (attribute):
    name of a result, with its unit or quantity -> number.
    """

    def __init__(self) -> None:
        """Start without steps and results."""
        self.steps: list[Step] = []
        self.results: dict[str, float] = {}

    def add_text(self, words: str) -> None:
        """Append a paragraph of text, `words`, to the steps of the worked example."""
        self.steps.append(Text(words))

    def add_table(self, title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Append a table to the steps. title: line above the table. head: column names. rows: cells; numbers are
        formatted as text, such as `1,234,567` or `0.125`."""
        cells = tuple(tuple(map(format_cell, row)) for row in rows)
        self.steps.append(Table(title, tuple(head), cells))

    def add_figure(
        self, name: str, caption: str, draw: Callable[[], Markup], draw_text: Callable[[int], str] | None = None
    ) -> None:
        """Append a `Figure` to the steps. name: name of the picture's file in docs/pictures, without ".svg". caption:
        line below the picture. draw: function that returns the picture as SVG. draw_text: function that returns it as
        text for a terminal with the given number of columns, None if there is none."""
        self.steps.append(Figure(name, caption, draw, draw_text))

    def record_result(self, name: str, value: float) -> None:
        """Record the result `value` of the example. name: name of the result with its unit or quantity, such as "bytes
        sent".
        """
        self.results[name] = float(value)


@dataclass(frozen=True)
class Explanation:
    """Result of a worked example: a published number or formula, recomputed step by step.

    Attributes:
        name: Name for `meshwright explain NAME`, such as "ring-all-reduce".
        title: Heading, one line.
        published: The number or formula as papers or texts print it.
        source: Paper and section, equation, table or figure.
        steps: `Text`, `Table` and `Figure` records in the order of the computation.
        results: Computed numbers: name with unit -> value, unrounded.
        mistake: Frequent error in texts, and what is right; empty if none is known.
        commands: `meshwright` command lines that show more on the subject; may be empty.
        source_files: Source files with Meshwright's own code for the same computation, relative to the package.
    """

    name: str
    title: str
    published: str
    source: str
    steps: tuple[Step, ...]
    results: Mapping[str, float]
    mistake: str
    commands: tuple[str, ...]
    source_files: tuple[str, ...]

    def to_json_dict(self) -> dict[str, Any]:
        """Convert the worked example to the JSON object that `meshwright explain NAME --json` prints."""
        return to_json_dict(
            {
                "name": self.name, "title": self.title, "published": self.published, "source": self.source,
                "steps": [_step_to_json(step) for step in self.steps], "results": self.results,
                "mistake": self.mistake or None, "commands": self.commands, "source_files": self.source_files,
            }
        )  # fmt: skip


def _step_to_json(step: Step) -> dict[str, Any]:
    """Convert a step of a worked example to a JSON object: its fields, and "kind", which is "text", "table" or
    "figure"."""
    if isinstance(step, Text):
        return {"kind": "text", "text": step.words}
    if isinstance(step, Table):
        return {"kind": "table", "title": step.title, "head": step.head, "rows": step.rows}
    drawing = step.draw_text(COLUMNS) if step.draw_text else None
    return {"kind": "figure", "picture": f"{step.name}.svg", "caption": step.caption, "drawing": drawing}


def format_cell(value: object) -> str:
    """Format a value for a table cell: integers with all digits (`1,234,567`), other numbers with four significant
    digits (`0.125`), text unchanged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def format_size(size: float) -> str:
    """Format `size`, a number of bytes, in decimal units with four significant digits, as papers do: `800 B`, `33.6
    MB`, `2.79 TB`.
    """
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:g} B"
