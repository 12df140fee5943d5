"""Buffers of all ranks after each round of a collective program, as SVG: ranks side by side, arrows for transfers."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.draw.markup import Markup, element, join
from meshwright.draw.page import paragraph
from meshwright.draw.picture import Picture
from meshwright.draw.text_width import estimate_text_width
from meshwright.program.buffer_frames import (
    LETTERS,
    Arrow,
    Cell,
    Frame,
    build_frames,
    format_legend,
    format_slot_title,
    sums_contributions,
)
from meshwright.program.check_collective import CheckedCollective
from meshwright.program.collective import CollectiveProgram

_CELL, _GAP, _LANE, _HEAD, _ROW = 28, 50, 7, 26, 8  # pixels: cell height, between ranks, between lanes, ...


def draw_buffers(checked: CheckedCollective) -> Markup:
    """Return HTML with pictures of all ranks' buffers after each round of transfers of a collective program, and a
    legend.

    checked: the verified program. Raises `UserError` if the program has too many ranks, slots (buffers for one chunk)
    or rounds to draw.
    """
    program, drawn = checked.program, build_frames(checked)
    longest = max(
        estimate_text_width(cell.label, monospace=True) for frame in drawn for rank in frame.cells for cell in rank
    )
    cell_width = max(64, round(longest) + 20)
    pictures = [_FramePicture(program, frame, cell_width) for frame in drawn]
    width = max(picture.width for picture in pictures)
    held = {cell.origins for frame in drawn for cells in frame.cells for cell in cells if cell.label}
    size = f"max-width:{round(width * 1.25)}px;--least:{round(width * 0.85)}px"
    sections = [
        element("section", element("h3", frame.title.capitalize()), picture.draw(width), style=size)
        for frame, picture in zip(drawn, pictures, strict=True)
    ]
    columns = f"repeat(auto-fill,minmax(min(100%,{round(width * 0.9)}px),1fr))"
    stripes = [_make_origin_stripes(origins, program.ranks, cell_width) for origins in sorted(held)]
    parts = (
        paragraph(_format_cost(checked), muted=True),
        paragraph(format_legend(program), muted=True),
        element("p", join(_make_legend(program), " "), class_="muted cells"),
        element("div", join(sections, "\n"), class_="frames", style=f"grid-template-columns:{columns}"),
        element("svg", element("defs", join(stripes, "\n")), class_="stripes"),
    )
    return join(parts, "\n")


def _format_cost(checked: CheckedCollective) -> str:
    """Return a sentence on the number of rounds and the traffic of a verified collective program (`checked`), such as
    `6 rounds; every rank sends 1.5 times the vector.`"""
    sent = checked.bytes_sent(1.0)
    least, most = (f"{float(value):.4g}" for value in (sent.min(), sent.max()))
    rounds = f"{checked.rounds} round{'s' * (checked.rounds != 1)}"
    if checked.program.operation == "barrier":
        return f"{rounds} of signals."
    who = f"every rank sends {least}" if least == most else f"ranks send {least} to {most}"
    return f"{rounds}; {who} times the vector."


def _make_legend(program: CollectiveProgram) -> list[Markup]:
    """Return the legend's entries as HTML. They explain the colours, frames and stripes of cells (a cell is a drawn
    slot), and the arrows. If the operation of `program` reduces, one entry says that a cell's colour is stronger the
    more ranks have contributed to the cell."""
    keys = [
        ("background:hsl(var(--part) / .35)", "a chunk"),
        ("background:hsl(var(--whole) / .42)", "final content"),
        ("border:2px solid var(--ink)", "new in this round"),
    ]
    if sums_contributions(program):
        keys[0] = ("background:linear-gradient(90deg,hsl(var(--part) / .12),hsl(var(--part) / .6))",
                   "more contributions, stronger colour")  # fmt: skip
    spans = [element("span", element("i", style=style), words) for style, words in keys]
    more = ("stripes: contributing ranks", "arrows: in the sender's colour")
    return [*spans, *(element("span", words) for words in more)]


def _make_origin_stripes(origins: tuple[int, ...], ranks: int, width: int) -> Markup:
    """Return SVG stripes, one per rank, to draw in the lower part of a cell (drawn slot): coloured if the cell contains
    data of that rank, else grey.

    origins: ranks whose data the cell contains. ranks: number of ranks. width: width of the cell in pixels. The stripes
    have an id, so that all cells with the same origins can refer to one drawing.
    """
    bit = (width - 12) / ranks
    stripes = (
        element(
            "rect", class_="bit" if rank in origins else "off", style=f"--hue:{_compute_rank_hue(rank, ranks)}",
            x=6 + rank * bit + 0.5, y=_CELL - 6, width=bit - 1, height=3,
        )
        for rank in range(ranks)
    )  # fmt: skip
    return element("g", stripes, id=_make_stripes_id(origins))


def _make_stripes_id(origins: tuple[int, ...]) -> str:
    """Return the id of the SVG element that `_make_origin_stripes` makes for the ranks `origins`, such as `parts-abd`
    for ranks 0, 1, 3."""
    return "parts-" + "".join(LETTERS[rank] for rank in origins)


def _compute_rank_hue(rank: int, ranks: int) -> int:
    """Return the hue of the colour of rank number `rank`, in degrees from 0 to 359; consecutive ranks get distant hues.
    ranks: number of ranks."""
    step = 7 if ranks > 10 else 3
    return (20 + 360 * (rank * step % ranks if ranks % step else rank) // ranks) % 360


@dataclass
class _FramePicture:
    """Picture of all ranks' buffers after one round of a collective program: a column for each rank, a row for each
    slot (buffer for one chunk of the vector).

    program: the program. frame: buffer contents after the round, and its sends. cell_width: width of a column's cell in
    pixels. Arrows between neighbouring ranks are straight; longer arrows run horizontally in a lane, a free strip above
    the row of the slot from which the arrow starts.
    """

    program: CollectiveProgram
    frame: Frame
    cell_width: int

    def __post_init__(self) -> None:
        """Compute the layout in pixels: width, height, top of each slot's row, and the lane (free strip above a row) in
        which each long arrow runs."""
        self.ranks, self.slots = len(self.frame.cells), len(self.frame.cells[0])
        titles = [format_slot_title(self.program, slot) for slot in range(self.slots)]
        self.left = 16 + max(round(estimate_text_width(title, 11, monospace=True)) for title in titles)
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

    def draw(self, width: int) -> Markup:
        """Return the picture as SVG. width: width of the SVG picture in pixels."""
        picture = Picture()
        for slot, top in enumerate(self.top):
            picture.add_text(self.left - 8, top + _CELL / 2 + 4, format_slot_title(self.program, slot), class_="side")
        for rank, cells in enumerate(self.frame.cells):
            words = f"rank {rank} · {LETTERS[rank]}"
            picture.add_text(self._compute_rank_left(rank) + self.cell_width / 2, 16, words, class_="rank")
            for slot, cell in enumerate(cells):
                self._draw_cell(picture, rank, slot, cell)
        for number, arrow in enumerate(self.frame.arrows):
            self._draw_arrow(picture, number, arrow)
        title = f"{self.program.operation} {self.program.algorithm}, {self.frame.title}"
        return picture.to_svg(width, self.height, title)

    def _compute_rank_left(self, rank: int) -> int:
        """Return the x coordinate, in pixels, of the left edge of rank number `rank`'s column."""
        return self.left + rank * (self.cell_width + _GAP)

    def _draw_cell(self, picture: Picture, rank: int, slot: int, cell: Cell) -> None:
        """Draw one slot of a rank (buffer for one chunk of the vector) into `picture`: its content as text on a
        coloured background. The colour is stronger the more ranks have contributed to the content. cell: the content.
        """
        x, y, width = self._compute_rank_left(rank), self.top[slot], self.cell_width
        share = len(cell.origins) / self.ranks if sums_contributions(self.program) else 0.5
        kind = "none" if not cell.label else "whole" if cell.whole else "part"
        picture.add(
            "rect", class_=kind + " fresh" * cell.fresh, style=f"--full:{0.08 + 0.5 * share:.2f}", x=x, y=y,
            width=width, height=_CELL, rx=4,
        )  # fmt: skip
        picture.add_text(x + width / 2, y + _CELL / 2 + 2, cell.label, class_="cell")
        if cell.label and self.ranks > 1:
            picture.add("use", href=f"#{_make_stripes_id(cell.origins)}", x=x, y=y)

    def _draw_arrow(self, picture: Picture, number: int, arrow: Arrow) -> None:
        """Draw one send into `picture`, as an arrow from slots (buffers for one chunk) of one rank to slots of another;
        a local copy is an arrow on one rank. number: index of the arrow in `self.frame.arrows`, which selects the lane
        (horizontal strip) of a long arrow. arrow: the send or copy."""
        right = arrow.target >= arrow.source
        side = 1 if right else -1
        within = arrow.source == arrow.target
        x1 = self._compute_rank_left(arrow.source) + (self.cell_width if right else 0) + 2 * side
        x2 = (
            self._compute_rank_left(arrow.target)
            + (self.cell_width if within or not right else 0)
            - 2 * side * (-1 if within else 1)
        )
        y1, y2 = (
            self._compute_slots_middle(slot, arrow.count) - 3 * side * (not within) for slot in (arrow.slot, arrow.into)
        )
        tip = x2 + 7 if within else x2 - 7 * side  # where the line ends and the head begins
        if within:
            line = f"M{x1} {y1} C{x1 + 24} {y1} {x1 + 24} {y2} {tip} {y2}"
        elif number in self.lane:
            lane = self.top[arrow.slot] - 5 - _LANE * self.lane[number]
            out, into = x1 + side * (8 + 3 * (self.lane[number] % 4)), tip - side * (6 + 3 * (self.lane[number] % 4))
            line = _make_rounded_path([(x1, y1), (out, y1), (out, lane), (into, lane), (into, y2), (tip, y2)])
        else:
            line = f"M{x1} {y1} C{x1 + 18 * side} {y1} {tip - 18 * side} {y2} {tip} {y2}"
        brackets = ""
        if arrow.count > 1:
            for x, slot in ((x1, arrow.slot), (x2, arrow.into)):
                brackets += f"M{x} {self.top[slot] + 2} V{self.top[slot + arrow.count - 1] + _CELL - 2} "
        kind = "signal" if arrow.count == 0 else "many" if arrow.count > 1 else "one"
        hue = f"--hue:{_compute_rank_hue(arrow.source, self.ranks)}"
        picture.add("path", class_=kind, style=hue, d=brackets + line)
        picture.add("path", class_="head", style=hue, d=f"M{x2} {y2} L{tip} {y2 - 4.5} L{tip} {y2 + 4.5} Z")

    def _compute_slots_middle(self, slot: int, count: int) -> float:
        """Return the y coordinate, in pixels, of the vertical middle of `count` rows of slots (buffers for one chunk),
        from row `slot` on."""
        return (self.top[slot] + self.top[slot + max(count, 1) - 1] + _CELL) / 2


def _make_rounded_path(points: list[tuple[float, float]]) -> str:
    """Return an SVG path with rounded corners through `points` (x, y); consecutive points lie on a horizontal or
    vertical line."""
    text = f"M{points[0][0]} {points[0][1]}"
    for (x0, y0), (x1, y1), (x2, y2) in zip(points, points[1:], points[2:], strict=False):
        before = min(5.0, (abs(x1 - x0) + abs(y1 - y0)) / 2)
        after = min(5.0, (abs(x2 - x1) + abs(y2 - y1)) / 2)
        a = (x1 - before * _compute_sign(x1 - x0), y1 - before * _compute_sign(y1 - y0))
        b = (x1 + after * _compute_sign(x2 - x1), y1 + after * _compute_sign(y2 - y1))
        text += f" L{a[0]:g} {a[1]:g} Q{x1:g} {y1:g} {b[0]:g} {b[1]:g}"
    return text + f" L{points[-1][0]:g} {points[-1][1]:g}"


def _compute_sign(number: float) -> int:
    """Return the sign of a number: -1, 0 or 1."""
    return (number > 0) - (number < 0)
