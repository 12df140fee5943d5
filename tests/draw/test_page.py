"""The page shell: one document for light and dark that loads nothing; tables, keys and bars."""

from __future__ import annotations

import colorsys
import re

import pytest

from meshwright.draw.markup import element
from meshwright.draw.page import bar, legend, page, paragraph, table
from meshwright.draw.picture import make_picture_style


def test_page_is_one_document_without_external_resources():
    text = page("a title", element("h1", "a title"), None, [paragraph("one"), paragraph("two", muted=True)])
    assert text.startswith('<!doctype html><html lang="en">') and text.endswith("</html>\n")
    assert "prefers-color-scheme: dark" in text and text.count("<style>") == text.count("<h1>") == 1
    assert not re.search(r"http|url\(|@import|<script|<link|src=", text)
    assert '<p>one</p><p class="muted">two</p>' in text
    assert 'class="narrow"' in page("", narrow=True) and 'class="narrow"' not in text


def test_style_sheets_use_only_their_own_colours():
    text = page("")
    used, declared = (set(re.findall(pattern, text)) for pattern in (r"var\((--[a-z]+)\)", r"(--[a-z]+):"))
    assert used - declared <= {"--hue", "--full", "--least"}  # set on elements


@pytest.mark.parametrize(
    ("cells", "right"),
    [
        (["42 µs", "1.5 ms"], True), (["75.65", "-"], True), (["40.5%", "<1%"], True), (["1,234", ""], True),
        (["105 / 0.30", "9 / 1.00"], True), (["0.5 (0.4 to 0.7)", "0.6"], False), (["forward 25%", "1"], False),
        (["", ""], False), (["1 x 8,192", "2"], False), ([element("b", "1"), "2"], False), (["dp8", "tp8"], False),
    ],
)  # fmt: skip
def test_columns_of_quantities_are_aligned_to_the_right(cells: list[str], right: bool):
    drawn = table(("name", "value"), [("1", cell) for cell in cells])
    assert drawn.count('class="n"') == (1 + len(cells)) * right


def test_first_cell_of_row_is_row_header():
    assert table((), [("a", "b < c")]) == '<div class="wide"><table><tr><th>a</th><td>b &lt; c</td></tr></table></div>'
    assert table(("head", ""), []).count("<th>") == 2
    assert "<thead>" in table(("head",), []) and table((), []) == '<div class="wide"><table></table></div>'


def test_keys_and_bars_show_colours_of_the_style_sheet():
    assert legend([("a & b", "blue")]).count("background:var(--blue)") == 1 and "a &amp; b" in legend(
        [("a & b", "blue")]
    )
    assert 'style="width:50.0%;background:var(--blue)"' in bar(0.5) and "<b" not in bar(0.5)
    assert 'style="left:33.3%"' in bar(0.5, mark=1 / 3) and bar(0.1, 0.2, colours=("pale", "blue")).count("<i") == 2


def compute_luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2) of a colour of the style sheet, `#rrggbb` or `hsl(...)`."""
    if colour.startswith("hsl"):
        hue, saturation, lightness = map(float, re.findall(r"[\d.]+", colour))
        rgb = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
    else:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        rgb = tuple(int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_colours_contrast_with_the_background(dark: bool):
    """Text at least 4.5 : 1, curves and bars at least 3 : 1 (WCAG 2.2, success criteria 1.4.3 and 1.4.11)."""
    light, overridden = (
        dict(re.findall(r"--(\w+): ([^;]+);", block))
        for block in re.findall(r":root \{(.*?)\}", make_picture_style(), re.DOTALL)
    )
    colours = light | overridden if dark else light
    paper = compute_luminance(colours["paper"]) + 0.05
    for name in colours.keys() - {"paper", "faint", "grid", "line", "tone"}:
        low, high = sorted((compute_luminance(colours[name]) + 0.05, paper))
        assert high / low >= (4.5 if name in ("ink", "dim", "red") else 3.0), name
