"""SVG pictures that are drawn shape by shape, for a file of their own or for a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.resources import files

from meshwright.draw.markup import Markup, element, join
from meshwright.draw.text_width import estimate_text_width

SLIM = 380
"""Width in pixels of a picture for a phone's screen."""


class Picture:
    """SVG picture under construction: collects elements in drawing order. All coordinates are in pixels."""

    def __init__(self) -> None:
        """Start an empty picture."""
        self.parts: list[Markup] = []

    def add(self, name: str, /, *, title: str = "", **attributes: str | float | None) -> None:
        """Append a shape to the picture: the SVG element `name` with these attributes. title: text shown on hover.
        attributes: SVG attributes of the element (`class_` stands for class, an underscore for a hyphen)."""
        self.parts.append(element(name, element("title", title) if title else None, **attributes))

    def add_text(
        self, x: float, y: float, words: str, anchor: str | None = None, **attributes: str | float | None
    ) -> None:
        """Append the text `words` at (x, y), in pixels, to the picture. anchor: part of the text that lies at x: None
        (start), "middle" or "end". attributes: further SVG attributes (`class_` stands for class, an underscore for a
        hyphen)."""
        self.parts.append(element("text", words, x=x, y=y, text_anchor=anchor, **attributes))

    def add_line(self, start: tuple[float, float], end: tuple[float, float], kind: str, title: str = "") -> None:
        """Append a straight line to the picture, from `start` (x, y) to `end` (x, y), in pixels. kind: CSS class in the
        style sheet, such as "grid". title: text shown on hover."""
        self.add("line", title=title, x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_=kind)

    def add_legend(self, entries: Iterable[tuple[str, dict[str, str]]], left: float, right: float, y: float) -> float:
        """Append a legend between x = `left` and `right`, wrapped into lines from y = `y` on; return the y of its last
        line. All coordinates are in pixels.

        entries: (text, SVG attributes of its colour sample, such as {"style": "fill:red"}).
        """
        x = left
        for words, css_var in entries:
            width = 15 + estimate_text_width(words, 11)
            if x > left and x + width > right:
                x, y = left, y + 17
            self.add("rect", x=x, y=y - 10, width=11, height=11, rx=2, **css_var)
            self.add_text(x + 15, y, words, class_="dim small")
            x += width + 16
        return y

    def to_svg(self, width: float, height: float, label: str, *, alone: bool = False) -> Markup:
        """Return the complete <svg> element of `width` x `height` pixels, with all elements added so far.

        label: description for screen readers. alone: True to include style sheet and XML namespace, as a separate SVG
        file needs them.
        """
        own = {"xmlns": "http://www.w3.org/2000/svg"} if alone else {}
        style = element("style", make_picture_style()) if alone else None
        return Markup(
            element(
                "svg", style, join(["", *self.parts, ""], "\n"), **own, class_="picture", width=width, height=height,
                viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label,
            )
            + "\n" * alone
        )  # fmt: skip


def stack_pictures(pictures: Sequence[tuple[str, Markup]], label: str, gap: float = 14, left: float = 14) -> Markup:
    """Return an SVG file with several pictures one below the other. pictures: (heading, <svg> element with width and
    height). label: description for screen readers. gap: pixels between the pictures. left: x coordinate of the headings
    in pixels."""
    whole = Picture()
    widest, y = 0.0, 0.0
    for heading, drawn in pictures:
        width, height = read_size(drawn)
        whole.add_text(left, y + 20, heading, class_="title")
        whole.parts.append(element("g", drawn, transform=f"translate(0 {y + 26:g})"))
        widest, y = max(widest, width), y + 26 + height + gap
    return whole.to_svg(widest, y, label, alone=True)


def draw_for_two_widths(draw: Callable[[int], Markup], broad: int, slim: int = SLIM) -> Markup:
    """Return an HTML box with two SVG pictures of the same content, of which the style sheet shows one: the second on
    screens as narrow as a phone's. draw: draws the picture at a width in pixels. broad, slim: widths of the two."""
    pictures = [element("div", draw(width), class_=name) for name, width in (("broad", broad), ("slim", slim))]
    return element("div", pictures, class_="chart")


def read_size(drawn: Markup) -> tuple[float, float]:
    """Return (width, height) in pixels of `drawn`, an SVG picture made by `Picture.to_svg`."""
    sizes = re.search(r'width="([\d.]+)" height="([\d.]+)"', drawn)
    assert sizes
    return float(sizes[1]), float(sizes[2])


def css_var(colour: str) -> str:
    """Convert a colour name of the style sheet to a CSS value: "blue" to `var(--blue)`."""
    return f"var(--{colour})"


@cache
def make_picture_style() -> Markup:
    """Return the style sheet of pictures as CSS text: named colours as variables, for light and dark mode."""
    return Markup((files("meshwright.draw") / "picture.css").read_text(encoding="utf-8"))
