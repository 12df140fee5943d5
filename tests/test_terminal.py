"""Lines for a terminal: no word is cut at its right edge, and none is lost."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios

import pytest

from meshwright.cli.main import main
from meshwright.terminal import print_message, print_row, read_columns, wrap_on_terminal

CHECKED = "  checked           every contribution arrives exactly once; no race; no deadlock even if sends block"
CANDIDATE = f"{'zb-h2':<24} {60.6:>12} {7:>8}  over the memory limit"


@pytest.fixture
def columns(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    return lambda width: monkeypatch.setenv("COLUMNS", str(width))


@pytest.mark.parametrize("width", [50, 60, 80])
@pytest.mark.parametrize("line", [CHECKED, CANDIDATE, "a sentence of " + "many words " * 20])
def test_long_lines_are_wrapped_between_words(line: str, width: int, columns):
    columns(width)
    lines = wrap_on_terminal(line).split("\n")
    assert max(map(len, lines)) <= width and (len(line) <= width or len(lines) > 1)
    assert " ".join(lines).split() == line.split()


def test_last_column_of_a_table_continues_below_itself(columns):
    columns(60)
    _, *others = wrap_on_terminal(CHECKED).split("\n")
    start = CHECKED.index("every")
    assert others and all(len(line) - len(line.lstrip()) == start for line in others)
    _, other = wrap_on_terminal(CANDIDATE).split("\n")  # too little space next to the figures
    assert len(other) - len(other.lstrip()) == 4


@pytest.mark.parametrize(
    "line", ["rank 0 |F0|F1|   f0|" + "i0|" * 30, "0.1  " * 20 + "0.25", f'  layout = "{"dp2 " * 20}"']
)
def test_lines_of_pictures_recipes_and_figures_are_not_wrapped(line: str, columns):
    columns(60)
    assert wrap_on_terminal(line) == line


ROW = f"{'dp2 zero1':<32} {'llama':<14} worst 5.1e-15  loss 4.0e-16  ok"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_rows_of_a_table_on_a_narrow_terminal_have_columns_closer_together(width: int, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    print_row(ROW)
    lines = capsys.readouterr().err.rstrip("\n").split("\n")
    assert max(map(len, lines)) <= width and " ".join(lines).split() == ROW.split()
    assert len(lines) == (2 if width == 40 else 1) and (lines == [ROW]) == (width >= 80)


def test_messages_are_wrapped_but_not_their_commands(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    error = (
        'meshwright: error: unknown device "h100-smx"; did you mean "h100-sxm"? ("meshwright plan --list" prints them)'
    )
    resume = f"to resume: meshwright train tiny.toml {'train.steps=3000 ' * 4}"
    print_message(error)
    print_message(resume)
    *lines, last = capsys.readouterr().err.rstrip("\n").split("\n")
    assert last == resume.rstrip("\n") and len(lines) == 2 and max(map(len, lines)) <= 60
    assert '"meshwright plan --list"' in lines[1]
    assert main(["schedule", "zbv"]) == 2
    lines = capsys.readouterr().err.rstrip("\n").split("\n")
    assert 1 < len(lines) <= 5 and max(map(len, lines)) <= 60


def test_text_for_a_pipe_is_not_wrapped(columns, monkeypatch):
    columns(60)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert wrap_on_terminal(CHECKED) == CHECKED


def test_width_is_that_of_the_terminal_that_is_written_to(monkeypatch: pytest.MonkeyPatch):
    """Standard error may be a terminal where standard output is a pipe."""
    monkeypatch.delenv("COLUMNS", raising=False)
    control, terminal = os.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 61, 0, 0))
        with os.fdopen(terminal, "w") as stream:
            assert read_columns(stream) == 61
            monkeypatch.setenv("COLUMNS", "47")
            assert read_columns(stream) == 47
    finally:
        os.close(control)
