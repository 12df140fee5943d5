"""docs/pictures/ is up to date with the generators; `make pages` rewrites it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshwright.draw.text_width import estimate_text_width
from meshwright.gallery.pictures import PICTURES
from tests.draw.labels import BOLD_WIDTH

DOCS = Path(__file__).resolve().parents[2] / "docs"
SVG = "{http://www.w3.org/2000/svg}"


def test_directory_of_pictures_holds_the_generated_ones_alone():
    assert {path.name for path in (DOCS / "pictures").iterdir()} == {f"{name}.svg" for name in PICTURES}


@pytest.mark.parametrize("name", PICTURES)
def test_committed_picture_is_the_generated_one(name: str):
    assert (DOCS / "pictures" / f"{name}.svg").read_text() == PICTURES[name]()


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_as_wide_as_a_page_and_holds_its_shapes(name: str):
    root = ElementTree.fromstring((DOCS / "pictures" / f"{name}.svg").read_text())
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    assert width <= 980  # a page of the site has 926 pixels in a window of 1200: smallest label 10.5, at least 9.9
    assert not [element for element in root.iter() if "font-size" in element.attrib.get("style", "")]
    for element in root.iter():
        if element.tag in (f"{SVG}rect", f"{SVG}text") and "x" in element.attrib:
            assert 0 <= float(element.attrib["x"]) + float(element.attrib.get("width", 0)) <= width, element.attrib
            assert 0 <= float(element.attrib["y"]) <= height
        if element.tag == f"{SVG}text" and "text-anchor" not in element.attrib:
            kind = element.attrib.get("class", "")
            size = 11 if "small" in kind else 14 * BOLD_WIDTH if "title" in kind else 12
            assert float(element.attrib["x"]) + estimate_text_width("".join(element.itertext()), size) <= width + 10, (
                element.text
            )


def test_picture_names_its_colours_for_light_and_dark():
    """Colours of the style sheet alone, or those of the Gantt chart, which are legible on both."""
    for name in PICTURES:
        drawn = re.sub(r"<style>.*?</style>", "", (DOCS / "pictures" / f"{name}.svg").read_text(), flags=re.DOTALL)
        assert "prefers-color-scheme: dark" in (DOCS / "pictures" / f"{name}.svg").read_text()
        assert not re.findall(r"(?:fill|stroke):(?!var\(|hsl\(|none)", drawn), name
