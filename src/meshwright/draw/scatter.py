"""Scatter plots as SVG."""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.draw.axis import Axis
from meshwright.draw.line_chart import Plot
from meshwright.draw.markup import Markup

WIDTH, HEIGHT = 900, 400


def draw_scatter(
    x_axis: Axis,
    y_axis: Axis,
    points: Iterable[tuple[float, float]],
    marked: Iterable[tuple[float, float, str]],
    limit: tuple[float, str],
) -> Markup:
    """Return a scatter plot of `points` (x, y) as SVG.

    x_axis, y_axis: axes with their ranges and ticks. marked: (x, y, text on hover) of points to highlight. limit: (y
    value, text) of a horizontal line.
    """
    plot = Plot(x_axis, y_axis, right=WIDTH - 16, bottom=HEIGHT - 46)
    for x, y in points:
        plot.picture.add("circle", cx=round(plot.x(x), 1), cy=round(plot.y(y), 1), r=2, class_="dot")
    height, words = plot.y(limit[0]), limit[1]
    plot.picture.add_line((plot.left, height), (plot.right, height), "limit")
    plot.picture.add_text(plot.right - 4, height - 6, words, "end", class_="halo")
    for x, y, title in marked:
        plot.picture.add("circle", title=title, cx=plot.x(x), cy=plot.y(y), r=4.5, class_="best")
    return plot.picture.to_svg(WIDTH, HEIGHT, y_axis.title)
