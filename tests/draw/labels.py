"""Boxes of the texts in an SVG picture, to check that labels neither overlap nor are cut off."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

from meshwright.draw.text_width import estimate_text_width

SIZES = {"small": 11.0, "tick": 11.0, "axis": 11.0, "on": 10.5, "title": 14.0}
BOLD = {"title", "strong"}
BOLD_WIDTH = 1.06  # of DejaVu Sans in a browser, relative to the estimate for regular letters
SLACK = 2.0  # pixels


def find_label_faults(page: str) -> list[str]:
    """Texts of a page's pictures that overlap another one or leave their picture, as lines for a test's message."""
    faults = []
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        root = ElementTree.fromstring(svg)
        left, top, width, height = map(float, root.get("viewBox", "0 0 0 0").split())
        if width == 0 or 'class="cell"' in svg:  # patterns alone, or frames whose fonts a page sets
            continue
        boxes = []
        for text in root.iter():
            if not text.tag.endswith("text") or not text.text:
                continue
            kinds = (text.get("class") or "").split()
            size = next((SIZES[name] for name in kinds if name in SIZES), 12.0)
            wide = estimate_text_width(text.text, size) * (BOLD_WIDTH if BOLD & {*kinds} else 1.0)
            x, y = float(text.get("x", 0)), float(text.get("y", 0))
            x -= wide * {"middle": 0.5, "end": 1.0}.get(text.get("text-anchor", ""), 0.0)
            boxes.append((text.text, x, x + wide, y - 0.75 * size, y + 0.2 * size))
        for words, start, end, above, below in boxes:
            if (
                start < left - SLACK
                or end > left + width + SLACK
                or above < top - SLACK
                or below > top + height + SLACK
            ):
                faults.append(f"{words!r} leaves its picture")
        for one, other in combinations(boxes, 2):
            if all(one[low] + SLACK < other[low + 1] and other[low] + SLACK < one[low + 1] for low in (1, 3)):
                faults.append(f"{one[0]!r} overlaps {other[0]!r}")
    return faults
