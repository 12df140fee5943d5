"""A picture as one SVG element, alone or in a page."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from meshwright.draw.markup import Markup, element, join
from meshwright.draw.text_width import text_width


class Picture:
    """The elements of a picture, in the order in which they are drawn. Lengths are in pixels."""

    def __init__(self) -> None:
        self.parts: list[Markup] = []

    def add(self, name: str, /, *, title: str = "", **attributes: str | float | None) -> None:
        """Draw a shape (`element`), which shows `title` while the mouse is over it."""
        self.parts.append(element(name, element("title", title) if title else None, **attributes))

    def text(self, x: float, y: float, words: str, anchor: str | None = None, **attributes: str | float | None) -> None:
        """Write words from (x, y) on; anchor: the `middle` or the `end` of the text lies there instead."""
        self.parts.append(element("text", words, x=x, y=y, text_anchor=anchor, **attributes))

    def line(self, start: tuple[float, float], end: tuple[float, float], kind: str, title: str = "") -> None:
        """Draw a line of a class of the style sheet."""
        self.add("line", title=title, x1=start[0], y1=start[1], x2=end[0], y2=end[1], class_=kind)

    def legend(self, entries: Iterable[tuple[str, dict[str, str]]], left: float, right: float, y: float) -> float:
        """Draw a swatch with the attributes given, and words, for each entry, in as many lines as fit between `left`
        and `right`; return the baseline of the last line."""
        x = left
        for words, paint in entries:
            width = 15 + text_width(words, 11)
            if x > left and x + width > right:
                x, y = left, y + 17
            self.add("rect", x=x, y=y - 10, width=11, height=11, rx=2, **paint)
            self.text(x + 15, y, words, class_="dim small")
            x += width + 16
        return y

    def svg(self, width: float, height: float, label: str, *, alone: bool = False) -> Markup:
        """Return the SVG element. label: says what is drawn, to readers who cannot see it.

        alone: with its style sheet and namespace, as a file of its own needs them.
        """
        own = {"xmlns": "http://www.w3.org/2000/svg"} if alone else {}
        style = element("style", picture_style()) if alone else None
        return Markup(
            element(
                "svg", style, join(["", *self.parts, ""], "\n"), **own, class_="picture", width=width, height=height,
                viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label,
            )
            + "\n" * alone
        )  # fmt: skip


def paint(colour: str) -> str:
    """Return the CSS colour of a name of the style sheet (blue, dim, ...)."""
    return f"var(--{colour})"


@cache
def picture_style() -> Markup:
    """Return the style sheet of pictures: colours by name, light and dark, as variables."""
    return Markup((files("meshwright.draw") / "picture.css").read_text(encoding="utf-8"))
