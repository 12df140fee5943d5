"""Text for terminals and other devices: escaping of control characters, and rendering of rich tables."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, TextIO

_UNWRAPPED = re.compile(r".*\||\s*[\w.]+ = |to resume: ")
LEAST_WORDS = 16
"""Minimum characters for prose to the right of a table's other columns; with fewer, it continues below them."""


def escape_control_characters(text: str) -> str:
    """Replace control characters in `text` with Python escape sequences, and tabs with spaces; newlines are kept. Text
    from user documents may contain control characters, which could control the terminal."""
    return "".join(
        character if character == "\n" or character.isprintable() else ascii(character)[1:-1]
        for character in text.expandtabs(4)
    )


def escape_in_table(text: str) -> str:
    """Escape control characters and newlines in the text of a table's cell, which a newline would split."""
    return escape_control_characters(text).replace("\n", "\\n")


def escape_on_terminal(text: str) -> str:
    """Escape control characters if standard output is a terminal; text for files and pipes is returned unchanged."""
    return escape_control_characters(text) if sys.stdout.isatty() else text


def wrap_on_terminal(text: str) -> str:
    """Wrap lines of prose, and prose in the last column of a table, at words to the terminal's width. Lines of pictures
    (with bars), lines to be copied (recipe keys, commands) and lines of figures alone are left unchanged, and so is all
    text if standard output is a file or pipe."""
    return _wrap_lines(text, read_columns(sys.stdout)) if sys.stdout.isatty() else text


def wrap_message(text: str) -> str:
    """Wrap text for standard error as `wrap_on_terminal` wraps text for standard output."""
    return _wrap_lines(text, read_columns(sys.stderr)) if sys.stderr.isatty() else text


def read_columns(stream: TextIO) -> int:
    """Return the width in characters of the terminal that `stream` is: the environment variable COLUMNS if it is set,
    else what the terminal says; 80 if it says nothing."""
    if not os.environ.get("COLUMNS"):
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(stream.fileno()).columns or 80
    return shutil.get_terminal_size().columns


def _wrap_lines(text: str, width: int) -> str:
    """Wrap the lines of `text` to `width` characters; see `wrap_on_terminal`."""
    return "\n".join(
        line if len(line) <= width or _UNWRAPPED.match(line) else _wrap_last_column(line, width)
        for line in text.split("\n")
    )


def _wrap_last_column(line: str, width: int) -> str:
    """Wrap a line at words to `width` characters. If the line belongs to a table (columns are separated by two spaces
    or more), continuation lines begin below its last column, or four characters in if that leaves little space; a last
    column without spaces is not wrapped."""
    start = len(line) - len(line.lstrip())
    columns = [*re.finditer(r"(?<=\S) {2,}(?=\S)", line)]
    indent = start + 2
    if columns:
        last = columns[-1].end()
        if " " not in line[last:].strip():
            return line
        indent = last if width - last >= LEAST_WORDS else start + 4
    return wrap_line(line, width, " " * indent)


def wrap_line(line: str, width: int, indent: str) -> str:
    """Wrap a line between words, but not within a quoted command, to `width` characters; longer words are not broken.
    Continuation lines begin with `indent`, or with four spaces if `indent` leaves little space."""
    indent = indent if width - len(indent) >= LEAST_WORDS else " " * 4
    joined = re.sub(r'"meshwright [^"]*"|`[^`]*`', lambda found: found[0].replace(" ", "\0"), line)
    wrapped = fill(joined, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return wrapped.replace("\0", " ")


def format_table(
    rows: Sequence[Sequence[str]], width: int | None = None, droppable: Sequence[str] = (),
    right: Sequence[bool] | None = None,
) -> list[str]:  # fmt: skip
    """Format a table as lines of text; the first row is the head.

    width: most characters of a line; as long as lines are longer, the columns `droppable` are left out one by one.
    right: True for each right-aligned column; None: numbers are right-aligned, columns with words left-aligned."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if right is None:
        right = [not any(map(str.isalpha, "".join(column[1:]))) for column in columns]
    align = [str.rjust if number else str.ljust for number in right]
    aligned = ([put(cell, size) for cell, size, put in zip(row, widths, align, strict=True)] for row in rows)
    lines = ["  ".join(cells).rstrip() for cells in aligned]
    if width is None or not droppable or max(map(len, lines)) <= width:
        return lines
    at = rows[0].index(droppable[0])
    fewer, right = [[*row[:at], *row[at + 1 :]] for row in rows], [*right[:at], *right[at + 1 :]]
    return format_table(fewer, width, droppable[1:], right)


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


def is_device(path: Path) -> bool:
    """Return True if `path` is a device or pipe, such as /dev/stdout, which output must not replace."""
    return path.exists() and not path.is_file() and not path.is_dir()


def write_output(path: Path, data: bytes, replace: Callable[[Path, bytes], object]) -> None:
    """Write `data` to the file, device or pipe `path`. A file, or the one that a link names, is replaced by `replace`,
    a function of path and data. Raises `OSError` if that fails."""
    if is_device(path):
        path.write_bytes(data)
    else:
        replace(Path(os.path.realpath(path)), data)


def print_message(text: str) -> None:
    """Print text on standard error, unbuffered, wrapped at words on a terminal. Control characters are escaped, as the
    text may quote untrusted files."""
    print(wrap_message(escape_control_characters(text)), file=sys.stderr, flush=True)


def print_row(text: str) -> None:
    """Print one line of a table on standard error. If that is a terminal too narrow for the line, its columns are moved
    together, and the line is wrapped between words if that does not suffice."""
    if sys.stderr.isatty() and len(text) > (width := read_columns(sys.stderr)):
        text = re.sub(r"(?<=\S) {2,}(?=\S)", "  ", text)
        text = text if len(text) <= width else wrap_line(text, width, "    ")
    print_message(text)


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
