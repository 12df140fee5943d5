"""Escaping: untrusted text stays text in elements, attributes, style and standalone XML."""

from __future__ import annotations

import html
import html.parser
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.draw.gantt import draw_svg
from meshwright.draw.markup import Markup, element, escape_text, format_number, join
from meshwright.draw.page import page, table
from meshwright.program.timeline import Span, Timeline

HOSTILE = [
    "</script><script>alert(1)</script>",
    "</style><b>",
    "</title></svg><img src=x onerror=alert(1)>",
    '" onload="alert(1)" x=\'',
    "' onload='alert(1)",
    "&lt;b&gt; &amp; &#60;",
    "<!-- ]]> --><![CDATA[",
    "\x00\x08\x0b\x1b[2J\x7f\x85",
    "\ud800 half a character, \ufffe none",
    "\u202eevil\u202c \u2066x\u2069",
]


class Parsed(html.parser.HTMLParser):
    """Parser that collects tags, attributes and text of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text_in_a_page(text: str):
    harmless, spoiled = (page(one, element("h1", one), table(("a", one), [(one, one)])) for one in ("x", text))
    before, after = Parsed(harmless), Parsed(spoiled)
    assert after.tags == before.tags and after.names == before.names
    spoiled.encode("utf-8")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_leaves_a_picture_valid_xml(text: str):
    span = Span(0, 0.0, 1.0, "forward", text, text)
    root = ElementTree.fromstring(draw_svg(Timeline(text, (text,), [span], notes=(text,))))
    assert root.get("aria-label") == html.unescape(escape_text(text))


@settings(max_examples=50)
@given(st.text())
def test_escaped_text_reads_back_in_content_and_in_attributes(text: str):
    shown = html.unescape(escape_text(text))
    read = ElementTree.fromstring(element("a", text, b=text))
    assert (read.text or "").replace("\n", "") == shown.replace("\n", "")
    attribute = (read.get("b") or "").replace("\n", " ").replace("\t", " ")
    assert attribute == shown.replace("\n", " ").replace("\t", " ")
    assert len(shown) == len(text)


def test_control_characters_are_shown_as_their_pictures():
    assert escape_text("a\x00\x1b\x7f\n\tz") == "a\u2400\u241b\u2421\n\tz"
    assert escape_text("\x85\u202e\ud800\uffff") == "\ufffd" * 4


def test_markup_is_inserted_unchanged_and_text_is_escaped():
    inner = element("b", "1 < 2")
    assert element("p", "a & ", inner, None, ["c", Markup("<br/>")]) == "<p>a &amp; <b>1 &lt; 2</b>c<br/></p>"
    assert not isinstance(inner + "<i>", Markup)  # concatenated strings are escaped again
    assert join(["<", inner], "\n") == "&lt;\n<b>1 &lt; 2</b>"


def test_attributes_are_quoted_renamed_and_rounded():
    assert element("rect", class_="a", stroke_width=1 / 3, x=2, y=None) == '<rect class="a" stroke-width="0.33" x="2"/>'
    assert element("td", title="\"<'") == '<td title="&quot;&lt;&#x27;"></td>'
    assert [format_number(value) for value in (10, 10.0, 0.5, 1.999, -0.001)] == ["10", "10", "0.5", "2", "0"]
    assert (format_number(1234.56, 1), format_number(20.04, 0), format_number(1e9)) == ("1234.6", "20", "1000000000")
