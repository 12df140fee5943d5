"""Pictures of programs (SVG, page, trace, text) against the spans they were drawn from."""

from __future__ import annotations

import colorsys
import itertools
import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest

from meshwright.draw.gantt import COLOURS, draw_overview, draw_page, draw_svg
from meshwright.draw.gantt_text import draw_text
from meshwright.draw.text_width import estimate_text_width
from meshwright.program.collective import Builder as CollectiveBuilder
from meshwright.program.pipeline import Builder, PipelineProgram, place_in_v_shape
from meshwright.program.timeline import Span, Timeline, build_collective_timeline, build_pipeline_timeline
from meshwright.program.trace import build_chrome_trace

SAME = ("update", "all-to-all", "send", "reduce")  # equal colours for both replicas
SVG = "{http://www.w3.org/2000/svg}"


def v_program() -> PipelineProgram:
    """Two ranks, four stages in a V, one micro-batch; on rank 1 a forward and a backward of the next overlap."""
    builder = Builder("hand-made", 2, 2, (place_in_v_shape(2),))
    first, second = builder.ranks
    first.forward(0, stage=0)
    first.forward(1, stage=0)
    second.forward(0, stage=1)
    second.forward(0, stage=2)
    first.forward(0, stage=3)
    first.input_gradient(0, stage=3)
    first.weight_gradient(0, stage=3)
    with second.overlap():
        second.forward(1, stage=1)
        second.backward(0, stage=2)
    return builder.build()


@pytest.fixture
def timeline() -> Timeline:
    program = v_program()
    begin = [0.0, 1.0, 3.0, 4.0, 5.0, 1.0, 2.0, 5.0, 5.0]
    length = [1.0] * 7 + [2.0, 2.0]
    start = np.array(begin)
    timing = SimpleNamespace(start=start, end=start + length)
    levels = {0: [(0.0, 0.5), (1.0, 1.0), (6.0, 0.5)], 1: [(1.0, 0.5), (5.0, 1.0)]}
    return build_pipeline_timeline(program, timing, notes=("idle 1", "idle 2"), levels=levels)


def bars(svg: str) -> list[ET.Element]:
    return [rect for rect in ET.fromstring(svg).iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]


def test_every_step_is_drawn_as_long_as_it_lasts(timeline: Timeline):
    drawn = bars(draw_svg(timeline))
    assert len(drawn) == len(timeline.spans) == 9
    first, *others = [
        (float(bar.get("x", 0)), float(bar.get("width", 0)) + 0.8, span)
        for bar, span in zip(drawn, timeline.spans, strict=True)
    ]
    scale = first[1] / (first[2].end - first[2].start)
    for x, width, span in others:
        assert width == pytest.approx((span.end - span.start) * scale, abs=0.05)
        assert x - first[0] == pytest.approx((span.start - first[2].start) * scale, abs=0.05)


def test_overlapped_steps_share_the_height_of_their_rank(timeline: Timeline):
    *alone, one, other = bars(draw_svg(timeline))
    assert {float(bar.get("height", 0)) for bar in (one, other)} == {float(alone[0].get("height", 0)) / 2}
    assert one.get("y") != other.get("y")


def test_hovering_names_the_step_in_full(timeline: Timeline):
    titles = [bar.findtext(f"{SVG}title") for bar in bars(draw_svg(timeline))]
    assert "weight gradient of micro-batch 0, stage 3: 5 to 6" in titles


def test_chunks_of_rank_differ_in_shade_and_in_label(timeline: Timeline):
    labels = {span.label: span.shade for span in timeline.spans if span.track == 0}
    assert labels == {"F0": 0.0, "F1": 0.0, "f0": 1.0, "i0": 1.0, "w0": 1.0}
    fills = {bar.get("style") for bar in bars(draw_svg(timeline))[:3]}
    assert len(fills) == 2


def test_every_kind_of_step_has_one_colour_per_replica():
    assert all(first != second for kind, (first, second) in COLOURS.items() if kind not in SAME)


def test_legend_names_every_colour_once_and_the_strip(timeline: Timeline):
    def legend(drawn: Timeline) -> list[str]:
        return [
            word.text or ""
            for word in ET.fromstring(draw_svg(drawn)).iter(f"{SVG}text")
            if "small" in word.get("class", "")
        ]

    kinds = ["forward, chunk 1", "forward, chunk 2", "backward B or input gradient I", "weight gradient"]
    assert legend(timeline) == [*kinds, "activations, full height 1"]
    both = [Span(0, at, at + 1.0, "all-to-all", "F0d", "dispatch", mirrored=at > 0) for at in (0.0, 1.0)]
    assert legend(Timeline("both ways", ("rank 0",), both)) == ["all-to-all"]


def test_wide_legend_wraps_into_lines_above_rows(timeline: Timeline):
    kinds = [kind for kind in COLOURS if kind not in SAME]
    spans = [Span(0, k, k + 1.0, kind, "F0", kind, mirrored=m) for k, kind in enumerate(kinds) for m in (False, True)]
    picture = ET.fromstring(draw_svg(Timeline("narrow", ("rank 0",), spans), width=400))
    words = [word for word in picture.iter(f"{SVG}text") if "small" in word.get("class", "")]
    assert len(words) == len({colour for kind in kinds for colour in COLOURS[kind]})
    ends = [float(word.get("x", 0)) + 6.1 * len(word.text or "") for word in words]
    assert max(ends) <= float(picture.get("width", 0))
    lines = sorted({float(word.get("y", 0)) for word in words})
    rows = [float(row.get("y", 0)) for row in picture.iter(f"{SVG}rect") if row.get("class") == "row"]
    assert len(lines) > 1 and lines[-1] < min(rows)


@pytest.mark.parametrize("kind", COLOURS)
@pytest.mark.parametrize("mirrored", [False, True])
def test_labels_contrast_with_their_steps(kind: str, mirrored: bool):
    """At least 4.5 : 1 (WCAG 2.2, success criterion 1.4.3), for every chunk of a rank."""
    spans = [Span(0, at, at + 1.0, kind, "F0", kind, at / 10, mirrored) for at in range(11)]
    root = ET.fromstring(draw_svg(Timeline("shades", ("rank 0",), spans)))
    labels = [text for text in root.iter(f"{SVG}text") if (text.get("class") or "").startswith("on")]
    for bar, label in zip(bars(ET.tostring(root, encoding="unicode")), labels, strict=True):
        hue, saturation, lightness = map(float, re.findall(r"[\d.]+", bar.get("style", "")))
        colour = colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100)
        linear = [value / 12.92 if value < 0.04 else ((value + 0.055) / 1.055) ** 2.4 for value in colour]
        luminance = np.dot((0.2126, 0.7152, 0.0722), linear) + 0.05
        contrast = luminance / 0.05 if "dark" in label.get("class", "") else 1.05 / luminance
        assert contrast >= 4.5, (bar.get("style"), label.get("class"))


def test_labels_of_narrow_steps_have_two_lines_of_the_same_size():
    spans = [Span(0, at, at + 1.0, "forward", f"F{at % 10}m", "forward") for at in range(10, 40)]
    chart = draw_svg(Timeline("narrow", ("rank 0",), spans), width=900, widen=False)
    root = ET.fromstring(chart)
    labels = [text for text in root.iter(f"{SVG}text") if text.get("class") == "on"]
    assert float(root.get("width", 0)) == 900
    assert [text.text for text in labels] == [part for at in range(10, 40) for part in ("F", f"{at % 10}m")]
    letters, numbers = ({float(text.get("y", 0)) for text in labels[first::2]} for first in (0, 1))
    assert max(numbers) - min(letters) == 11 and len(letters) == len(numbers) == 1
    assert "font-size:9" not in chart
    wide = ET.fromstring(draw_svg(Timeline("wide", ("rank 0",), spans), width=900))
    assert [text.text for text in wide.iter(f"{SVG}text") if text.get("class") == "on"] == [s.label for s in spans]


def test_legend_explains_letters_of_components():
    spans = [Span(0, 0.0, 1.0, "forward", "F0a", "attention in the forward")]
    letters = {"a": "attention", "m": "MLP"}
    picture = ET.fromstring(draw_svg(Timeline("parts", ("rank 0",), spans, letters=letters)))
    (line,) = [text for text in picture.iter(f"{SVG}text") if "last letter" in (text.text or "")]
    assert line.text == "last letter of a label: a attention, m MLP"
    (row,) = [rect for rect in picture.iter(f"{SVG}rect") if rect.get("class") == "row"]
    assert float(line.get("y", 0)) < float(row.get("y", 0))


def test_time_axis_has_a_title():
    drawn = Timeline("axis", ("rank 0",), [Span(0, 0.0, 1.0, "forward", "F0", "F0")], time_title="seconds")
    (title,) = [text for text in ET.fromstring(draw_svg(drawn)).iter(f"{SVG}text") if "axis" in text.get("class", "")]
    assert title.text == "seconds"


def test_level_strip_height_follows_saved_activations(timeline: Timeline):
    first, _ = ET.fromstring(draw_svg(timeline)).iter(f"{SVG}polygon")
    points = [tuple(map(float, point.split(","))) for point in first.get("points", "").split()]
    (left, base), *corners = points
    assert [round(base - y, 1) for _, y in corners] == [0, 4.5, 4.5, 9, 9, 4.5, 4.5, 0]  # of 9 pixels
    unit = (corners[-1][0] - left) / timeline.end
    assert [round((x - left) / unit, 1) for x, _ in corners] == [0, 0, 1, 1, 6, 6, 7, 7]


def test_background_of_rows_ends_with_the_last_step(timeline: Timeline):
    """A longer axis, shared by several charts, must not look like idle time."""
    for until in (0.0, 9.0):
        picture = ET.fromstring(draw_svg(timeline, until=until))
        rows = [row for row in picture.iter(f"{SVG}rect") if row.get("class") == "row"]
        assert len(rows) == 2
        steps = bars(draw_svg(timeline, until=until))
        last = max(float(step.get("x", 0)) + float(step.get("width", 0)) + 0.8 for step in steps)
        for row in rows:
            assert float(row.get("x", 0)) + float(row.get("width", 0)) == pytest.approx(last, abs=0.1)


@pytest.mark.parametrize("end", [0.013, 1.0, 7.0, 96.5, 12_345.0])
def test_time_axis_has_even_round_ticks_from_zero(end: float):
    picture = ET.fromstring(draw_svg(Timeline("axis", ("rank 0",), [Span(0, 0.0, end, "forward", "F0", "F0")])))
    ticks = [t for t in picture.iter(f"{SVG}text") if "tick" in t.get("class", "")]
    times, places = (
        [float(value or 0) for value in values] for values in ([t.text for t in ticks], [t.get("x") for t in ticks])
    )
    assert times[0] == 0 and 4 <= len(times) <= 25
    assert np.diff(times) == pytest.approx(times[1]) and times[-1] <= end * 1.0001 < times[-1] + times[1] * 1.001
    assert f"{times[1]:.0e}"[0] in "125"
    assert np.diff(places) == pytest.approx(np.diff(places)[0], abs=0.11)
    assert 60 < np.diff(places)[0] < 160  # pixels


def test_page_loads_no_external_resources(timeline: Timeline):
    page = draw_page(timeline, rows=[["rank", "idle"], ["0", "<1>"]], summary="a & b")
    assert not re.search(r"(src|href)=|@import|url\(", page)
    assert "&lt;1&gt;" in page and "a &amp; b" in page
    assert page.count(timeline.title) == 3  # head, heading, the picture's label


def test_page_of_a_chart_wider_than_itself_shows_the_whole_step_above(timeline: Timeline):
    spans = [Span(0, at, at + 1.0, kind, "F000", kind) for at, kind in enumerate(["forward", "weight gradient"] * 40)]
    long = Timeline("long", ("rank 0",), spans)
    drawn = map(ET.fromstring, re.findall("<svg.*?</svg>", draw_page(long, rows=[]), re.S))
    overview, of_phones, chart = drawn
    assert float(of_phones.get("width", 0)) == 380
    assert float(overview.get("width", 0)) <= 1168 < float(chart.get("width", 0))
    legend = [word for word in chart.iter("text") if "small" in word.get("class", "")]
    assert len(legend) == 2 and max(float(word.get("x", 0)) for word in legend) < 1160
    assert draw_page(timeline, rows=[]).count("<svg") == 1


def test_an_overview_shows_every_step_within_its_width(timeline: Timeline):
    pictures = [*ET.fromstring(draw_overview(timeline, width=600)).iter("svg")]
    assert [float(picture.get("width", 0)) for picture in pictures] == [600, 380]  # the second for phones
    for picture in pictures:
        paths = "".join(path.get("d", "") for path in picture.iter("path"))
        boxes = re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", paths)
        assert len(boxes) == len(timeline.spans)
        assert max(float(x) + float(width) for x, width in boxes) <= float(picture.get("width", 0))


def test_notes_beside_the_rows_are_not_cut_off(timeline: Timeline):
    picture = ET.fromstring(draw_svg(timeline))
    for note in (text for text in picture.iter(f"{SVG}text") if (text.text or "").startswith("idle")):
        assert float(note.get("x", 0)) + estimate_text_width(note.text or "") <= float(picture.get("width", 0))


def test_a_name_from_a_file_cannot_spoil_the_picture():
    span = Span(0, 0.0, 1.0, "forward", "F0", '</title><script>"x"')
    svg = draw_svg(Timeline("<b>\x00\x1b[2J", ("rank 0",), [span]))
    picture = ET.fromstring(svg)
    assert "<script" not in svg and picture.get("aria-label") == "<b>\u2400\u241b[2J"


def test_text_has_one_line_per_rank_with_timed_steps(timeline: Timeline):
    lines = draw_text(timeline, width=100).splitlines()
    rows = [line.partition("|")[2] for line in lines if "|" in line]
    assert rows[0].startswith("F0|F1|   f0|i0|w0|")
    assert rows[1].startswith("   F0|f0|      F1---|") and rows[2].startswith("               b0---|")
    assert rows[0].endswith("idle 1")


def test_text_chart_wraps_into_bands_at_terminal_width(timeline: Timeline):
    narrow = draw_text(timeline, width=29)
    assert narrow.count("rank 0") == 2 and "time 0 to" in narrow


def test_trace_holds_every_step_once_with_its_times(timeline: Timeline):
    events = build_chrome_trace(timeline)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted((e["ts"], e["dur"]) for e in slices) == sorted(
        (1e6 * span.start, 1e6 * (span.end - span.start)) for span in timeline.spans
    )
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["rank 0", "rank 1", "rank 1, overlapped"]
    counters = [e for e in events if e["ph"] == "C"]
    assert len(counters) == 5 and {e["name"] for e in counters} == {"activations of rank 0", "activations of rank 1"}


def test_trace_slices_of_one_thread_do_not_overlap(timeline: Timeline):
    threads: dict[int, list[tuple[float, float]]] = {}
    for event in build_chrome_trace(timeline)["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        slices.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(slices))


def test_collective_transfers_are_on_tracks_of_their_senders():
    builder = CollectiveBuilder("all-reduce", "hand-made", 2, chunks=2)
    with builder.round():
        builder.transfer([0, 1], [1, 0], chunk=[0, 1], reduce=True)
    with builder.round():
        builder.transfer([1, 0], [0, 1], chunk=[0, 1])
    program = builder.build()
    # rank 0: send, reduce | send, receive; rank 1 the same.
    sends, receives = np.array([0, 2, 4, 6]), np.array([5, 7, 1, 3])
    start, end = np.array([0.0, 1.0, 0.0, 1.0]), np.array([1.0, 2.0, 1.0, 2.0])
    drawn = build_collective_timeline(program, sends, receives, start, end)
    assert [(span.track, span.kind, span.label) for span in drawn.spans] == [
        (0, "reduce", "data[0]>1"),
        (0, "send", "data[1]>1"),
        (1, "reduce", "data[1]>0"),
        (1, "send", "data[0]>0"),
    ]
    flows = [event for event in build_chrome_trace(drawn)["traceEvents"] if event["ph"] in "sf"]
    found = sorted((e["ts"], e["tid"], e["ph"]) for e in flows)
    assert found == sorted((1e6 * (at + (ph == "f")), rank, ph) for at in (0, 1) for rank in (0, 1) for ph in "sf")
