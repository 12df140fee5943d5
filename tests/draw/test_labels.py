"""Labels of the pages that commands write: none overlaps another one, none is cut off."""

from __future__ import annotations

import shlex

import pytest

from meshwright.draw.axis import make_linear_axis
from meshwright.draw.line_chart import Series, draw_lines
from meshwright.draw.picture import Picture
from tests.draw.labels import find_label_faults


@pytest.mark.parametrize(
    "command",
    [
        "schedule zb-v --stages 8 --microbatches 16 --transfer 0.1",
        "schedule dualpipe --stages 4 --microbatches 8 --parts 1,1,1,1 --layers 16",
        "collective all-reduce ring --ranks 6 --bytes 64MiB",
        "collective all-reduce auto --ranks 8 --bytes 1MiB --topology nodes:2x4,rails",
        "plan llama-3-8b --cluster 64xh100-sxm --sequence 8192 --batch 512 --layout 'dp4 zero1 tp2 pp8:1f1b mb16'",
    ],
)
def test_labels_of_written_pages_are_apart_and_whole(command: str, command_line, tmp_path):
    assert command_line(*shlex.split(command), "--html", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and find_label_faults(page) == []


def test_labels_of_an_overlaid_chart_with_long_names_are_apart_and_whole():
    names = [f"runs/an experiment with a long name, number {number}" for number in range(8)]
    series = [Series(name, [(0, 123456.0), (1e6, 9.0)], "blue") for name in names]
    axes = make_linear_axis(0, 1e6, most=8), make_linear_axis(0, 123456, "step; tokens per second")
    assert find_label_faults(draw_lines(*axes, series, hover="step")) == []


def test_overlapping_and_cut_labels_are_found():
    picture = Picture()
    picture.add_text(10, 20, "a label")
    picture.add_text(30, 22, "another label")
    picture.add_text(190, 80, "too far right")
    assert find_label_faults(picture.to_svg(200, 100, "faults")) == [
        "'too far right' leaves its picture", "'a label' overlaps 'another label'"
    ]  # fmt: skip
