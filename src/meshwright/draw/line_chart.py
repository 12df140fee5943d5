"""Line charts as SVG: curves over two axes, named in a legend or at their ends."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.draw.axis import Axis
from meshwright.draw.markup import Markup, format_number
from meshwright.draw.picture import Picture, paint
from meshwright.draw.text_width import text_width

MOST_MARKED = 40
"""Maximum number of points of a series that are also drawn as dots."""
BUCKETS = 720
"""Columns of a chart: a series with more than twice as many points is drawn by the extremes in each column."""
COLUMNS = 90
"""Maximum number of columns of a chart that show values on hover."""
LINE = 15  # pixels from label to label
STRIP = 20


@dataclass(frozen=True)
class Series:
    """One curve of a line chart: `points` (x, y) joined by a line.

    name: label of the curve. colour: style-sheet colour, such as "blue". kind: line style, "" (default), "thin",
        "thick", "named" or "dashed"; "thick" and "named" emphasize the name too. dots: True to mark the points; a
        single point is always marked, as its line is invisible.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    kind: str = ""
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """Vertical line in a chart at x = `x`, with the text `words` beside it. y: y value at which a dot is drawn on the
    line, None for no dot."""

    x: float
    words: str
    y: float | None = None


@dataclass(frozen=True)
class Band:
    """Named interval of a chart's x axis, drawn as a box in a strip of consecutive intervals: from the end of the
    previous band (or the beginning of the axis) to x = `end`.

    name: text in the box. title: text on hover. colour: style-sheet colour, such as "blue". until: label written at the
    end of the box, empty for none.
    """

    end: float
    name: str
    title: str
    colour: str
    until: str = ""


@dataclass
class Plot:
    """Line chart under construction; its methods append to an SVG picture.

    x_axis, y_axis: axes with their ranges and ticks. right, top, bottom: edges of the plotting area in pixels. The left
    edge (attribute `left`) leaves space for the labels of the y axis.
    """

    x_axis: Axis
    y_axis: Axis
    right: float
    bottom: float
    top: float = 14.0

    def __post_init__(self) -> None:
        self.picture = Picture()
        self.left = 20 + max((text_width(label) for _, label in self.y_axis.ticks), default=0.0)
        for value, label in self.y_axis.ticks:
            self.picture.line((self.left, self.y(value)), (self.right, self.y(value)), "grid")
            self.picture.text(self.left - 8, self.y(value) + 4, label, "end", class_="dim")
        free = -math.inf
        for value, label in self.x_axis.ticks:
            at, half = self.x(value), text_width(label) / 2
            if at - half < free:
                continue
            if self.x_axis.logarithmic:
                self.picture.line((at, self.top), (at, self.bottom), "grid")
            place = min(at, self.right + 14 - half)  # inside the picture
            self.picture.text(place, self.bottom + 17, label, "middle", class_="dim")
            free = at + half + 6
        if self.x_axis.title:
            middle = (self.left + self.right) / 2
            self.picture.text(middle, self.bottom + 36, self.x_axis.title, "middle", class_="dim")

    def x(self, value: float) -> float:
        """Return the x coordinate, in pixels, of a value on the x axis."""
        return self.left + self.x_axis.compute_fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the y coordinate, in pixels, of a value on the y axis."""
        return self.bottom - self.y_axis.compute_fraction(value) * (self.bottom - self.top)

    def draw_line(self, series: Series) -> None:
        """Draw a series as a line through its finite points, downsampled to the chart's resolution."""
        places = [
            (self.x(x), self.y(y)) for x, y in downsample([point for point in series.points if math.isfinite(point[1])])
        ]
        points = " ".join(f"{format_number(x, 1)},{format_number(y, 1)}" for x, y in places)
        kind = series.kind or None
        self.picture.add(
            "polyline", title=series.name, points=points, class_=kind, style=f"stroke:{paint(series.colour)}"
        )
        marked = len(places) == 1 or (series.dots and len(places) <= MOST_MARKED)
        for x, y in places if marked else ():
            self.picture.add("circle", cx=x, cy=y, r=3, style=f"fill:{paint(series.colour)}")

    def draw_mark(self, mark: Mark) -> None:
        """Draw the vertical line of `mark`, with its text on the side that has more space."""
        x = self.x(mark.x)
        self.picture.line((x, self.top), (x, self.bottom), "mark")
        if mark.y is not None:
            self.picture.add(
                "circle", title=mark.words, cx=round(x, 1), cy=round(self.y(mark.y), 1), r=4.5, class_="point"
            )
        offset, anchor = (6, None) if x <= (self.left + self.right) / 2 else (-6, "end")
        self.picture.text(x + offset, self.top + 12, mark.words, anchor, class_="halo")

    def draw_names(self, series: Sequence[Series]) -> None:
        """Write the name of each series to the right of its last point; names of lines that end close together are
        moved apart. A series that ends before the right edge of the plot gets no name (hovering shows it)."""
        ends = sorted(
            (self.y(one.points[-1][1]), index)
            for index, one in enumerate(series)
            if math.isfinite(one.points[-1][1]) and one.points[-1][0] >= self.x_axis.high * (1 - 1e-9)
        )
        for (at, index), place in zip(ends, spread_labels([at for at, _ in ends], self.bottom), strict=True):
            one = series[index]
            self.picture.line((self.right + 1, at), (self.right + 16, place), "lead")
            strong = one.kind in ("thick", "named")
            style = f"fill:{paint(one.colour)}" if strong else None
            self.picture.text(self.right + 20, place + 4, one.name, class_="strong" if strong else "dim", style=style)

    def draw_hover(self, series: Sequence[Series], name: str) -> None:
        """Cover the plot with transparent columns, one for each x value of the series (at most `COLUMNS`). On hover a
        column shows, for each series, the value at this x or, if the series has no point there, at its last x before.

        name: name of the x values, such as "step".
        """
        values = sorted({x for one in series for x, _ in one.points})
        values = values[:: -(-len(values) // COLUMNS)]
        places = [self.x(value) for value in values]
        edges = [self.left, *(sum(pair) / 2 for pair in pairwise(places)), self.right]
        for at, value in enumerate(values):
            texts = [f"{name} {value:,g}"]
            for one in series:
                if last := bisect_right(one.points, value, key=lambda point: point[0]):
                    x, y = one.points[last - 1]
                    texts.append(f"{one.name}: {y:,.5g}" + ("" if x == value else f" ({name} {x:,g})"))
            self.picture.add(
                "rect", title="\n".join(texts), x=edges[at], y=self.top, width=edges[at + 1] - edges[at],
                height=self.bottom - self.top, class_="hit",
            )  # fmt: skip

    def draw_bands(self, name: str, bands: Sequence[Band]) -> None:
        """Draw `bands` (named x intervals) as a coloured strip below the x axis, with names where they fit. name: label
        at the left of the strip."""
        top, start, last = self.bottom + 32, self.left, -math.inf
        self.picture.text(self.left - 8, top + 14, name, "end", class_="dim")
        for band in bands:
            end = self.x(band.end)
            style = f"fill:{paint(band.colour)}"
            self.picture.add("rect", title=band.title, x=start, y=top, width=end - start, height=STRIP, style=style)
            if end - start > text_width(band.name, 10.5) + 4:
                self.picture.text((start + end) / 2, top + 14, band.name, "middle", class_="on")
            if band.until and end - last > text_width(band.until) + 10:
                last = end
                self.picture.line((end, top + STRIP), (end, top + STRIP + 5), "lead")
                self.picture.text(end, top + STRIP + 16, band.until, "middle")
            start = end


def draw_lines(
    x_axis: Axis,
    y_axis: Axis,
    series: Sequence[Series],
    marks: Sequence[Mark] = (),
    *,
    height: int = 280,
    hover: str = "",
    legend: bool = False,
) -> Markup:
    """Return a line chart as SVG, 760 pixels wide and at least `height` high, with a legend if there are several
    series.

    x_axis, y_axis: axes with their ranges and ticks. series: the curves. marks: vertical lines with texts. height: in
    pixels. hover: name of the x values, such as "step", for the texts that show all values at an x on hover; empty: no
    such texts. legend: True for a legend even with a single series.
    """
    plot = Plot(x_axis, y_axis, right=744, bottom=height - (44 if not x_axis.title else 48))
    for one in series:
        plot.draw_line(one)
    for mark in marks:
        plot.draw_mark(mark)
    if hover:
        plot.draw_hover(series, hover)
    entries = [(one.name, {"style": f"fill:{paint(one.colour)}"}) for one in series if len(series) > 1 or legend]
    free = plot.right - text_width(y_axis.title) - 16
    end = plot.picture.legend(entries, plot.left, free, height - 5) if entries else height - 5
    plot.picture.text(plot.right, height - 5, y_axis.title, "end", class_="dim")
    return plot.picture.svg(760, end + 5, y_axis.title or x_axis.title)


def spread_labels(places: Sequence[float], limit: float) -> list[float]:
    """Move labels apart so that they do not overlap; return their vertical positions in pixels: ascending, at least one
    line of text apart, none greater than `limit`, and close to the wanted positions. places: wanted positions in
    pixels, ascending."""
    apart: list[float] = []
    for place in places:
        apart.append(max(place, apart[-1] + LINE) if apart else place)
    for index in reversed(range(len(apart))):
        apart[index] = min(apart[index], limit)
        limit = apart[index] - LINE
    return apart


def downsample(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Reduce the points (x, y) of a line to at most 2 x `BUCKETS` points that draw the same line.

    The points are divided into buckets of consecutive points; the points with the lowest and the highest y of each
    bucket are kept, and both ends of the line.
    """
    if len(points) <= 2 * BUCKETS:
        return points
    kept = {0, len(points) - 1}
    for bucket in range(BUCKETS - 1):
        places = range(len(points) * bucket // (BUCKETS - 1), len(points) * (bucket + 1) // (BUCKETS - 1))
        kept |= {choose(places, key=lambda index: points[index][1]) for choose in (min, max)}
    return [points[index] for index in sorted(kept)]
