"""HTML and SVG elements as strings; the only place where text is escaped."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from html import escape
from typing import TypeAlias

# Elements without a closing tag if they are empty.
EMPTY = frozenset(("meta", "br", "rect", "line", "circle", "path", "polyline", "polygon", "use"))
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """String that contains HTML or SVG. The function `element` inserts a `Markup` unchanged, and escapes all other
    strings."""

    __slots__ = ()


Content: TypeAlias = "str | Iterable[Content] | None"
"""A text, markup, nothing, or several of these one after another."""


def escape_text(text: str) -> Markup:
    """Return `text` escaped for use inside an HTML or SVG element or a quoted attribute.

    Control characters, which XML forbids, become their symbols (U+2400 on); lone surrogates, noncharacters and
    bidirectional overrides become U+FFFD.
    """
    return Markup(escape(_INVISIBLE.sub(_replace_invisible, text)))


def element(name: str, /, *children: Content, **attributes: str | float | None) -> Markup:
    """Return one HTML or SVG element with the tag `name` and the contents `children`. Plain strings among these are
    escaped, `Markup` is not.

    attributes: attributes of the element, with `class_` for class and an underscore for each hyphen. Numbers are
    rounded to 0.01; an attribute that is None is omitted.
    """
    head = name + "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape_text(one if isinstance(one, str) else format_number(one))}"'
        for key, one in attributes.items()
        if one is not None
    )
    inside = join(children)
    return Markup(f"<{head}/>" if name in EMPTY and not inside else f"<{head}>{inside}</{name}>")


def join(content: Content, between: str = "") -> Markup:
    """Concatenate `content` into one `Markup`: strings (escaped), `Markup` (unchanged) and nested sequences of these.
    between: text inserted between the items, without escaping."""
    if content is None:
        return Markup()
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        return escape_text(content)
    return Markup(between.join(map(join, content)))


def format_number(value: float, digits: int = 2) -> str:
    """Format the number `value` as text with at most `digits` decimals, without trailing zeros."""
    text = f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: no negative zero
    return text.rstrip("0").rstrip(".") if digits else text


def _replace_invisible(found: re.Match[str]) -> str:
    """Return a visible replacement for the character matched by a regular expression (`found`): for an ASCII control
    character its symbol (U+2400 on), for any other character U+FFFD."""
    code = ord(found[0])
    if unicodedata.category(found[0]) == "Cc" and code < 0x80:
        return chr(0x2421 if code == 0x7F else 0x2400 + code)
    return "\N{REPLACEMENT CHARACTER}"
