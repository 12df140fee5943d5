"""Text for terminals: what could steer one is written out, tables become lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def printable(text: str) -> str:
    """`text` with what could steer a terminal written out: documents may hold anything."""
    return "".join(
        character if character == "\n" or character.isprintable() else ascii(character)[1:-1]
        for character in text.expandtabs(4)
    )


def escape_on_terminal(text: str) -> str:
    """`text` for standard output: `printable` where that is a terminal, unchanged for files and pipes."""
    return printable(text) if sys.stdout.isatty() else text


def print_message(text: str) -> None:
    """Print `text`, which may quote untrusted files, on standard error at once."""
    print(printable(text), file=sys.stderr, flush=True)


def rendered(parts: Iterable[Any], width: int = 120) -> str:
    """Tables as text for standard output, with colours where that is a terminal, else `width` characters wide."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    # No markup: a token or a file may be called "[red]".
    console = Console(force_terminal=terminal, highlight=False, markup=False, width=None if terminal else width)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().split("\n"))
