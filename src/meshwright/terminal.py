"""Text for terminals: escaping of control characters, and rendering of rich tables."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable
from textwrap import fill
from typing import Any


def escape_control_characters(text: str) -> str:
    """Replace control characters in `text` with Python escape sequences, and tabs with spaces; newlines are kept. Text
    from user documents may contain control characters, which could control the terminal."""
    return "".join(
        character if character == "\n" or character.isprintable() else ascii(character)[1:-1]
        for character in text.expandtabs(4)
    )


def escape_on_terminal(text: str) -> str:
    """Escape control characters if standard output is a terminal; text for files and pipes is returned unchanged."""
    return escape_control_characters(text) if sys.stdout.isatty() else text


def wrap_on_terminal(text: str) -> str:
    """Wrap lines of prose at words to the terminal's width. Lines with runs of spaces or bars, which belong to tables
    and pictures, are left unchanged, and so is all text if standard output is a file or pipe."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(
        line if len(line) <= width or "  " in line.strip() or "|" in line else fill(
            line, width, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2), break_long_words=False,
            break_on_hyphens=False,
        )
        for line in text.split("\n")
    )  # fmt: skip


def wrap_items(text: str, width: int) -> str:
    """Wrap `text`, a line of items separated by semicolons. If it has at most `width` characters it is returned
    unchanged; otherwise each item gets a line, and all lines but the first are indented. Items longer than `width` are
    wrapped between words. Semicolons in parentheses do not separate items."""
    if len(text) <= width:
        return text
    items = re.split(r"; (?![^(]*\))", text)
    indents = ["", *["  "] * (len(items) - 1)]
    return "\n".join(
        fill(
            item, width, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False,
            break_on_hyphens=False,
        )
        for item, indent in zip(items, indents, strict=True)
    )  # fmt: skip


def print_message(text: str) -> None:
    """Print text on standard error, unbuffered. Control characters are escaped, as the text may quote untrusted
    files."""
    print(escape_control_characters(text), file=sys.stderr, flush=True)


def render_tables(parts: Iterable[Any], width: int = 120) -> str:
    """Render `parts`, rich tables and texts, as one string for standard output: on a terminal in colour and at the
    terminal's width, else without colour and `width` characters wide."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    # No markup: a token or a file may be called "[red]".
    console = Console(force_terminal=terminal, highlight=False, markup=False, width=None if terminal else width)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))
