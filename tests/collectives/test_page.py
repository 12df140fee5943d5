"""Chart of time over size: every curve is named, the requested size is marked, no external resources."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from meshwright.collectives.page import draw_crossovers
from tests.collectives.example_curves import simulate_example_curves
from tests.draw.labels import find_label_faults


@pytest.mark.parametrize("algorithm", ["ring", "all-pairs", "of a file"])
def test_picture_marks_requested_size_and_algorithm(algorithm: str):
    curves = simulate_example_curves()
    found = curves.find_crossovers()
    seconds = curves.seconds.get(algorithm, curves.seconds["ring"])[2]
    root = ElementTree.fromstring(draw_crossovers(curves, found, curves.sizes[2], (algorithm, seconds)))
    best = {curves.find_fastest(0), *(crossover.after for crossover in found)}
    assert "ring" not in best and "all-pairs" in best
    drawn = {element[0].text: element for element in root.iter() if element.tag.endswith("polyline")}
    named = [name for name, line in drawn.items() if "named" in line.get("class", "")]
    assert named == (["ring"] if algorithm == "ring" else [])  # the others are the fastest at some size: in colour
    [dot] = [element for element in root.iter() if element.tag.endswith("circle")]
    if algorithm in drawn:
        points = (drawn[algorithm].get("points") or "").split()
        assert f"{dot.get('cx')},{dot.get('cy')}" == points[2]


def test_picture_for_a_phone_names_emphasized_curves_in_a_legend():
    curves = simulate_example_curves()
    svg = draw_crossovers(curves, curves.find_crossovers(), curves.sizes[2], ("ring", 1e-3), width=380, alone=False)
    root = ElementTree.fromstring(svg)
    assert root.get("width") == "380" and find_label_faults(svg) == []
    words = {element.text for element in root.iter() if element.tag.endswith("text")}
    drawn = [element for element in root.iter() if element.tag.endswith("polyline")]
    emphasized = {line[0].text for line in drawn if line.get("class") in ("named", "thick")}
    assert "ring" in emphasized and {*emphasized, "other algorithms", "lower bound, dashed"} <= words
    assert len(drawn) == len(curves.seconds) + 1


def test_picture_is_self_contained_and_names_algorithms_and_bound():
    curves = simulate_example_curves()
    found = curves.find_crossovers()
    svg = draw_crossovers(curves, found, requested=2**20)
    root = ElementTree.fromstring(svg)
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert set(curves.seconds) <= set(words) and "lower bound" in words and "1 MiB" in words
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|nan|inf\b", svg)
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    assert len(lines) == len(curves.seconds) + 1
    labels = [
        float(element.get("y", ""))
        for element in root.iter()
        if element.tag.endswith("text")
        and (element.text in curves.seconds or element.text == "lower bound")
        and element.get("text-anchor") is None
    ]
    gaps = [b - a for a, b in zip(sorted(labels), sorted(labels)[1:], strict=False)]
    assert len(labels) == len(lines) and min(gaps) > 12
