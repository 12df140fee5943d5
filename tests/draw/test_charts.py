"""Charts: values are at their axis positions, nothing overlaps or is cut off, titles name the contents."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from meshwright.draw.axis import Axis, make_linear_axis, make_log_axis
from meshwright.draw.bars import draw_grouped_bars, draw_stacked_bars
from meshwright.draw.line_chart import COLUMN, Band, Mark, Plot, Series, downsample, draw_lines, spread_labels
from meshwright.draw.scatter import draw_scatter
from meshwright.draw.text_width import estimate_text_width


def numbers(element: ET.Element, *names: str) -> list[float]:
    return [float(element.get(name, "nan")) for name in names]


def polylines(svg: str) -> list[list[tuple[float, ...]]]:
    return [
        [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
        for line in ET.fromstring(svg).iter("polyline")
    ]


def extents(svg: str) -> Iterator[tuple[str, float, float]]:
    """Return each text with its left and right end."""
    for text in ET.fromstring(svg).iter("text"):
        width, x = estimate_text_width(text.text or ""), float(text.get("x", 0))
        left = x - width * {"middle": 0.5, "end": 1.0}.get(text.get("text-anchor", ""), 0.0)
        yield text.text or "", left, left + width


def draw_chart(*content: Any, width: int = 760, **options: Any) -> str:
    """The picture of this width among those that `draw_lines` returns."""
    found = re.findall(r"<svg.*?</svg>", draw_lines(*content, **options), re.DOTALL)
    (one,) = (svg for svg in found if float(ET.fromstring(svg).get("width", 0)) == width)
    return str(one)


def assert_texts_are_inside(svg: str) -> None:
    width = float(ET.fromstring(svg).get("width", 0))
    assert [text for text, left, right in extents(svg) if left < -1 or right > width + 1] == []


def test_points_are_drawn_at_axis_positions():
    x_axis, y_axis = make_linear_axis(10, 40), make_linear_axis(1, 4, below=0.04, above=0.04)
    svg = draw_chart(x_axis, y_axis, [Series("a", [(10, 4), (20, 1), (40, 2)], "blue"), Series("b", [(30, 3)], "red")])
    plot = Plot(x_axis, y_axis, right=744, bottom=236)
    first, second = polylines(svg)
    assert [x for x, _ in first] == pytest.approx([plot.left, plot.left + (744 - plot.left) / 3, 744], abs=0.1)
    margin = 0.12  # above and below

    def height(value: float) -> float:
        return 236 - (value - (1 - margin)) / (3 + 2 * margin) * (236 - 14)

    assert [y for _, y in first] == pytest.approx([height(4), height(1), height(2)], abs=0.1)
    assert second == [(pytest.approx(plot.x(30), abs=0.1), pytest.approx(height(3), abs=0.1))]
    assert svg.count("<circle") == 1, "a line of one point is invisible"


def test_ticks_are_drawn_at_their_values():
    svg = draw_chart(
        make_linear_axis(0, 100, most=8), make_linear_axis(0, 10, above=0.04), [Series("a", [(0, 0), (100, 10)], "")]
    )
    texts = {text.text: text for text in ET.fromstring(svg).iter("text")}
    (left, _), (right, high) = polylines(svg)[0]
    assert {"0", "5", "10", "20", "100"} <= set(texts)
    assert float(texts["10"].get("y", 0)) - 4 == pytest.approx(high, abs=0.1)
    assert float(texts["20"].get("x", 0)) == pytest.approx(left + 0.2 * (right - left), abs=0.1)


def test_labels_of_large_values_are_not_cut_off():
    svg = draw_chart(
        make_linear_axis(0, 3e6, "steps"), make_linear_axis(0, 123_456_789, "tokens per second"),
        [Series(name * 9, [(0, 1), (3e6, 2)], "blue") for name in ("one ", "two ", "three ")],
    )  # fmt: skip
    assert_texts_are_inside(svg)


def test_tick_labels_do_not_overlap():
    names = [f"a long name {number}" for number in range(30)]
    for picture in ET.fromstring(draw_grouped_bars(names, [("before", "pale", range(30))], "")).iter("svg"):
        svg = ET.tostring(picture, encoding="unicode")
        shown = sorted((left, right) for text, left, right in extents(svg) if text.startswith("a long"))
        assert len(shown) > 2 and all(right < left for (_, right), (left, _) in pairwise(shown))
        assert_texts_are_inside(svg)


def test_series_gaps_are_omitted_and_few_points_dotted():
    svg = draw_chart(
        make_linear_axis(0, 3),
        make_linear_axis(0, 3),
        [Series("a", [(0, 1), (1, math.inf), (2, math.nan), (3, 2)], "", dots=True)],
    )
    assert len(polylines(svg)[0]) == len([*ET.fromstring(svg).iter("circle")]) == 2
    assert "nan" not in svg and "inf" not in svg


def test_hover_columns_cover_the_plot_once():
    series = [Series("a", [(float(x), x * x) for x in range(1000)], ""), Series("b", [(500.0, 7.0)], "")]
    svg = draw_chart(make_linear_axis(0, 999), make_linear_axis(0, 1e6), series, hover="step")
    hits = [one for one in ET.fromstring(svg).iter("g") if one.get("class") == "hit"]
    columns = [numbers(hit[0], "x", "width") for hit in hits]
    assert 40 < len(columns) <= 744 / COLUMN
    assert all(x + width == pytest.approx(after, abs=0.02) for (x, width), (after, _) in pairwise(columns))
    assert sum(columns[-1]) == pytest.approx(744, abs=0.02)
    tips = [[line.text for line in hit.iter("tspan")] for hit in hits]
    assert tips[0] == ["step 0", "a: 0"] and tips[-1][-1] == "b: 7 (step 500)"


@pytest.mark.parametrize("width", [760, 380])
def test_values_at_a_column_stay_inside_the_picture(width: int):
    series = [Series("a curve with a long name", [(float(x), 1e5 * x) for x in range(30)], "")]
    svg = ET.fromstring(
        draw_chart(make_linear_axis(0, 29), make_linear_axis(0, 3e6), series, hover="step", width=width)
    )
    boxes = [tip[0] for tip in svg.iter("g") if tip.get("class") == "tip"]
    assert len(boxes) == 30
    for x, wide in (numbers(box, "x", "width") for box in boxes):
        assert x >= 0 and x + wide <= width
    sides = {numbers(box, "x")[0] > width / 2 for box in boxes}
    assert sides == ({True, False} if width > 700 else sides)


def test_a_long_legend_grows_the_picture_and_leaves_the_title_free():
    series = [Series(f"runs/a long name {at}", [(0, at), (1, 2)], "blue") for at in range(8)]
    svg = draw_chart(make_linear_axis(0, 1), make_linear_axis(0, 9, "step; tokens per second"), series)
    lines = [text for text in ET.fromstring(svg).iter("text") if (text.text or "").startswith(("runs/", "step"))]
    assert max(numbers(text, "y")[0] for text in lines) < float(ET.fromstring(svg).get("height", 0))
    first = [end for text, _, end in extents(svg) if text.startswith("runs/")]
    start = next(left for text, left, _ in extents(svg) if text.startswith("step"))
    assert len(first) == 8 and max(first) < start
    assert_texts_are_inside(svg)


def test_a_legend_names_several_series_and_no_single_one():
    one, other = Series("<one>", [(0, 0)], "blue"), Series("other", [(1, 1)], "red")
    axes = make_linear_axis(0, 1), make_linear_axis(0, 1)
    assert "<text" in draw_chart(*axes, [one]) and len([*ET.fromstring(draw_chart(*axes, [one])).iter("rect")]) == 0
    both = draw_chart(*axes, [one, other])
    assert len([*ET.fromstring(both).iter("rect")]) == 2 and "&lt;one&gt;" in both


@pytest.mark.parametrize("at", [0.0, 0.5, 1.0])
def test_the_words_of_a_mark_stay_inside(at: float):
    svg = draw_chart(
        make_linear_axis(0, 1), make_linear_axis(0, 1), [], [Mark(at, "a long label next to the line", 0.5)]
    )
    assert_texts_are_inside(svg)
    assert len([*ET.fromstring(svg).iter("circle")]) == 1


def test_series_names_do_not_overlap():
    assert spread_labels([10, 11, 12, 90], 100) == [10, 25, 40, 90]
    assert spread_labels([95, 96, 97], 100) == [70, 85, 100]
    assert spread_labels([], 100) == []


def test_bands_cover_axis_and_are_labelled_where_labels_fit():
    plot = Plot(make_log_axis([1, 1e6], "", str), make_linear_axis(0, 1), right=500, bottom=300)
    high = plot.x_axis.high
    plot.draw_bands("best", [Band(1e3, "ring", "ring to 1000", "blue", "1 kB"), Band(high, "tree", "tree", "red")])
    root = ET.fromstring(plot.picture.to_svg(600, 400, "bands"))
    (x1, w1), (x2, w2) = (numbers(rect, "x", "width") for rect in root.iter("rect"))
    assert x1 == pytest.approx(plot.left, abs=0.01) and x2 == pytest.approx(x1 + w1, abs=0.02)
    assert x2 + w2 == pytest.approx(500, abs=0.02)
    assert {"ring", "tree", "1 kB", "best"} <= {text.text for text in root.iter("text")}


def test_downsampling_keeps_ends_and_extremes():
    points = [(float(x), math.sin(x / 900)) for x in range(50_000)]
    points[31_234] = (31_234.0, 9.0)
    kept = downsample(points, 720)
    assert len(kept) <= 2 * 720 and kept[0] == points[0] and kept[-1] == points[-1]
    assert points[31_234] in kept and list(kept) == sorted(kept)
    assert downsample(points[:50], 720) == points[:50]


COLOURS = {"a": "blue", "b": "red"}


@pytest.mark.parametrize(("limit", "drawn"), [(60.0, True), (35.0, True), (1000.0, False)])
def test_stacked_bars_are_as_long_as_their_parts(limit: float, drawn: bool):
    rows = [("pp 0", {"a": 10.0, "b": 30.0}), ("a longer name", {"a": 20.0, "b": 0.0})]
    svg = draw_stacked_bars(
        rows, COLOURS, lambda size: f"{size:g} GiB", "memory", (limit, f"{limit:g} GiB of a device")
    )
    root = ET.fromstring(svg)
    widths = {rect.findtext("title"): numbers(rect, "x", "width") for rect in root.iter("rect")}
    assert set(widths) == {"a: 10 GiB", "b: 30 GiB", "a: 20 GiB"}
    (x, a), (y, b) = widths["a: 10 GiB"], widths["b: 30 GiB"]
    assert b == pytest.approx(3 * a, abs=0.03) and y == pytest.approx(x + a, abs=0.02)
    lines = [line for line in root.iter("line") if line.get("class") == "limit"]
    assert len(lines) == drawn
    if drawn:
        assert float(lines[0].get("x1", 0)) == pytest.approx(x + limit * a / 10, abs=0.05)
    else:
        assert "of 1000 GiB of a device, 4%" in svg
    assert_texts_are_inside(svg)


def test_limit_near_the_left_edge_has_its_whole_text():
    limit = (1.0, "31.7 GiB of a device with a long name")
    assert_texts_are_inside(draw_stacked_bars([("", {"a": 7.0, "b": 1.0})], COLOURS, str, "memory", limit))


def test_many_bars_are_lower_and_named_now_and_then():
    svg = draw_stacked_bars([(f"pp {at}", {"a": 1.0}) for at in range(64)], COLOURS, str, "memory")
    names = [numbers(text, "y")[0] for text in ET.fromstring(svg).iter("text") if (text.text or "").startswith("pp")]
    assert len(names) == 32 and min(b - a for a, b in pairwise(names)) >= 14


def test_grouped_bars_are_side_by_side_on_axis():
    both = draw_grouped_bars(["1", "2"], [("before", "pale", [4, 8]), ("after", "blue", [2, 8])], "characters")
    pictures = [*ET.fromstring(both).iter("svg")]
    assert [numbers(picture, "width") for picture in pictures] == [[760], [380]]
    for picture in pictures:
        bars = {rect.findtext("title"): numbers(rect, "x", "y", "width", "height") for rect in picture.iter("rect")}
        (x, y, width, height), (x2, y2, _, height2) = bars["before: 4"], bars["after: 2"]
        assert x2 == pytest.approx(x + width, abs=0.02) and height == pytest.approx(2 * height2, abs=0.02)
        assert y + height == pytest.approx(y2 + height2, abs=0.02)


def test_a_scatter_marks_some_points_and_the_limit():
    axes = make_log_axis([1, 10], "seconds", str), make_log_axis([5, 80, 40], "memory", str)
    both = draw_scatter(*axes, [(1, 5), (10, 80)], [(2, 10, "<best>")], (40, "40 GiB of a device"))
    pictures = [ET.tostring(svg, encoding="unicode") for svg in ET.fromstring(both).iter("svg")]
    assert [numbers(ET.fromstring(svg), "width") for svg in pictures] == [[900], [380]]
    assert_texts_are_inside(pictures[1])
    svg = pictures[0]
    root = ET.fromstring(svg)
    kinds = [circle.get("class") for circle in root.iter("circle")]
    assert kinds == ["dot", "dot", "best"] and [t.text for t in root.iter("title")] == ["<best>"]
    assert_texts_are_inside(svg)


def test_an_axis_without_ticks_is_drawn():
    assert "<svg" in draw_chart(Axis(0, 1), Axis(0, 1), [])
