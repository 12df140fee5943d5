"""Line charts as SVG: curves over two axes, named in a legend or at their ends."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from meshwright.draw.axis import Axis
from meshwright.draw.markup import Markup, element, format_number
from meshwright.draw.picture import Picture, css_var, draw_for_two_widths
from meshwright.draw.text_width import estimate_text_width

MAX_MARKED = 40
"""Maximum number of points of a series that are also drawn as dots."""
COLUMN = 8
"""Least width, in pixels, of a chart's columns that show values on hover."""
LINE = 15  # pixels from label to label
STRIP = 20


@dataclass(frozen=True)
class Series:
    """One curve of a line chart: `points` (x, y) joined by a line.

    name: label of the curve. colour: style-sheet colour, such as "blue". kind: line style: "" (default), "thin",
    "thick", "dashed", or "named" (slightly thick, for the curve that the user asked for); "thick" and "named" make the
    name bold too. dots: True to mark the points; a single point is always marked, as its line is invisible.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    kind: str = ""
    dots: bool = False


@dataclass(frozen=True)
class Mark:
    """Vertical line in a chart at the x value `x`, with the text `words` next to it. y: y value at which a dot is drawn
    on the line, None for no dot."""

    x: float
    words: str
    y: float | None = None


@dataclass(frozen=True)
class Band:
    """Named interval of a chart's x axis, drawn as a coloured box in a strip of boxes below the axis. Each band begins
    where the previous band ends (the first band at the beginning of the axis) and ends at x = `end`.

    Attributes:
        name: Text in the box.
        title: Text on hover.
        colour: Style-sheet colour, such as "blue".
        until: Label written at the end of the box, empty for none.
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
        """Create the SVG picture and draw the tick labels, grid lines and title of the axes."""
        self.picture = Picture()
        self.left = 20 + max((estimate_text_width(label) for _, label in self.y_axis.ticks), default=0.0)
        self._columns = max(2, int(self.right - self.left))  # of pixels
        for value, label in self.y_axis.ticks:
            self.picture.add_line((self.left, self.y(value)), (self.right, self.y(value)), "grid")
            self.picture.add_text(self.left - 8, self.y(value) + 4, label, "end", class_="dim")
        free = -math.inf
        for value, label in self.x_axis.ticks:
            at, half = self.x(value), estimate_text_width(label) / 2
            place = max(half, min(at, self.right + 14 - half))  # inside the picture
            if place - half < free:
                continue
            if self.x_axis.logarithmic:
                self.picture.add_line((at, self.top), (at, self.bottom), "grid")
            self.picture.add_text(place, self.bottom + 17, label, "middle", class_="dim")
            free = place + half + 6
        if self.x_axis.title:
            middle = (self.left + self.right) / 2
            self.picture.add_text(middle, self.bottom + 36, self.x_axis.title, "middle", class_="dim")

    def x(self, value: float) -> float:
        """Return the x coordinate, in pixels, of a value on the x axis."""
        return self.left + self.x_axis.compute_fraction(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Return the y coordinate, in pixels, of a value on the y axis."""
        return self.bottom - self.y_axis.compute_fraction(value) * (self.bottom - self.top)

    def draw_line(self, series: Series) -> None:
        """Draw a series as a line through its finite points, downsampled to the chart's resolution. The points are
        marked by dots if the series asks for that and has at most `MAX_MARKED` (40), or if there is only one."""
        places = [
            (self.x(x), self.y(y))
            for x, y in downsample([point for point in series.points if math.isfinite(point[1])], self._columns)
        ]
        points = " ".join(f"{format_number(x, 1)},{format_number(y, 1)}" for x, y in places)
        kind = series.kind or None
        self.picture.add(
            "polyline", title=series.name, points=points, class_=kind, style=f"stroke:{css_var(series.colour)}"
        )
        marked = len(places) == 1 or (series.dots and len(places) <= MAX_MARKED)
        for x, y in places if marked else ():
            self.picture.add("circle", cx=x, cy=y, r=3, style=f"fill:{css_var(series.colour)}")

    def draw_mark(self, mark: Mark) -> None:
        """Draw the vertical line of `mark`, with its text on the side that has more space."""
        x = self.x(mark.x)
        self.picture.add_line((x, self.top), (x, self.bottom), "mark")
        if mark.y is not None:
            self.picture.add(
                "circle", title=mark.words, cx=round(x, 1), cy=round(self.y(mark.y), 1), r=4.5, class_="point"
            )
        offset, anchor = (6, None) if x <= (self.left + self.right) / 2 else (-6, "end")
        self.picture.add_text(x + offset, self.top + 12, mark.words, anchor, class_="halo")

    def draw_names(self, series: Sequence[Series]) -> None:
        """Write the name of each series to the right of its last point, with a line to it, in the curve's colour if the
        curve is emphasized (text in that colour would be hard to read); names of lines that end close together are
        moved apart. A series that ends before the right edge of the plot gets no name."""
        ends = sorted(
            (self.y(one.points[-1][1]), index)
            for index, one in enumerate(series)
            if math.isfinite(one.points[-1][1]) and one.points[-1][0] >= self.x_axis.high * (1 - 1e-9)
        )
        for (at, index), place in zip(ends, spread_labels([at for at, _ in ends], self.bottom), strict=True):
            one = series[index]
            strong = one.kind in ("thick", "named")
            style = f"stroke:{css_var(one.colour)};stroke-opacity:1;stroke-width:2.6" if strong else None
            self.picture.add("line", x1=self.right + 1, y1=at, x2=self.right + 16, y2=place, class_="lead", style=style)
            self.picture.add_text(self.right + 20, place + 4, one.name, class_="strong" if strong else "dim")

    def draw_hover(self, series: Sequence[Series], name: str) -> None:
        """Cover the plot with transparent columns, one for each x value of the series (for every n-th x value if the x
        values are less than `COLUMN` pixels apart). Pointing at a column, or touching it, shows the value of each
        series at this x or, if the series has no point there, at the last x before it.

        name: name of the x values, such as "step".
        """
        values = sorted({x for one in series for x, _ in one.points})
        values = values[:: math.ceil(len(values) * COLUMN / self._columns)]
        places = [self.x(value) for value in values]
        edges = [self.left, *(sum(pair) / 2 for pair in pairwise(places)), self.right]
        for at, value in enumerate(values):
            texts = [f"{name} {value:,g}"]
            for one in series:
                if last := bisect_right(one.points, value, key=lambda point: point[0]):
                    x, y = one.points[last - 1]
                    texts.append(f"{one.name}: {y:,.5g}" + ("" if x == value else f" ({name} {x:,g})"))
            area = element(
                "rect", x=edges[at], y=self.top, width=edges[at + 1] - edges[at], height=self.bottom - self.top
            )
            self.picture.parts.append(element("g", area, self._draw_tip(places[at], texts), class_="hit"))

    def _draw_tip(self, x: float, texts: Sequence[str]) -> Markup:
        """Return a box with the lines `texts`, for values shown on hover, on the side of the x coordinate `x` (in
        pixels) that has more space. The style sheet hides the box until its column of the chart is pointed at. A
        <title> instead would not show on a touch screen."""
        width = max(estimate_text_width(words) for words in texts) + 12
        left = x + 8 if x <= (self.left + self.right) / 2 else x - 8 - width
        left = min(max(left, 2.0), max(2.0, self.right - width))  # inside the picture
        box = element("rect", x=left, y=self.top, width=width, height=LINE * len(texts) + 8, rx=3)
        lines = [element("tspan", words, x=left + 6, dy=LINE) for words in texts]
        return element("g", box, element("text", lines, x=left + 6, y=self.top), class_="tip")

    def draw_bands(self, name: str, bands: Sequence[Band]) -> None:
        """Draw `bands` (named x intervals) as a coloured strip below the x axis, with names where they fit. name: label
        at the left of the strip."""
        top, start, last = self.bottom + 32, self.left, -math.inf
        self.picture.add_text(self.left - 8, top + 14, name, "end", class_="dim")
        for band in bands:
            end = self.x(band.end)
            style = f"fill:{css_var(band.colour)};fill-opacity:.4"  # legible below a name in light and dark mode
            self.picture.add("rect", title=band.title, x=start, y=top, width=end - start, height=STRIP, style=style)
            if end - start > estimate_text_width(band.name, 11) + 4:
                self.picture.add_text((start + end) / 2, top + 14, band.name, "middle", class_="small")
            if band.until and end - last > estimate_text_width(band.until) + 10:
                last = end
                self.picture.add_line((end, top + STRIP), (end, top + STRIP + 5), "lead")
                self.picture.add_text(end, top + STRIP + 16, band.until, "middle")
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
    """Return a line chart for an HTML page, with a legend if there are several series. It consists of two SVG pictures,
    of which the style sheet shows one: the first 760 pixels wide, the second 380 pixels wide for screens as narrow as a
    phone's. Both are at least `height` pixels high.

    x_axis, y_axis: axes with their ranges and ticks. series: the curves. marks: vertical lines with texts. height:
    minimum height in pixels. hover: name of the x values, such as "step", for texts that show all values at an x on
    hover; empty: no such texts. legend: True for a legend even with a single series.
    """
    entries = [(one.name, {"style": f"fill:{css_var(one.colour)}"}) for one in series if len(series) > 1 or legend]

    def draw(width: int) -> Markup:
        """Return the chart as an SVG picture `width` pixels wide, with its legend below."""
        plot = Plot(x_axis, y_axis, right=width - 16, bottom=height - (44 if not x_axis.title else 48))
        for one in series:
            plot.draw_line(one)
        for mark in marks:
            plot.draw_mark(mark)
        free, y = plot.right - estimate_text_width(y_axis.title) - 16, height - 5
        plot.picture.add_text(plot.right, y, y_axis.title, "end", class_="dim")
        if any(
            plot.left + 15 + estimate_text_width(name, 11) > free for name, _ in entries
        ):  # no room next to the title
            free, y = plot.right, y + 17
        end = plot.picture.add_legend(entries, plot.left, free, y) if entries else y
        if hover:  # in front of everything
            plot.draw_hover(series, hover)
        return plot.picture.to_svg(width, end + 5, y_axis.title or x_axis.title)

    return draw_for_two_widths(draw, 760)


def spread_labels(places: Sequence[float], limit: float) -> list[float]:
    """Move labels apart so that they do not overlap; return their vertical positions in pixels, ascending. They are at
    least one line of text apart, at most `limit`, and as close to the wanted positions as these two conditions allow.
    places: wanted positions in pixels, ascending."""
    apart: list[float] = []
    for place in places:
        apart.append(max(place, apart[-1] + LINE) if apart else place)
    for index in reversed(range(len(apart))):
        apart[index] = min(apart[index], limit)
        limit = apart[index] - LINE
    return apart


def downsample(points: Sequence[tuple[float, float]], buckets: int) -> Sequence[tuple[float, float]]:
    """Reduce the points (x, y) of a line to at most 2 x `buckets` points that draw the same line on a chart `buckets`
    pixels wide.

    The points are divided into buckets of consecutive points; the points with the lowest and the highest y of each
    bucket, and both ends of the line, are kept.
    """
    if len(points) <= 2 * buckets:
        return points
    kept = {0, len(points) - 1}
    for bucket in range(buckets - 1):
        places = range(len(points) * bucket // (buckets - 1), len(points) * (bucket + 1) // (buckets - 1))
        kept |= {choose(places, key=lambda index: points[index][1]) for choose in (min, max)}
    return [points[index] for index in sorted(kept)]
