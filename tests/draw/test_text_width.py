"""Text widths against those measured by Chromium in DejaVu Sans at 12 pixels."""

from __future__ import annotations

import pytest

from meshwright.draw.text_width import estimate_text_width


@pytest.mark.parametrize(
    ("text", "measured"),
    [
        ("rank 0", 38.3), ("weight gradient, chunk 2, second replica", 244.8), ("79.6 GiB of a device", 121.2),
        ("hierarchical-scatter", 116.4), ("1,234,567", 61.1), ("F3 w12 b0d", 70.1), ("GROSS WMWM %", 105.8),
        ("seconds a step; a sample of all layouts", 233.4), ("all-reduce on 8 ranks, nodes:2x4,inner=450GB/s", 292.4),
    ],
)  # fmt: skip
def test_estimated_widths_are_close_to_measured_ones(text: str, measured: float):
    assert 0.95 * measured <= estimate_text_width(text) <= 1.2 * measured


def test_width_grows_with_text_and_size():
    assert estimate_text_width("") == 0
    assert estimate_text_width("ab") == estimate_text_width("a") + estimate_text_width("b")
    assert estimate_text_width("rank", 24) == 2 * estimate_text_width("rank")
    assert estimate_text_width("漢字") == 24 and estimate_text_width("e\u0301") == estimate_text_width("e")
    assert estimate_text_width("iiii", monospace=True) == estimate_text_width("MMMM", monospace=True)
