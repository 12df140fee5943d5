"""Parallel coordinates as SVG: one vertical axis per quantity, one line across all axes per item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.draw.axis import Axis
from meshwright.draw.markup import Markup, format_number
from meshwright.draw.picture import Picture, css_var
from meshwright.draw.text_width import estimate_text_width

TOP, BOTTOM = 34.0, 296.0
PITCH = 150.0  # pixels between two axes


@dataclass(frozen=True)
class Item:
    """One line (one data point) of a parallel-coordinates plot. values: value on each axis; None: the point has no
    value on this axis, and the line skips the axis. colour: style-sheet colour. title: text on hover. kind: line style,
    "thin" or "thick"."""

    values: Sequence[float | None]
    colour: str
    title: str
    kind: str = "thin"


def draw_parallel_coordinates(axes: Sequence[tuple[str, Axis]], items: Sequence[Item], label: str) -> Markup:
    """Return a parallel-coordinates plot as SVG: parallel vertical axes, across which each of `items` is drawn as a
    line.

    axes: (name above the axis, axis). items: lines; later lines are drawn over earlier lines. label: description of the
    picture for screen readers.
    """
    picture = Picture()
    left = 20 + max(estimate_text_width(axes[0][0]) / 2, *(estimate_text_width(words) for _, words in axes[0][1].ticks))
    places = [left + PITCH * number for number in range(len(axes))]

    def y(axis: Axis, value: float) -> float:
        """Return the y coordinate, in pixels, of a value on an axis."""
        return BOTTOM - axis.compute_fraction(value) * (BOTTOM - TOP)

    for item in items:
        points = [
            f"{format_number(x, 1)},{format_number(y(axis, value), 1)}"
            for x, (_, axis), value in zip(places, axes, item.values, strict=True)
            if value is not None
        ]
        style = f"stroke:{css_var(item.colour)}"
        picture.add("polyline", title=item.title, points=" ".join(points), class_=item.kind, style=style)
    for number, (x, (name, axis)) in enumerate(zip(places, axes, strict=True)):
        picture.add_line((x, TOP), (x, BOTTOM), "line")
        picture.add_text(
            x, 14 if number % 2 == 0 else 27, name, "middle", class_="small"
        )  # so that long names do not overlap
        for value, words in axis.ticks:
            picture.add_text(x - 5, y(axis, value) + 4, words, "end", class_="halo dim small")
    return picture.to_svg(places[-1] + 20 + estimate_text_width(axes[-1][0]) / 2, BOTTOM + 14, label)
