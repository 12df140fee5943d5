"""Buffers of all ranks after each round of a collective program, as text: a0 -> a0+b0 -> a0+b0+c0 ..."""

from __future__ import annotations

import textwrap

from meshwright.program.buffer_frames import LETTERS, Arrow, Cell, Frame, build_frames, format_legend, format_slot_title
from meshwright.program.check_collective import CheckedCollective
from meshwright.program.collective import CollectiveProgram

_WIDTH = 110


def draw_buffers_text(checked: CheckedCollective, width: int = _WIDTH) -> str:
    """Return all ranks' buffers after each round of transfers of a collective program, as text: the round's sends, then
    a table with a line for each rank and a column for each slot (buffer for one chunk of the vector). Slots written in
    the round are in brackets.

    checked: the verified program. width: characters of a line of sends; a table may be wider. Raises `UserError` if the
    program has too many ranks, slots or rounds to draw.
    """
    program, frames = checked.program, build_frames(checked)
    lines = [f"{program.operation} {program.algorithm} on {program.ranks} ranks: {format_legend(program)}"]
    for frame in frames:
        lines += ["", frame.title, *_format_arrows(program, frame, width), *_format_cell_table(program, frame)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _format_arrows(program: CollectiveProgram, frame: Frame, width: int) -> list[str]:
    """Return the sends and local copies of one round as lines of text, wrapped to `width` characters. program: the
    collective program. frame: snapshot of the buffers after the round, which has these sends and copies."""
    words = [_describe_arrow(program, arrow).replace(" ", "\0") for arrow in frame.arrows]
    lines = textwrap.wrap("   ".join(words), width, break_long_words=False, initial_indent="  ", subsequent_indent="  ")
    return [line.replace("\0", " ") for line in lines]


def _describe_arrow(program: CollectiveProgram, arrow: Arrow) -> str:
    """Describe one send or local copy (`arrow`) of a collective program as text: `0 → 1 data[2]` (rank 0 sends the
    chunk in data[2] to rank 1), `0 → 1 adds data[2]`, `2 copies data[0] into scratch[0]` (on one rank), or `0 → 1` for
    a signal without data."""
    here, there = (program.format_slots(slot, arrow.count) for slot in (arrow.slot, arrow.into))
    if arrow.source == arrow.target:
        return f"{arrow.source} {'adds' if arrow.adds else 'copies'} {here} {'to' if arrow.adds else 'into'} {there}"
    if arrow.count == 0:
        return f"{arrow.source} → {arrow.target}"
    into = "" if arrow.slot == arrow.into else f" {'to' if arrow.adds else 'into'} {there}"
    return f"{arrow.source} → {arrow.target} {'adds ' if arrow.adds else ''}{here}{into}"


def _format_cell_table(program: CollectiveProgram, frame: Frame) -> list[str]:
    """Return a table of all ranks' buffers after a round as lines of text: a header, then one line for each rank with a
    column for each slot (buffer for one chunk). program: the collective program. frame: contents of the buffers."""
    heads = [""] + [format_slot_title(program, slot) for slot in range(len(frame.cells[0]))]
    rows = [[f"rank {rank} {LETTERS[rank]}", *map(_format_cell, cells)] for rank, cells in enumerate(frame.cells)]
    width = max(len(text) for row in rows for text in row[1:]) + 2
    width = max(width, *(len(head) + 3 for head in heads))
    first = max(len(row[0]) for row in rows) + 2
    lines = [" " * (first + 1) + "".join(head.ljust(width) for head in heads[1:])]
    return lines + [row[0].ljust(first) + "".join(text.ljust(width) for text in row[1:]) for row in rows]


def _format_cell(cell: Cell) -> str:
    """Format `cell`, the content of a slot (buffer for one chunk), as text: its label, such as `a0` (rank 0's part of
    chunk 0), in brackets if the slot was written in this round (`[a0]`), else in spaces (` a0 `); `·` instead of the
    label if the slot is empty."""
    text = cell.label or "·"
    return f"[{text}]" if cell.fresh else f" {text} "
