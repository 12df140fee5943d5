"""Pictures of a plan, as SVG for its page: stacked bars, and memory against time of a whole search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from meshwright.planner.estimate import Estimate
from meshwright.planner.search import Found, on_device
from meshwright.planner.text import Unit, share_text

COLOURS = {
    "parameters": "hsl(214 60% 50%)", "gradients": "hsl(24 74% 52%)", "optimizer": "hsl(265 42% 58%)",
    "activations": "hsl(150 45% 42%)", "communication": "hsl(190 55% 45%)", "logits": "hsl(45 80% 50%)",
    "workspace": "hsl(330 45% 55%)", "framework": "hsl(215 12% 55%)", "unexplained": "hsl(0 0% 72%)",
    "compute": "hsl(150 45% 42%)", "tensor": "hsl(214 60% 50%)", "context": "hsl(190 55% 45%)",
    "expert": "hsl(45 80% 50%)", "data": "hsl(24 74% 52%)", "pipeline": "hsl(330 45% 55%)", "bubble": "hsl(0 0% 72%)",
}  # fmt: skip
STYLE = """
.bar text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #222 } .bar .muted { fill: #666 }
.bar .line { stroke: #9aa3ad } .bar .grid { stroke: #9aa3ad; stroke-opacity: .3 }
.bar .room { stroke: #c0392b; stroke-dasharray: 5 4; stroke-width: 1.5 }
.bar .halo { paint-order: stroke; stroke: #fff; stroke-width: 4px; stroke-linejoin: round }
.bar .dot { fill: #7d8894; fill-opacity: .35 } .bar .best { fill: hsl(24 74% 46%) }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 5px 0 0 }
.legend span { white-space: nowrap; margin-right: 16px }
@media (prefers-color-scheme: dark) {
  .bar text { fill: #e4e7ea } .bar .muted { fill: #9aa3ad } .bar .halo { stroke: #15191e }
}
"""
MOST_DOTS = 2500
WIDTH = 900
SLOWEST, LARGEST = 6, 32
"""Layouts that a picture shows take so many times the fastest one's time, and a device's memory, at most."""


def cloud(found: Found, marked: Sequence[Estimate]) -> str:
    """A dot for each of a sample of all layouts that are neither very slow nor very large; those that the page tells of
    are marked. Both axes are logarithmic."""
    every = found.priced
    assert every is not None
    room = found.problem.cluster.device.memory_bytes
    size = on_device(found.problem, every.bytes)
    near = np.flatnonzero((every.seconds < SLOWEST * every.seconds.min()) & (size < LARGEST * room))
    chosen = near[:: max(1, len(near) // MOST_DOTS)]
    height, left, bottom = 400, 84, 46
    across = [*every.seconds[chosen].tolist(), *(one.time.seconds for one in marked)]
    up = [*size[chosen].tolist(), *(float(one.memory.device_bytes) for one in marked), room]
    right, top = Axis.over(across, left, WIDTH - 16), Axis.over(up, height - bottom, 14)
    unit = Unit.of(max(min(up), room / 100))
    parts = [opened(WIDTH, height, "memory against time")]
    for seconds in right.ticks():
        x = right.at(seconds)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="14" y2="{height - bottom}"/>')
        parts.append(_label(x, height - bottom + 17, "middle", f"{seconds:.4g} s"))
    for count in top.ticks(unit.bytes):
        y = top.at(count * unit.bytes)
        parts.append(f'<line class="grid" x1="{left}" x2="{WIDTH - 16}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_label(left - 8, y + 4, "end", _counted(count, unit)))
    for at in chosen:
        parts.append(_dot("dot", right.at(every.seconds[at]), top.at(size[at]), 2))
    line = top.at(room)
    parts.append(f'<line class="room" x1="{left}" x2="{WIDTH - 16}" y1="{line:.1f}" y2="{line:.1f}"/>')
    says = f"{Unit.of(room).say(room)} of a device"
    parts.append(f'<text class="halo" x="{WIDTH - 20}" y="{line - 6:.1f}" text-anchor="end">{says}</text>')
    for one in marked:
        memory = one.memory.device_bytes
        title = f"{one.layout}: {one.time.seconds:.4g} s, {Unit.of(memory).say(memory)}"
        parts.append(_dot("best", right.at(one.time.seconds), top.at(memory), 4.5, title))
    what = "seconds a step; a sample of all layouts, those in the tables in colour"
    parts.append(_label((left + WIDTH) / 2, height - 8, "middle", what))
    return "\n".join([*parts, "</svg>"])


class Axis:
    """A logarithmic axis from `low` at pixel `start` to `high` at pixel `end`."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high, start, end

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """That shows all of them, with some air."""
        low, high = min(values), max(values)
        air = max(1.02, (high / low) ** 0.04, 1.5 / (high / low)) if high < 1.5 * low else (high / low) ** 0.04
        return cls(low / air, high * air, start, end)

    def at(self, value: float) -> float:
        """Its pixel."""
        return self.start + math.log(value / self.low) / math.log(self.high / self.low) * (self.end - self.start)

    def ticks(self, unit: float = 1.0) -> Iterator[float]:
        """Round numbers, counted in `unit`: powers of ten, with 2 and 5 or more between them where there is room."""
        low, high = self.low / unit, self.high / unit
        if high < 4 * low:  # equal steps
            step = 10.0 ** math.floor(math.log10(high - low))
            step *= next(part for part in (0.1, 0.2, 0.5, 1.0, 2.0) if (high - low) / (part * step) <= 8)
            yield from (number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1))
            return
        mantissas = (1,) if high > 1e4 * low else (1, 2, 5) if high > 20 * low else (1, 2, 3, 4, 6, 8)
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
            yield from (part * 10.0**power for part in mantissas if low <= part * 10.0**power <= high)


def _counted(count: float, unit: Unit) -> str:
    return f"{count:,.0f} {unit.name}" if count >= 1 else f"{count:g} {unit.name}"


def _dot(kind: str, x: float, y: float, radius: float, title: str = "") -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{inside}</circle>'


def opened(width: int, height: int, name: str) -> str:
    """The beginning of a picture."""
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg class="bar" {size} role="img" aria-label="{name}">'


def _label(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="muted" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def time_bar(parts: dict[str, float]) -> str:
    """Seconds by part, those of each in the legend."""
    whole = sum(parts.values())
    told = {part: f"{part} {size:.3g} s ({share_text(size / whole)})" for part, size in parts.items()}
    return "\n".join(
        [
            opened(WIDTH, 30, "time by part"),
            *_bar(parts, 0.0, 4, 22, (WIDTH - 90) / whole, {part: told[part] for part in parts}),
            _label(WIDTH - 84, 20, "start", f"{whole:.4g} s"),
            "</svg>",
            legend(told),
        ]
    )


def memory_bars(rows: Sequence[tuple[str, dict[str, float]]], room: float) -> str:
    """Bytes by category, a bar for each of `rows`; a line at the `room` of a device, if bars can be seen beside it."""
    left, plot = 64, WIDTH - 64 - 90
    largest = max(sum(parts.values()) for _, parts in rows)
    most = max(largest, room) if room < 8 * largest else largest
    pitch = 30 if len(rows) <= 16 else 20 if len(rows) <= 40 else 12
    height = len(rows) * pitch + 26
    named = -(-14 // pitch)
    pictures, used = [opened(WIDTH, height, "memory of each rank")], dict[str, str]()
    line = left + room / most * plot
    for number, (name, sizes) in enumerate(rows):
        y, whole = number * pitch + 4, sum(sizes.values())
        told = {part: f"{part}: {Unit.of(size).say(size)}" for part, size in sizes.items() if size > 0}
        used |= dict.fromkeys(told, "")
        pictures += _bar({part: sizes[part] for part in told}, left, y, pitch - min(9, pitch // 4), plot / most, told)
        if number % named == 0:
            pictures.append(f'<text x="4" y="{y + pitch / 2 + 1:.0f}">{escape(name)}</text>')
            x = left + whole / most * plot + 6
            x = line + 6 if line - 76 < x < line + 6 else x  # beside the line, not across it
            pictures.append(_label(x, y + pitch / 2 + 1, "start", Unit.of(whole).say(whole)))
    says = f"{Unit.of(room).say(room)} of a device"
    if most < room:
        pictures.append(_label(left, height - 6, "start", f"of {says}, {share_text(largest / room)}"))
    else:
        pictures.append(f'<line class="room" x1="{line:.1f}" x2="{line:.1f}" y1="0" y2="{height - 20}"/>')
        pictures.append(f'<text x="{line:.1f}" y="{height - 6}" text-anchor="middle">{says}</text>')
    return "\n".join([*pictures, "</svg>", legend({part: part for part in used})])


def _bar(
    parts: dict[str, float], x: float, y: float, height: float, scale: float, told: dict[str, str]
) -> Iterator[str]:
    for part, size in parts.items():
        wide = size * scale
        yield (
            f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.5):.1f}" height="{height}" style="fill:{COLOURS[part]}">'
            f"<title>{told[part]}</title></rect>"
        )
        x += wide


def legend(told: dict[str, str]) -> str:
    """The colour of each part beside what is said of it."""
    return '<p class="legend">' + " ".join(
        f'<span><i class="swatch" style="background:{COLOURS[part]}"></i>{words}</span>' for part, words in told.items()
    ) + "</p>"  # fmt: skip
