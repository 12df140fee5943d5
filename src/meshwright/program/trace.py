"""A timeline as trace JSON, which ui.perfetto.dev and chrome://tracing open (Chromium's Trace Event Format)."""

from __future__ import annotations

from typing import Any

from meshwright.program.timeline import Timeline


def trace_events(
    timeline: Timeline, seconds_per_unit: float = 1.0, *, process: int = 0, first_thread: int = 0, start: float = 0.0
) -> dict[str, Any]:
    """Return a timeline as a Chrome trace: a thread for each track, slices, transfers as flows, levels as counters.

    seconds_per_unit: seconds of one unit of the timeline. start: microseconds of the trace at the timeline's time 0.
    process, first_thread: process number, and number of the first track's thread, in a trace with others.
    """
    scale = 1e6 * seconds_per_unit
    events: list[dict[str, Any]] = [process_event(process, timeline.title)]
    lanes: dict[int, int] = {}
    for span in timeline.spans:
        lanes[span.track] = max(lanes.get(span.track, 1), span.lanes)
    widest = max(
        lanes.values(), default=1
    )  # slices of one thread must nest: spans that overlap get threads of their own
    for track, name in enumerate(timeline.tracks):
        for lane in range(lanes.get(track, 1)):
            words = name if lane == 0 else f"{name}, overlapped"
            events += thread_events(process, first_thread + track * widest + lane, words)
    for span in timeline.spans:
        thread = first_thread + span.track * widest + span.lane
        begin, length = start + span.start * scale, (span.end - span.start) * scale
        events.append(slice_event(process, thread, begin, length, span.label, span.kind, {"what": span.name}))
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


def process_event(process: int, name: str) -> dict[str, Any]:
    """Return the Chrome-trace event that gives the process with number `process` its name."""
    return {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}


def thread_events(process: int, thread: int, name: str) -> list[dict[str, Any]]:
    """Return the Chrome-trace events that name a thread of a process, and sort threads by number."""
    common = {"ph": "M", "pid": process, "tid": thread}
    return [
        {**common, "name": "thread_name", "args": {"name": name}},
        {**common, "name": "thread_sort_index", "args": {"sort_index": thread}},
    ]


def slice_event(
    process: int, thread: int, start: float, length: float, label: str, kind: str, args: dict[str, Any]
) -> dict[str, Any]:
    """Return the Chrome-trace event of a slice: something that lasts `length` microseconds from `start` on.

    label: text on the slice. kind: its category. args: details to show. Slices of one thread must nest.
    """
    return {
        "ph": "X", "pid": process, "tid": thread, "ts": start, "dur": length, "name": label, "cat": kind, "args": args,
    }  # fmt: skip
