"""Gantt charts of simulated programs as text: one line for each track, time to the right, wrapped to the terminal's
width."""

from __future__ import annotations

import math
import textwrap

from meshwright.program.timeline import Span, Timeline

MAX_COLUMNS = 200_000


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """Return the Gantt chart of a timeline as text: one line for each track (a rank), in sections of the time axis such
    that lines have at most `width` characters (at least 20 for the chart itself).

    A step is drawn as its label, padded with dashes to its duration (F3: forward of micro-batch 3; f3: forward of the
    rank's second model chunk; F3': forward of the second model replica in a bidirectional schedule). Idle time is
    blank; overlapping steps have a line each.
    """
    spans = [span for span in timeline.spans if span.end > span.start]
    if not spans:
        return f"{timeline.title}: nothing to draw"
    labels = max(len(_format_label(span)) for span in spans)
    shortest = min(span.end - span.start for span in spans)
    # Columns per unit of time: the shortest step shows its label, unless the drawing becomes too wide.
    scale = min((labels + 1) / shortest, MAX_COLUMNS / timeline.end)
    columns = math.ceil(timeline.end * scale) + 1
    prefix = max(len(name) for name in timeline.tracks) + 1
    lanes = [
        max((span.lanes for span in spans if span.track == track), default=1) for track in range(len(timeline.tracks))
    ]
    rows = {(track, lane): [" "] * columns for track, count in enumerate(lanes) for lane in range(count)}
    for span in spans:
        first, last = round(span.start * scale), round(span.end * scale)
        text = _format_label(span)
        cells = text[: last - first].ljust(last - first, "-")[: last - first]
        if last - first > len(text):
            cells = cells[:-1] + "|"
        rows[span.track, span.lane][first:last] = list(cells)
    room = max(20, width - prefix - 1)
    lines = textwrap.wrap(timeline.title, width, break_long_words=False, break_on_hyphens=False)
    bands = math.ceil(columns / room)
    last = columns - (bands - 1) * room
    inline = prefix + 1 + last + 2 + max(map(len, timeline.notes), default=0) <= width  # else below
    for band in range(bands):
        begin, end = band * room, min(columns, (band + 1) * room)
        lines.append("" if bands == 1 else f"\ntime {begin / scale:.4g} to {min(end / scale, timeline.end):.4g}")
        for (track, lane), row in rows.items():
            name = timeline.tracks[track] if lane == 0 else ""
            note = f"  {timeline.notes[track]}" if timeline.notes and lane == 0 and band == bands - 1 and inline else ""
            lines.append(f"{name:<{prefix}}|{''.join(row[begin:end]).rstrip()}{note}".rstrip())
    if timeline.notes and not inline:
        lines += ["", *(f"{name:<{prefix}} {note}" for name, note in zip(timeline.tracks, timeline.notes, strict=True))]
    return "\n".join(lines)


def _format_label(span: Span) -> str:
    """Return the label of a step (`span`), such as `F3`; with an apostrophe (`F3'`) if the step is of the second model
    replica in a bidirectional schedule."""
    return span.label + ("'" if span.mirrored else "")
