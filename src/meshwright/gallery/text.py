"""Explanations as text for a terminal, at any width."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from meshwright.gallery.explanation import COLUMNS, Explanation, Figure, Step, Table, Text
from meshwright.terminal import format_table


def render_text(explanation: Explanation, width: int = 80) -> str:
    """Return the worked example `explanation` as text for a terminal, in lines of at most `width` characters (longer
    only for a long word or command).
    """
    parts = [explanation.title, "=" * min(len(explanation.title), width)]
    parts += [_wrap(f"Published: {explanation.published}", width), _wrap(f"Source: {explanation.source}", width)]
    parts += [f"\n{_render_step(step, width)}" for step in explanation.steps]
    if explanation.mistake:
        parts += ["", _wrap(f"Frequent error: {explanation.mistake}", width)]
    if explanation.commands:
        parts += ["", "Try it:", *(f"  {command}" for command in explanation.commands)]
    parts += [_wrap("Code: " + ", ".join(f"src/meshwright/{file}" for file in explanation.source_files), width)]
    return "\n".join(parts)


def render_list(titles: Mapping[str, str], width: int = 80) -> str:
    """Return the list of worked examples as text for a terminal. titles: example's name -> title. width: characters per
    line."""
    first = max(map(len, titles)) + 2
    lines = []
    for name, title in titles.items():
        if width < first + 24:
            lines += [name, *textwrap.wrap(title, width - 2, initial_indent="  ", subsequent_indent="  ")]
        else:
            indent = " " * (first + 2)
            lines += textwrap.wrap(title, width, initial_indent=f"  {name:<{first}}", subsequent_indent=indent)
    return "\n".join(["Worked examples; show one with `meshwright explain NAME`:", *lines])


def _wrap(words: str, width: int) -> str:
    """Return a paragraph wrapped to lines of at most `width` characters, without breaking words."""
    return "\n".join(textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False))


def _render_step(step: Step, width: int) -> str:
    """Return one step (paragraph, table or figure) of an explanation as text for a terminal. width: characters per
    line."""
    if isinstance(step, Text):
        return _wrap(step.words, width)
    if isinstance(step, Table):
        return _wrap(step.title, width) + "\n" + _render_table(step, width)
    assert isinstance(step, Figure)
    drawing = f"\n{step.draw_text(min(width, COLUMNS))}" if step.draw_text else ""
    return _wrap(f"[{step.caption}; --svg FILE writes the picture]", width) + drawing


def _render_table(table: Table, width: int) -> str:
    """Return a table as text with aligned columns, or with one line per cell if the columns are wider than `width`
    characters."""
    head, rows = table.head, table.rows
    columns = list(zip(head, *rows, strict=True))
    sizes = [max(map(len, column)) for column in columns]
    if sum(sizes) + 2 * len(sizes) > width:
        records: list[str] = []
        for row in rows:
            named = [f"    {name}: {cell}" for name, cell in zip(head[1:], row[1:], strict=True) if cell]
            records += [_wrap_indented(words, width) for words in (f"  {row[0]}", *named)]
        return "\n".join(records)
    lines = [f"  {line}" for line in format_table((head, *rows), right=table.numeric)]
    lines.insert(1, "  " + "  ".join("-" * n for n in sizes))
    return "\n".join(lines)


def _wrap_indented(line: str, width: int) -> str:
    """Wrap one line to `width` characters; continuation lines are indented by two spaces more than the line itself."""
    deeper = " " * (len(line) - len(line.lstrip()) + 2)
    return "\n".join(textwrap.wrap(line, width, subsequent_indent=deeper, break_long_words=False) or [""])
