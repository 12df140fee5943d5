"""Gantt charts of simulated programs as SVG: one row for each track (a rank), time to the right."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from colorsys import hls_to_rgb

from meshwright.draw.axis import make_linear_axis
from meshwright.draw.markup import Markup, element, format_number
from meshwright.draw.page import page, paragraph, table
from meshwright.draw.picture import Picture, draw_for_two_widths, read_size
from meshwright.draw.text_width import estimate_text_width
from meshwright.program.timeline import Span, Timeline

# Step kind -> (hue, saturation, lightness) of its colour, and of the second replica's; kinds differ in hue and label.
COLOURS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "forward": ((214, 60, 46), (265, 42, 52)),
    "backward": ((24, 74, 41), (350, 50, 50)),
    "input gradient": ((24, 74, 41), (350, 50, 50)),
    "weight gradient": ((150, 45, 35), (180, 50, 33)),
    "all-to-all": ((215, 12, 46), (215, 12, 46)),
    "update": ((0, 0, 35), (0, 0, 35)),
    "send": ((214, 60, 46), (214, 60, 46)),
    "reduce": ((24, 74, 41), (24, 74, 41)),
}
READABLE = 4.5  # least contrast of a label, Web Content Accessibility Guidelines 2.2
ROW, GAP, STRIP, MARGIN = 26, 6, 9, 14  # pixels; a strip below each row shows its level
LABEL = 10.5  # font size of a step's label in pixels
_PAGE = 1160  # width of a page's content in a window of 1200 pixels


def draw_svg(
    timeline: Timeline, width: int = 1200, alone: bool = True, until: float = 0.0, widen: bool = True
) -> Markup:
    """Return the Gantt chart of a timeline (steps with start and end, on one track per rank) as SVG; hovering over a
    step shows its name and times.

    width: width in pixels. alone: True for an SVG file, with the title above the chart; False to embed it in a page.
    until: time at which the axis ends, if later than the last step, so that several charts share one scale. widen: True
    to make a chart with many steps up to eight times as wide, so that each label fits into its box in one line.
    """
    spans = [span for span in timeline.spans if span.end > span.start]
    notes = 10 + max(map(estimate_text_width, timeline.notes)) if timeline.notes else 0.0
    chart = _Chart(timeline, spans, width - notes, ROW + GAP + (STRIP if timeline.levels else 0))
    chart.end = max(chart.end, until)
    if spans and widen:
        shortest = min(span.end - span.start for span in spans)
        needed = math.ceil(chart.end / shortest * (chart.widest + 4))
        chart.plot = min(max(chart.plot, needed), 8 * width)
    total = round(chart.left + chart.plot + notes + MARGIN)
    # The legend stays within `width`; a wider chart scrolls.
    level_name = f"{timeline.level_name}, full height {timeline.highest_level:.4g}" if timeline.levels else ""
    chart.begin(min(total, width) - MARGIN, 41 if alone else 19, level_name)
    chart.explain_letters()
    if alone:
        chart.picture.add_text(MARGIN, 20, timeline.title, class_="title")
    for track, name in enumerate(timeline.tracks):
        chart.draw_row(track, name, ROW)
        if timeline.notes:
            x = chart.left + chart.plot + 10
            chart.picture.add_text(x, chart.y(track) + 17, timeline.notes[track], class_="dim")
    for span in spans:
        chart.draw_step(span)
    chart.draw_levels()
    return chart.picture.to_svg(total, chart.draw_axis(), timeline.title, alone=alone)


def draw_overview(timeline: Timeline, width: int = 1200) -> Markup:
    """Return a Gantt chart of a timeline with very many steps for an HTML page, with low rows and without labels: one
    SVG picture for wide screens, one for a phone's.

    timeline: steps with start and end, on one track per rank. width: width of the first picture in pixels. The height
    is at most about 800 pixels, more only for over 200 tracks. All steps of one colour are one SVG path, so that
    100,000 steps can be shown.
    """
    return draw_for_two_widths(lambda wide: _draw_overview(timeline, wide), width)


def _draw_overview(timeline: Timeline, width: int) -> Markup:
    """Return the chart of `draw_overview` as one SVG picture `width` pixels wide."""
    spans = [span for span in timeline.spans if span.end > span.start]
    pitch = max(4, min(ROW + GAP, 800 // max(1, len(timeline.tracks))))
    row = pitch - (GAP if pitch > 12 else 1)
    chart = _Chart(timeline, spans, width, pitch)
    chart.begin(width - MARGIN, 19)
    named = -(-14 // pitch)  # rows per written name
    for track, name in enumerate(timeline.tracks):
        chart.draw_row(track, name if track % named == 0 else "", row)
    paths: dict[str, list[str]] = {}
    for span in spans:
        fraction = row / span.lanes
        above = format_number(chart.y(span.track) + span.lane * fraction, 1)
        wide = format_number(max((span.end - span.start) * chart.scale - 0.3, 0.3), 1)
        path = f"M{format_number(chart.x(span.start), 1)} {above}h{wide}v{format_number(fraction, 1)}h-{wide}z"
        paths.setdefault(_choose_colour(span)[0], []).append(path)
    for fill, steps in paths.items():
        chart.picture.add("path", style=f"fill:{fill}", d="".join(steps))
    return chart.picture.to_svg(width, chart.draw_axis(), timeline.title)


def draw_page(timeline: Timeline, rows: Sequence[Sequence[str]], summary: str = "") -> str:
    """Return an HTML page with the Gantt chart of a timeline (steps with start and end, on one track per rank), the
    paragraph `summary`, and a table. If the chart is wider than the page, an overview of the same steps without labels
    stands above it.

    rows: cells of the table, header first; empty: no table.
    """
    chart = draw_svg(timeline, width=_PAGE, alone=False)
    overview = [draw_overview(timeline, _PAGE)] if read_size(chart)[0] > _PAGE else []
    return page(
        timeline.title,
        element("h1", timeline.title),
        paragraph(summary),
        *overview,
        element("div", chart, class_="wide"),
        table(rows[0], rows[1:]) if rows else None,
    )


def _choose_colour(span: Span) -> tuple[str, bool]:
    """Return the CSS colour in which the step `span` is drawn, and True if a label on it must be black to be legible,
    else False for a white one."""
    hue, saturation, lightness = COLOURS[span.kind][span.mirrored]
    lightness = round(lightness + 24 * span.shade)
    white_contrast = 1.05 / (_compute_luminance(hue, saturation, lightness) + 0.05)
    return f"hsl({hue} {saturation}% {lightness}%)", white_contrast < READABLE


def _compute_luminance(hue: int, saturation: int, lightness: int) -> float:
    """Return the relative luminance of a CSS colour hsl(hue saturation% lightness%), 0 for black to 1 for white (Web
    Content Accessibility Guidelines 2.2)."""
    channels = hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _split_label(label: str, width: float, widest: float) -> list[str]:
    """Return the lines in which a step's label is written into a box `width` pixels wide: one; two if only these fit
    (`F` above `12` for `F12`); none if the box is too narrow. widest: width of the chart's widest label in pixels, so
    that all boxes of one width look alike.
    """
    parts = re.fullmatch(r"([A-Za-z])(\d+[a-z]?)", label)
    if width >= widest + 4 or (not parts and width >= estimate_text_width(label, LABEL) + 4):
        return [label]
    if parts and width >= max(estimate_text_width(part, LABEL) for part in parts.groups()) + 1:
        return list(parts.groups())
    return []


class _Chart:
    """Gantt chart under construction; its methods append to the SVG `picture`. A track (a rank) is one row of the
    chart.

    timeline: tracks, steps and levels (curves of a quantity such as saved activations) to draw. spans: the steps that
    are drawn. width: width of the whole picture in pixels. pitch: pixels from one track's row to the next.

    Attributes:
        left: x coordinate of time 0 in pixels.
        plot: Length of the time axis in pixels.
        widest: Width of the widest label of a step in pixels.
    """

    def __init__(self, timeline: Timeline, spans: Sequence[Span], width: float, pitch: int) -> None:
        """Start an empty picture; arguments: see the class."""
        self.timeline, self.spans, self.pitch = timeline, spans, pitch
        self.picture = Picture()
        self.left = round(MARGIN + 10 + max(map(estimate_text_width, timeline.tracks), default=0.0))
        self.plot = width - self.left - MARGIN
        self.end = timeline.end or 1.0
        self.widest = max((estimate_text_width(span.label, LABEL) for span in spans), default=0.0)

    def begin(self, right: float, baseline: int, level_name: str = "") -> None:
        """Draw the legend above the chart's rows, and set `scale` (pixels per unit of time) and `top` (y coordinate of
        the first row).

        right: x coordinate at which the legend must end, in pixels. baseline: y coordinate of the legend's first line
        of text, in pixels. level_name: name of the quantity drawn as a strip below each row, such as "activations";
        empty if there is none.
        """
        self.scale = self.plot / self.end
        self.top = self.picture.add_legend(self._list_legend_entries(level_name), self.left, right, baseline) + 11

    def explain_letters(self) -> None:
        """Write a line below the legend on the last letter of the steps' labels, if they have one."""
        if letters := self.timeline.letters:
            words = ", ".join(f"{letter} {meaning}" for letter, meaning in letters.items())
            self.picture.add_text(self.left, self.top + 6, f"last letter of a label: {words}", class_="dim small")
            self.top += 17

    def x(self, time: float) -> float:
        """Return the x coordinate, in pixels, of a time (in the unit of the timeline)."""
        return self.left + time * self.scale

    def y(self, track: int) -> float:
        """Return the y coordinate, in pixels, of the top of the row of track number `track` (from 0)."""
        return self.top + track * self.pitch

    def _list_legend_entries(self, level_name: str) -> list[tuple[str, dict[str, str]]]:
        """Return the legend's entries as (text, SVG attributes of the colour sample). There is one entry for each
        colour of steps; its text names all kinds of steps of that colour, with the first letters of their labels if
        there are several kinds. A last entry is for the quantity that strips below the rows show. level_name: name of
        that quantity, such as "activations"; empty if there are no strips.
        """
        seen: dict[tuple[str, float, bool], Span] = {}
        for span in self.spans:
            seen.setdefault((span.kind, span.shade, span.mirrored and len(set(COLOURS[span.kind])) > 1), span)
        entries: dict[tuple[str, str], list[str]] = {}  # kinds by colour: some share one
        for kind, shade, mirrored in sorted(seen, key=lambda key: (key[2], [*COLOURS].index(key[0]), key[1])):
            words = ", opposite direction" if mirrored else ""
            chunks = sorted({key[1] for key in seen if key[0] == kind and key[2] == mirrored})
            if len(chunks) > 1:
                words += f", chunk {chunks.index(shade) + 1}"
            entries.setdefault((_choose_colour(seen[kind, shade, mirrored])[0], words), []).append(kind)
        letters = {span.kind: span.label[:1].upper() for span in self.spans}
        named = [
            (" or ".join(f"{kind} {letters[kind]}" if len(kinds) > 1 else kind for kind in kinds) + words, fill)
            for (fill, words), kinds in entries.items()
        ]
        steps = [(words, {"style": f"fill:{fill}"}) for words, fill in named]
        return steps + [(level_name, {"class_": "level"})] * bool(level_name)

    def draw_row(self, track: int, name: str, height: int) -> None:
        """Draw the name of one row, and its background up to the end of the last step of any track.

        track: index of the row. name: text at the left, empty for none. height: height of the background in pixels.
        """
        if name:
            self.picture.add_text(MARGIN, self.y(track) + height // 2 + 4, name)
        width = (self.timeline.end or self.end) * self.scale
        self.picture.add("rect", class_="row", x=self.left, y=self.y(track), width=width, height=height)

    def draw_step(self, span: Span) -> None:
        """Draw one step (`span`) as a rectangle in its track's row, with its label if that fits."""
        height = ROW / span.lanes
        x, width = self.x(span.start), (span.end - span.start) * self.scale
        y = self.y(span.track) + span.lane * height
        fill, dark = _choose_colour(span)
        self.picture.add(
            "rect", title=f"{span.name}: {span.start:g} to {span.end:g}", x=x, y=y, width=max(width - 0.8, 0.3),
            height=height, rx=2, style=f"fill:{fill}",
        )  # fmt: skip
        lines = _split_label(span.label, width, self.widest)
        if height < LABEL * len(lines):
            return
        middle, first = x + (width - 0.8) / 2, y + height / 2 + 3.8 - 5.5 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.picture.add_text(middle, first + 11 * number, line, "middle", class_="on dark" if dark else "on")

    def draw_levels(self) -> None:
        """Draw below each track's row a strip with a quantity over time, such as saved activations. The scale is the
        same for all tracks and ends at the highest value of any track."""
        levels, highest = self.timeline.levels, self.timeline.highest_level
        for track, points in levels.items() if highest else ():
            base = self.y(track) + ROW + STRIP
            path, before = [(float(self.left), base)], 0.0
            for time, value in [*points, (self.timeline.end, 0.0)]:
                path += [(self.x(time), base - held / highest * STRIP) for held in (before, value)]
                before = value
            most = max((value for _, value in points), default=0.0)
            self.picture.add(
                "polygon", class_="level",
                points=" ".join(f"{format_number(x, 1)},{format_number(y, 1)}" for x, y in path),
                title=f"{self.timeline.level_name} of {self.timeline.tracks[track]}: at most {most:g}",
            )  # fmt: skip

    def draw_axis(self) -> float:
        """Draw the time axis below the rows, with its title at the left; return the height of the whole picture in
        pixels."""
        y = self.y(len(self.timeline.tracks))
        self.picture.add_text(MARGIN, y + 17, self.timeline.time_title, class_="dim axis")
        self.picture.add_line((self.left, y), (self.x(self.end), y), "line")
        for tick, _ in make_linear_axis(0.0, self.end, most=max(1, int(self.plot / 63))).ticks:
            self.picture.add_line((self.x(tick), y), (self.x(tick), y + 4), "line")
            self.picture.add_text(self.x(tick), y + 17, f"{tick:g}", "middle", class_="dim tick")
        return y + 34
