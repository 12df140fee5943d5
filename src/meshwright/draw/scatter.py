"""Scatter plots as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.draw.axis import Axis
from meshwright.draw.line_chart import Plot
from meshwright.draw.markup import Markup
from meshwright.draw.picture import draw_for_two_widths

WIDTH, HEIGHT = 900, 400


def draw_scatter(
    x_axis: Axis,
    y_axis: Axis,
    points: Sequence[tuple[float, float]],
    marked: Sequence[tuple[float, float, str]],
    limit: tuple[float, str],
) -> Markup:
    """Return a scatter plot of `points` (x, y) for an HTML page: one SVG picture for wide screens, one for a phone's.

    x_axis, y_axis: axes with their ranges and ticks. marked: (x, y, text on hover) of points to highlight. limit: (y
    value, text) of a horizontal line.
    """

    def draw(width: int) -> Markup:
        """Return the plot as an SVG picture `width` pixels wide."""
        plot = Plot(x_axis, y_axis, right=width - 16, bottom=HEIGHT - 46)
        for x, y in points:
            plot.picture.add("circle", cx=round(plot.x(x), 1), cy=round(plot.y(y), 1), r=2, class_="dot")
        height, words = plot.y(limit[0]), limit[1]
        plot.picture.add_line((plot.left, height), (plot.right, height), "limit")
        plot.picture.add_text(plot.right - 4, height - 6, words, "end", class_="halo")
        for x, y, title in marked:
            plot.picture.add("circle", title=title, cx=plot.x(x), cy=plot.y(y), r=4.5, class_="best")
        return plot.picture.to_svg(width, HEIGHT, y_axis.title)

    return draw_for_two_widths(draw, WIDTH)
