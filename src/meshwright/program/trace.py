"""Trace JSON of timelines, for ui.perfetto.dev and chrome://tracing (Chromium's Trace Event Format)."""

from __future__ import annotations

from typing import Any

from meshwright.program.timeline import Timeline


def build_chrome_trace(
    timeline: Timeline, *, process: int = 0, first_thread: int = 0, start: float = 0.0
) -> dict[str, Any]:
    """Return a timeline as a JSON object in Chrome's trace event format: tracks as threads, spans as slices, transfers
    as flow arrows, levels (curves of a quantity such as saved activations) as counters.

    One time unit of the timeline is shown as a second. process, first_thread: process number, and thread number of the
    first track, to combine several timelines. start: microseconds at which the timeline's time 0 lies.
    """
    scale = 1e6  # microseconds
    events: list[dict[str, Any]] = [make_process_event(process, timeline.title)]
    lanes: dict[int, int] = {}
    for span in timeline.spans:
        lanes[span.track] = max(lanes.get(span.track, 1), span.lanes)
    widest = max(lanes.values(), default=1)  # slices of one thread must nest, so overlapping spans get separate threads
    for track, name in enumerate(timeline.tracks):
        for lane in range(lanes.get(track, 1)):
            words = name if lane == 0 else f"{name}, overlapped"
            events += make_thread_events(process, first_thread + track * widest + lane, words)
    for span in timeline.spans:
        thread = first_thread + span.track * widest + span.lane
        begin, length = start + span.start * scale, (span.end - span.start) * scale
        events.append(make_slice_event(process, thread, begin, length, span.label, span.kind, {"what": span.name}))
    for number, arrow in enumerate(timeline.arrows):
        common = {"pid": process, "id": number, "name": arrow.name, "cat": "transfer"}
        source, target = (first_thread + track * widest for track in (arrow.source, arrow.target))
        events.append({"ph": "s", "tid": source, "ts": start + arrow.start * scale, **common})
        events.append({"ph": "f", "bp": "e", "tid": target, "ts": start + arrow.end * scale, **common})
    for track, points in timeline.levels.items():
        counter = f"{timeline.level_name} of {timeline.tracks[track]}"
        for time, value in points:
            level = {timeline.level_name: value}
            events.append({"ph": "C", "pid": process, "ts": start + time * scale, "name": counter, "args": level})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def make_process_event(process: int, name: str) -> dict[str, Any]:
    """Return the Chrome-trace metadata event that gives the process with number `process` the name `name`."""
    return {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}


def make_thread_events(process: int, thread: int, name: str) -> list[dict[str, Any]]:
    """Return two Chrome-trace metadata events for thread number `thread` of process number `process`: one gives it the
    name `name`, the other makes the viewer list threads in the order of their numbers."""
    common = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**common, "name": "thread_name", "args": {"name": name}},
        {**common, "name": "thread_sort_index", "args": {"sort_index": thread}},
    ]


def make_slice_event(
    process: int, thread: int, start: float, length: float, label: str, kind: str, args: dict[str, Any]
) -> dict[str, Any]:
    """Return the Chrome-trace event of a slice: a box on thread number `thread` of process number `process`, from
    `start` on for `length`, both in microseconds.

    label: text on the slice. kind: category of the slice. args: details shown when the slice is selected. Slices of one
    thread must nest.
    """
    return {
        "ph": "X", "pid": process, "tid": thread, "ts": start, "dur": length, "name": label, "cat": kind, "args": args,
    }  # fmt: skip
