"""Bar charts as SVG: horizontal stacked bars and vertical grouped bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshwright.draw.axis import Axis, make_linear_axis
from meshwright.draw.line_chart import Plot
from meshwright.draw.markup import Markup
from meshwright.draw.picture import Picture, css_var, draw_for_two_widths
from meshwright.draw.text_width import estimate_text_width

WIDTH = 900
FAR = 8
"""A limit above this multiple of the longest bar is written, not drawn."""


def draw_stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    show: Callable[[float], str],
    label: str,
    limit: tuple[float, str] | None = None,
    width: int = WIDTH,
) -> Markup:
    """Return an SVG chart of horizontal stacked bars, one for each entry of `rows`.

    rows: (name of the bar, {name of a segment, a coloured part of the bar: its size in data units}). colours: name of a
    segment -> style-sheet colour, such as "blue". show: formats a size as text, for totals and on hover. label:
    description of the picture for screen readers. limit: (size, text) of a vertical line to compare the bars with; None
    for no line. If the limit is more than `FAR` (8) times the longest bar, no line is drawn; a text below the bars says
    instead which percentage of the limit the longest bar reaches. width: width of the picture in pixels.
    """
    picture = Picture()
    totals = [sum(parts.values()) for _, parts in rows]
    largest = max(totals)
    most = max(largest, limit[0]) if limit and limit[0] <= FAR * largest else largest
    left = 4 + max(estimate_text_width(name) for name, _ in rows) + 8 * any(name for name, _ in rows)
    scale = (width - left - 14 - max(estimate_text_width(show(total)) for total in totals)) / most
    pitch = 30 if len(rows) <= 16 else 20 if len(rows) <= 40 else 12
    height = len(rows) * pitch + (26 if limit else 0)
    line = left + limit[0] * scale if limit else -1.0
    for number, ((name, parts), total) in enumerate(zip(rows, totals, strict=True)):
        x, y = left, number * pitch + 4
        for part, size in parts.items():
            if size > 0:
                length, title = size * scale, f"{part}: {show(size)}"
                style, thickness = f"fill:{css_var(colours[part])}", pitch - min(9, pitch // 4)
                picture.add("rect", title=title, x=x, y=y, width=max(length, 0.5), height=thickness, style=style)
                x += length
        if number % -(-14 // pitch) == 0:
            picture.add_text(4, round(y + pitch / 2 + 1), name)
            # Next to the limit line, not across it.
            crossed = x - 6 < line < x + 12 + estimate_text_width(show(total))
            picture.add_text((line if crossed else x) + 6, y + pitch / 2 + 1, show(total), class_="dim")
    if limit and most >= limit[0]:
        for kind in ("edge", "limit"):  # an edge, as the line may cross a bar of a similar colour
            picture.add_line((line, 0), (line, height - 20), kind)
        half = estimate_text_width(limit[1]) / 2
        at = max(min(line, width - half), half)
        picture.add_text(at, height - 6, limit[1], "middle")
    elif limit:
        share = largest / limit[0]
        picture.add_text(
            left, height - 6, f"of {limit[1]}, {f'{share:.0%}' if share >= 0.005 else '<1%'}", class_="dim"
        )
    return picture.to_svg(width, height, label)


def draw_page_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    colours: Mapping[str, str],
    show: Callable[[float], str],
    label: str,
    limit: tuple[float, str] | None = None,
) -> Markup:
    """Return the chart of `draw_stacked_bars` for an HTML page: one picture for wide screens, one for a phone's.
    Arguments: see `draw_stacked_bars`."""
    return draw_for_two_widths(lambda width: draw_stacked_bars(rows, colours, show, label, limit, width), WIDTH)


def draw_grouped_bars(names: Sequence[str], groups: Sequence[tuple[str, str, Sequence[float]]], title: str) -> Markup:
    """Return a chart of vertical bars in clusters for an HTML page: one cluster for each name of `names` on the x axis,
    with one bar for each series of `groups`. It consists of one SVG picture for wide screens and one for a phone's.

    groups: one tuple for each series: (name shown on hover, style-sheet colour such as "blue", heights of the bars in
    data units, one for each of `names`). title: title of the x axis.
    """
    highest = max((value for _, _, values in groups for value in values), default=0) or 1
    ticks = [(place + 0.5, name) for place, name in enumerate(names)]
    share = 0.84 / len(groups)

    def draw(width: int) -> Markup:
        """Return the chart as an SVG picture `width` pixels wide."""
        across, up = Axis(0, len(names), ticks, title), make_linear_axis(0, highest, most=4)
        plot = Plot(across, up, right=width - 16, bottom=194)
        for number, (group, colour, values) in enumerate(groups):
            for place, value in enumerate(values):
                x, y = plot.x(place + 0.08 + share * number), plot.y(value)
                plot.picture.add(
                    "rect", title=f"{group}: {value:,}", x=x, y=y, width=share * (plot.x(1) - plot.left),
                    height=plot.bottom - y, style=f"fill:{css_var(colour)}",
                )  # fmt: skip
        return plot.picture.to_svg(width, 240, title)

    return draw_for_two_widths(draw, 760)
