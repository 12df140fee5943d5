"""The buffers of all ranks round by round as one page: a picture a round, ranks side by side, arrows for what moves.

The page needs nothing but itself, and follows the reader's choice of light or dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from meshwright.program.buffer_frames import LETTERS, Arrow, Cell, Frame, frames, legend, reduces, slot_title
from meshwright.program.check_collective import CheckedCollective
from meshwright.program.collective import CollectiveProgram

_CELL, _GAP, _LANE, _HEAD, _ROW = 28, 50, 7, 26, 8  # pixels: cell height, between ranks, between lanes, ...

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --dim: #667; --line: #c9ced6; --part: 215 85% 52%;
  --whole: 150 60% 38%; --tone: 42%; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e8ecf2; --dim: #9aa5b4; --line: #3b4452;
  --part: 215 85% 62%; --whole: 150 55% 50%; --tone: 66%; } }
body { margin: 24px auto; padding: 0 20px; max-width: 1500px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 15px; margin: 0 0 4px; }
p { margin: 4px 0; color: var(--dim); max-width: 100ch; }
.keys { text-indent: -14px; max-width: none; }
.key { display: inline-block; width: 26px; height: 14px; border-radius: 3px; vertical-align: -2px; margin: 0 4px 0 14px;
  box-sizing: border-box; }
.frames { display: grid; gap: 28px 40px; margin-top: 20px; }
.stripes { position: absolute; width: 0; height: 0; }
section { overflow-x: auto; } section svg { width: 100%; display: block; } svg text { fill: var(--ink); }
.cell { font: 12px ui-monospace, monospace; text-anchor: middle; } .fresh + text { font-weight: 700; }
.side { font: 11px ui-monospace, monospace; text-anchor: end; fill: var(--dim) !important; }
.rank { font: 600 13px system-ui, sans-serif; text-anchor: middle; }
rect.none { fill: none; stroke: var(--line); stroke-dasharray: 3 3; }
rect.part { fill: hsl(var(--part) / var(--full)); stroke: var(--line); }
rect.whole { fill: hsl(var(--whole) / .42); stroke: var(--line); }
rect.fresh { stroke: var(--ink); stroke-width: 2; stroke-dasharray: none; }
rect.bit { fill: hsl(var(--hue) 70% var(--tone)); } rect.off { fill: var(--line); opacity: .45; }
path { fill: none; stroke: hsl(var(--hue) 70% var(--tone)); stroke-width: 2; }
path.many { stroke-width: 3; } path.signal { stroke-dasharray: 5 3; }
path.head { fill: hsl(var(--hue) 70% var(--tone)); stroke: none; }
"""


def draw_buffers_html(checked: CheckedCollective) -> str:
    """The page. Raises `UserError` where the program is too large to draw."""
    program, drawn = checked.program, frames(checked)
    name = f"{program.operation} {program.algorithm}, {program.ranks} ranks"
    cell_width = _cell_width(drawn)
    pictures = [_Picture(program, frame, cell_width) for frame in drawn]
    width = max(picture.width for picture in pictures)
    held = {cell.origins for frame in drawn for cells in frame.cells for cell in cells if cell.label}
    stripes = "\n".join(_stripes(origins, program.ranks, cell_width) for origins in sorted(held))
    sections = "\n".join(
        f"<section><h2>{escape(frame.title.capitalize())}</h2>\n{picture.draw(width)}</section>"
        for frame, picture in zip(drawn, pictures, strict=True)
    )
    most, least = round(width * 1.25), round(width * 0.75)
    columns = f"repeat(auto-fill, minmax(min(100%, {round(width * 0.9)}px), 1fr))"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(name)}</title>\n<style>{_STYLE}.frames {{ grid-template-columns: {columns}; }}\n"
        f"section {{ max-width: {most}px; }} section svg {{ min-width: {least}px; }}</style></head>\n"
        f"<body>\n<h1>{escape(name)}</h1>\n<p>{escape(_cost(checked))}</p>\n<p>{escape(legend(program))}</p>\n"
        f'<p class="keys">{_keys(program)}</p>\n<div class="frames">\n{sections}\n</div>\n'
        f'<svg class="stripes"><defs>\n{stripes}\n</defs></svg>\n</body></html>\n'
    )


def _cost(checked: CheckedCollective) -> str:
    """`6 rounds; every rank sends 1.5 times the vector.`"""
    sent = checked.bytes_sent(1.0)
    least, most = (f"{float(value):.4g}" for value in (sent.min(), sent.max()))
    rounds = f"{checked.rounds} round{'s' * (checked.rounds != 1)}"
    if checked.program.operation == "barrier":
        return f"{rounds} of signals."
    who = f"every rank sends {least}" if least == most else f"ranks send {least} to {most}"
    return f"{rounds}; {who} times the vector."


def _keys(program: CollectiveProgram) -> str:
    """The legend of colours."""
    keys = [
        ("background:hsl(var(--part) / .35)", "a chunk"),
        ("background:hsl(var(--whole) / .42)", "as the operation promises"),
        ("border:2px solid var(--ink)", "new in this round"),
    ]
    if reduces(program):
        keys[0] = ("background:hsl(var(--part) / .15)", "")
        keys.insert(1, ("background:hsl(var(--part) / .55);margin-left:2px", "more parts, stronger colour"))
    spans = [f'<span class="key" style="{style}"></span>{words}' for style, words in keys]
    return "".join(spans) + " &emsp; stripes: whose parts are in it &emsp; arrows: in the sender's colour"


def _cell_width(drawn: list[Frame]) -> int:
    longest = max(len(cell.label) for frame in drawn for rank in frame.cells for cell in rank)
    return max(64, round(7.6 * longest) + 20)


def _stripes(origins: tuple[int, ...], ranks: int, width: int) -> str:
    """Whose parts a cell holds: a stripe a rank, drawn once for all cells that hold the same."""
    bit = (width - 12) / ranks
    stripes = "".join(
        f'<rect class="{"bit" if rank in origins else "off"}" style="--hue:{_hue(rank, ranks)}" '
        f'x="{6 + rank * bit + 0.5:.1f}" y="{_CELL - 6}" width="{bit - 1:.1f}" height="3"/>'
        for rank in range(ranks)
    )
    return f'<g id="{_name(origins)}">{stripes}</g>'


def _name(origins: tuple[int, ...]) -> str:
    """`parts-abd`, of ranks 0, 1 and 3."""
    return "parts-" + "".join(LETTERS[rank] for rank in origins)


def _hue(rank: int, ranks: int) -> int:
    """Colours of neighbours lie far apart on the wheel."""
    step = 7 if ranks > 10 else 3
    return (20 + 360 * (rank * step % ranks if ranks % step else rank) // ranks) % 360


@dataclass
class _Picture:
    """One frame. Arrows between neighbours go straight; others take a lane above the row of the slot they leave."""

    program: CollectiveProgram
    frame: Frame
    cell_width: int

    def __post_init__(self) -> None:
        self.ranks, self.slots = len(self.frame.cells), len(self.frame.cells[0])
        self.left = 8 + max(round(6.8 * len(slot_title(self.program, slot))) for slot in range(self.slots)) + 8
        self.width = self.left + self.ranks * self.cell_width + (self.ranks - 1) * _GAP + _GAP // 2
        self.lane: dict[int, int] = {}  # of each long arrow
        taken: dict[int, list[list[tuple[int, int]]]] = {}  # by row, lanes of spans of ranks
        for i, arrow in enumerate(self.frame.arrows):
            if abs(arrow.source - arrow.target) > 1:
                span = (min(arrow.source, arrow.target), max(arrow.source, arrow.target))
                lanes = taken.setdefault(arrow.slot, [])
                fits = (k for k, lane in enumerate(lanes) if all(b <= span[0] or span[1] <= a for a, b in lane))
                self.lane[i] = next(fits, len(lanes))
                if self.lane[i] == len(lanes):
                    lanes.append([])
                lanes[self.lane[i]].append(span)
        self.top, y = [], _HEAD
        for slot in range(self.slots):
            y += _ROW + _LANE * len(taken.get(slot, ()))
            self.top.append(y)
            y += _CELL
        self.height = y + 6

    def draw(self, width: int) -> str:
        title = f"{self.program.operation} {self.program.algorithm}, {self.frame.title}"
        parts = [f'<svg viewBox="0 0 {width} {self.height}" role="img" aria-label="{escape(title)}">']
        for slot in range(self.slots):
            y = self.top[slot] + _CELL / 2 + 4
            parts.append(f'<text class="side" x="{self.left - 8}" y="{y}">{slot_title(self.program, slot)}</text>')
        for rank, cells in enumerate(self.frame.cells):
            x = self._x(rank) + self.cell_width / 2
            parts.append(f'<text class="rank" x="{x}" y="16">rank {rank} · {LETTERS[rank]}</text>')
            parts += [self._cell(rank, slot, cell) for slot, cell in enumerate(cells)]
        parts += [self._arrow(i, arrow) for i, arrow in enumerate(self.frame.arrows)]
        return "\n".join([*parts, "</svg>"])

    def _x(self, rank: int) -> int:
        """Left edge of a rank's cells."""
        return self.left + rank * (self.cell_width + _GAP)

    def _cell(self, rank: int, slot: int, cell: Cell) -> str:
        x, y, width = self._x(rank), self.top[slot], self.cell_width
        share = len(cell.origins) / self.ranks if reduces(self.program) else 0.5
        kind = "none" if not cell.label else "whole" if cell.whole else "part"
        text = (
            f'<rect class="{kind}{" fresh" * cell.fresh}" style="--full:{0.08 + 0.5 * share:.2f}" x="{x}" y="{y}" '
            f'width="{width}" height="{_CELL}" rx="4"/>'
            f'<text class="cell" x="{x + width / 2}" y="{y + _CELL / 2 + 2}">{escape(cell.label)}</text>'
        )
        if cell.label and self.ranks > 1:
            text += f'<use href="#{_name(cell.origins)}" x="{x}" y="{y}"/>'
        return text

    def _arrow(self, number: int, arrow: Arrow) -> str:
        right = arrow.target >= arrow.source
        side = 1 if right else -1
        within = arrow.source == arrow.target
        x1 = self._x(arrow.source) + (self.cell_width if right else 0) + 2 * side
        x2 = self._x(arrow.target) + (self.cell_width if within or not right else 0) - 2 * side * (-1 if within else 1)
        y1, y2 = (self._middle(slot, arrow.count) - 3 * side * (not within) for slot in (arrow.slot, arrow.into))
        tip = x2 + 7 if within else x2 - 7 * side  # where the line ends and the head begins
        if within:
            line = f"M{x1} {y1} C{x1 + 24} {y1} {x1 + 24} {y2} {tip} {y2}"
        elif number in self.lane:
            lane = self.top[arrow.slot] - 5 - _LANE * self.lane[number]
            out, into = x1 + side * (8 + 3 * (self.lane[number] % 4)), tip - side * (6 + 3 * (self.lane[number] % 4))
            line = _bent([(x1, y1), (out, y1), (out, lane), (into, lane), (into, y2), (tip, y2)])
        else:
            line = f"M{x1} {y1} C{x1 + 18 * side} {y1} {tip - 18 * side} {y2} {tip} {y2}"
        head = f"M{x2} {y2} L{tip} {y2 - 4.5} L{tip} {y2 + 4.5} Z"
        brackets = ""
        if arrow.count > 1:
            for x, slot in ((x1, arrow.slot), (x2, arrow.into)):
                brackets += f"M{x} {self.top[slot] + 2} V{self.top[slot + arrow.count - 1] + _CELL - 2} "
        kind = "signal" if arrow.count == 0 else "many" if arrow.count > 1 else "one"
        return (
            f'<g style="--hue:{_hue(arrow.source, self.ranks)}"><path class="{kind}" d="{brackets}{line}"/>'
            f'<path class="head" d="{head}"/></g>'
        )

    def _middle(self, slot: int, count: int) -> float:
        return (self.top[slot] + self.top[slot + max(count, 1) - 1] + _CELL) / 2


def _bent(points: list[tuple[float, float]]) -> str:
    """A path along horizontal and vertical lines with round corners."""
    text = f"M{points[0][0]} {points[0][1]}"
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:], strict=False):
        before = min(5.0, (abs(x1 - x0) + abs(y1 - y0)) / 2)
        after = min(5.0, (abs(x2 - x1) + abs(y2 - y1)) / 2)
        a = (x1 - before * _sign(x1 - x0), y1 - before * _sign(y1 - y0))
        b = (x1 + after * _sign(x2 - x1), y1 + after * _sign(y2 - y1))
        text += f" L{a[0]:g} {a[1]:g} Q{x1:g} {y1:g} {b[0]:g} {b[1]:g}"
    return text + f" L{points[-1][0]:g} {points[-1][1]:g}"


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
