"""A timeline as trace JSON, which ui.perfetto.dev and chrome://tracing open (Chromium's Trace Event Format)."""

from __future__ import annotations

from typing import Any

from meshwright.program.timeline import Timeline


def trace_events(timeline: Timeline, seconds_per_unit: float = 1.0) -> dict[str, Any]:
    """The trace as a JSON-able object: a thread a track, a slice a span, arrows as flows, levels as counters.

    A time of 1 in the timeline is `seconds_per_unit` seconds of the trace, which counts microseconds.
    """
    scale = 1e6 * seconds_per_unit
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": timeline.title}},
    ]
    lanes: dict[int, int] = {}
    for span in timeline.spans:
        lanes[span.track] = max(lanes.get(span.track, 1), span.lanes)
    widest = max(
        lanes.values(), default=1
    )  # slices of one thread must nest: spans that overlap get threads of their own
    for track, name in enumerate(timeline.tracks):
        for lane in range(lanes.get(track, 1)):
            thread = track * widest + lane
            words = name if lane == 0 else f"{name}, overlapped"
            events.append({"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": words}})
            events.append(
                {"ph": "M", "pid": 0, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}
            )
    for span in timeline.spans:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": span.track * widest + span.lane,
                "ts": span.start * scale,
                "dur": (span.end - span.start) * scale,
                "name": span.label,
                "cat": span.kind,
                "args": {"what": span.name},
            }
        )
    for number, arrow in enumerate(timeline.arrows):
        common = {"pid": 0, "id": number, "name": arrow.name, "cat": "transfer"}
        events.append({"ph": "s", "tid": arrow.source * widest, "ts": arrow.start * scale, **common})
        events.append({"ph": "f", "bp": "e", "tid": arrow.target * widest, "ts": arrow.end * scale, **common})
    for track, points in timeline.levels.items():
        counter = f"{timeline.level_name} of {timeline.tracks[track]}"
        for time, value in points:
            events.append(
                {"ph": "C", "pid": 0, "ts": time * scale, "name": counter, "args": {timeline.level_name: value}}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
