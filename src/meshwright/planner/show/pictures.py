"""Pictures of a plan for its page: bars of time and of memory, and memory against time of a whole search."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.draw.axis import make_log_axis
from meshwright.draw.bars import draw_page_bars
from meshwright.draw.markup import Markup, join
from meshwright.draw.page import legend
from meshwright.draw.scatter import draw_scatter
from meshwright.planner.search.estimate import Estimate
from meshwright.planner.search.search import SearchResult
from meshwright.planner.search.shortlist import add_device_overhead
from meshwright.planner.show.text import Unit, format_size, share_text

COLOURS = {
    "parameters": "blue", "gradients": "orange", "optimizer": "purple", "activations": "green",
    "communication": "teal", "logits": "yellow", "workspace": "pink", "framework": "grey", "unexplained": "silver",
    "compute": "green", "tensor": "blue", "context": "teal", "expert": "yellow", "data": "orange",
    "pipeline": "pink", "bubble": "silver",
}  # fmt: skip
MOST_DOTS = 2500
SLOWEST, LARGEST = 6, 32
"""Limits of the scatter plot: step time as a multiple of the fastest layout's, memory as a multiple of a device's."""


def memory_time_scatter(result: SearchResult, marked: Sequence[Estimate]) -> Markup:
    """Return a log-log scatter plot of memory against step time for a sample of the layouts of a search. marked:
    estimates to highlight."""
    every, room = result.screened, result.problem.usable_bytes
    size = add_device_overhead(result.problem, every.bytes)
    near = np.flatnonzero((every.seconds < SLOWEST * every.seconds.min()) & (size < LARGEST * room))
    chosen = near[:: max(1, len(near) // MOST_DOTS)]
    points = [*zip(every.seconds[chosen].tolist(), size[chosen].tolist(), strict=True)]
    best = [
        (seconds, float(memory), f"{one.layout}: {seconds:.4g} s, {format_size(memory)}")
        for one in marked
        for seconds, memory in [(one.time.seconds, one.memory.device_bytes)]
    ]
    seconds, sizes = ([*(point[at] for point in points), *(one[at] for one in best)] for at in (0, 1))
    unit = Unit.of(max(min(*sizes, room), room / 100))
    across = make_log_axis(seconds, "time of a step", lambda at: f"{at:.4g} s")
    up = make_log_axis(
        [*sizes, room], "memory of a device against time of a step",
        lambda at: f"{at:,.0f} {unit.name}" if at >= 1 else f"{at:g} {unit.name}", unit.bytes,
    )  # fmt: skip
    return draw_scatter(across, up, points, best, _device_limit(room))


def time_bar(parts: dict[str, float]) -> Markup:
    """Return one stacked bar of a step's time with a legend. parts: seconds by part, such as "compute"."""
    whole = sum(parts.values())
    words = [f"{part} {size:.3g} s ({share_text(size / whole)})" for part, size in parts.items()]
    drawn = draw_page_bars([("", parts)], COLOURS, lambda seconds: f"{seconds:.4g} s", "time by component")
    return join([drawn, legend(zip(words, map(COLOURS.__getitem__, parts), strict=True))])


def memory_bars(rows: Sequence[tuple[str, dict[str, float]]], limit: float) -> Markup:
    """Return stacked bars of memory with a legend, one bar for each item of `rows`. An item is (label, {category:
    bytes}). limit: bytes of a device's memory, drawn as a line."""
    used = [part for part in rows[0][1] if any(parts[part] > 0 for _, parts in rows)]
    drawn = draw_page_bars(rows, COLOURS, format_size, "memory of each rank", _device_limit(limit))
    return join([drawn, legend((part, COLOURS[part]) for part in used)])


def _device_limit(limit: float) -> tuple[float, str]:
    """Return (position in bytes, label) of the line that marks a device's memory limit in a plot. limit: the limit in
    bytes."""
    return limit, f"{format_size(limit)} of a device"
