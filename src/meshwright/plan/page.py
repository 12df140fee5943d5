"""The page of a plan: the best layouts, memory against time, the memory bill of each stage, time by part, the pipeline.
One file, nothing to download, readable by day and by night."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from meshwright.plan.estimate import Estimate
from meshwright.plan.memory import GIB, RankMemory, by_layers, memory_of, unlike_ranks
from meshwright.plan.reference_step import in_place
from meshwright.plan.search import Found, on_device
from meshwright.plan.space import Problem
from meshwright.plan.step_time import PARTS, durations_of
from meshwright.plan.text import headline, undecided_text
from meshwright.program.gantt import PAGE_STYLE, draw_svg
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.program.timeline import pipeline_timeline

COLOURS = {
    "parameters": "hsl(214 60% 50%)", "gradients": "hsl(24 74% 52%)", "optimizer": "hsl(265 42% 58%)",
    "activations": "hsl(150 45% 42%)", "communication": "hsl(190 55% 45%)", "logits": "hsl(45 80% 50%)",
    "workspace": "hsl(330 45% 55%)", "framework": "hsl(215 12% 55%)", "unexplained": "hsl(0 0% 72%)",
    "compute": "hsl(150 45% 42%)", "tensor": "hsl(214 60% 50%)", "context": "hsl(190 55% 45%)",
    "expert": "hsl(265 42% 58%)", "data": "hsl(24 74% 52%)", "pipeline": "hsl(330 45% 55%)", "bubble": "hsl(0 0% 72%)",
}  # fmt: skip
STYLE = """
.bar text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #222 } .bar .muted { fill: #666 }
.bar .line { stroke: #9aa3ad } .bar .room { stroke: #c0392b; stroke-dasharray: 5 4; stroke-width: 1.5 }
.bar .dot { fill: #7d8894; fill-opacity: .35 } .bar .best { fill: hsl(24 74% 46%) }
h2 { font-size: 17px; margin: 28px 0 6px } .muted { color: #666 } td.words, th.words { text-align: left }
.swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin: 0 5px 0 14px }
@media (prefers-color-scheme: dark) {
  .bar text { fill: #e4e7ea } .bar .muted, .muted { fill: #9aa3ad; color: #9aa3ad }
}
"""
MOST_DOTS = 2500
MOST_STEPS = 6000
"""Steps of a pipeline that a picture shows: of longer ones its first micro-batches."""


def page(problem: Problem, model: str, best: Sequence[Estimate], found: Found | None = None) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(model)}</h1>", f'<p class="muted">{escape(headline(problem, model))}</p>']
    if found is not None:
        parts += _search(found)
    for one in best[:1]:
        parts += _layout(one)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>plan of {escape(model)}</title>'
        f'<meta name="color-scheme" content="light dark"><style>{PAGE_STYLE}{STYLE}</style></head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _search(found: Found) -> Iterator[str]:
    yield f"<h2>The best of {found.searched:,} layouts</h2>"
    head = ("layout", "step s", "low", "high", "tokens/s/device", "MFU", "memory GiB", "compared with the first")
    rows = [
        (
            str(one.layout), f"{one.time.seconds:.4g}", f"{one.time.low:.4g}", f"{one.time.high:.4g}",
            f"{one.tokens_per_second_per_device:,.0f}", f"{one.mfu:.1%}", f"{one.memory.device_bytes / GIB:.1f}", why,
        )
        for one, why in zip(found.best, found.reasons, strict=True)
    ]  # fmt: skip
    yield _table(head, rows)
    if found.undecided:
        yield f"<p>{undecided_text(found)}</p>"
    if found.advice:
        yield "<h2>Faster, but too large</h2>"
        larger = [
            (
                str(one.layout), f"{one.seconds:.4g}", f"{one.bytes / GIB:.1f}",
                "no single change" if one.change is None else f"{one.change}: {one.instead_seconds:.4g} s",
            )
            for one in found.advice
        ]  # fmt: skip
        yield _table(("layout", "step s", "memory GiB", "would fit with"), larger)
    yield "<h2>Memory against time</h2>"
    yield _cloud(found)


def _cloud(found: Found) -> str:
    """A dot for each of a sample of all layouts that are neither very slow nor very large; the best are marked."""
    every = found.priced
    assert every is not None
    room = found.problem.cluster.device.memory_bytes
    size = on_device(found.problem, every.bytes)
    fastest = every.seconds.min()
    near = np.flatnonzero((every.seconds < 6 * fastest) & (size < 6 * room))
    step = max(1, len(near) // MOST_DOTS)
    chosen = near[::step]
    width, height, left, bottom = 900, 380, 64, 44
    low, high = fastest * 0.95, max(float(every.seconds[chosen].max()), fastest * 1.5)
    most = max(float(size[chosen].max()), room * 1.2) / GIB

    def x(seconds: float) -> float:
        return left + math.log(seconds / low) / math.log(high / low) * (width - left - 12)

    def y(gib: float) -> float:
        return height - bottom - gib / most * (height - bottom - 12)

    parts = [_open(width, height, "memory against time")]
    for at in chosen:
        place = f'cx="{x(every.seconds[at]):.1f}" cy="{y(size[at] / GIB):.1f}"'
        parts.append(f'<circle class="dot" {place} r="2"/>')
    for one in found.best:
        gib = one.memory.device_bytes / GIB
        title = f"{escape(str(one.layout))}: {one.time.seconds:.4g} s, {gib:.1f} GiB"
        place = f'cx="{x(one.time.seconds):.1f}" cy="{y(gib):.1f}"'
        parts.append(f'<circle class="best" {place} r="4.5"><title>{title}</title></circle>')
    line = y(room / GIB)
    parts.append(f'<line class="room" x1="{left}" x2="{width - 12}" y1="{line:.1f}" y2="{line:.1f}"/>')
    parts.append(f'<text x="{width - 14}" y="{line - 5:.1f}" text-anchor="end">{room / GIB:.0f} GiB of a device</text>')
    base = height - bottom
    parts.append(f'<line class="line" x1="{left}" x2="{width - 12}" y1="{base}" y2="{base}"/>')
    for at in range(6):
        seconds = low * (high / low) ** (at / 5)
        parts.append(_label(x(seconds), base + 17, "middle", f"{seconds:.3g} s"))
        gib = most * at / 5
        parts.append(_label(left - 8, y(gib) + 4, "end", f"{gib:.0f} GiB"))
    what = "seconds a step; a sample of all layouts, the best in colour"
    parts.append(_label((left + width) / 2, height - 8, "middle", what))
    return "\n".join([*parts, "</svg>"])


def _layout(one: Estimate) -> Iterator[str]:
    time = one.time
    yield f"<h2>{escape(str(one.layout))}</h2>"
    yield (
        f"<p>{time.seconds:.4g} s a step ({time.low:.4g} to {time.high:.4g}), "
        f"{one.tokens_per_second_per_device:,.0f} tokens/s a device, MFU {one.mfu:.1%}</p>"
    )
    for line in one.warnings:
        yield f"<p>warning: {escape(line)}</p>"
    yield "<h2>Time by part</h2>"
    yield _bars([("a step", {part: time.breakdown[part] for part in PARTS})], "s", 1.0, None)
    yield "<h2>Memory of each stage</h2>"
    ranks = [memory_of(one.problem, one.layout, rank) for rank in unlike_ranks(one.problem, one.layout)]
    named = [(f"pp {rank.pp_rank}", {k: float(v) for k, v in rank.by_category().items()}) for rank in ranks]
    yield _bars(named, "GiB", GIB, one.problem.cluster.device.memory_bytes / GIB)
    if one.layout.pp > len(ranks):
        yield '<p class="muted">Ranks of pp that are not shown hold what one of these holds, at other moments.</p>'
    if one.layout.pp > 1:
        yield "<h2>The pipeline</h2>"
        yield from _pipeline(one)
    yield from _bill(one.memory)


def _open(width: int, height: int, name: str) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return f'<svg class="bar" {size} role="img" aria-label="{name}">'


def _label(x: float, y: float, anchor: str, words: str) -> str:
    return f'<text class="muted" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'


def _bars(rows: Sequence[tuple[str, dict[str, float]]], unit: str, scale: float, room: float | None) -> str:
    """Stacked bars, with a legend; `room`: a line to stay below."""
    width, left, pitch = 900, 64, 30
    most = max([sum(parts.values()) / scale for _, parts in rows] + ([room] if room else [])) or 1.0
    plot = width - left - 100
    height = len(rows) * pitch + 26
    parts = [_open(width, height, "bars")]
    used: list[str] = []
    for number, (name, sizes) in enumerate(rows):
        y, x = number * pitch + 4, float(left)
        parts.append(f'<text x="4" y="{y + 15}">{escape(name)}</text>')
        for part, size in sizes.items():
            if size <= 0:
                continue
            used += [part] if part not in used else []
            wide = size / scale / most * plot
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.5):.1f}" height="21" style="fill:{COLOURS[part]}">'
                f"<title>{part}: {size / scale:.4g} {unit}</title></rect>"
            )
            x += wide
        parts.append(_label(x + 6, y + 15, "start", f"{sum(sizes.values()) / scale:.4g} {unit}"))
    if room:
        at = left + room / most * plot
        parts.append(f'<line class="room" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - 20}"/>')
        parts.append(f'<text x="{at:.1f}" y="{height - 6}" text-anchor="middle">{room:.1f} {unit}</text>')
    legend = "".join(f'<span class="swatch" style="background:{COLOURS[part]}"></span>{part}' for part in used)
    return "\n".join([*parts, "</svg>", f"<p>{legend}</p>"])


def _bill(memory: RankMemory) -> Iterator[str]:
    yield f"<h2>What fills rank {memory.pp_rank} of pp at {escape(memory.moment)}</h2>"
    smallest = 1e-3 * memory.peak_bytes
    items = [item for item in by_layers(memory.items) if item.bytes >= smallest]
    rows = [
        (
            item.name, item.category, " x ".join(map(str, item.shape)), item.dtype, f"{item.bytes / GIB:.3f}",
            f"{item.first} to {item.last}",
        )
        for item in items
    ]  # fmt: skip
    rest = memory.peak_bytes - sum(item.bytes for item in items)
    rows.append(("smaller ones together", "", "", "", f"{rest / GIB:.3f}", ""))
    yield _table(("tensor", "category", "shape", "type", "GiB", "there"), rows)


def _pipeline(one: Estimate) -> Iterator[str]:
    problem, layout = one.problem, one.layout
    shown = max(1, min(layout.micro_batches, MOST_STEPS // max(1, 3 * layout.pp * layout.chunks)))
    short = layout
    if shown < layout.micro_batches:
        multiple = 2 * layout.pp  # what every schedule takes
        short = layout.with_(micro_batches=min(layout.micro_batches, max(multiple, shown // multiple * multiple)))
    batch = problem.batch // layout.micro_batches * short.micro_batches
    program, durations = durations_of(
        problem.config,
        short,
        problem.cluster,
        problem.sequence,
        batch,
        engine=problem.engine,
        documents=problem.documents,
        in_place=in_place(problem.cluster, problem.precision, problem.engine),
        pairs=problem.pairs,
    )
    if short != layout:
        yield f'<p class="muted">with {short.micro_batches} of its {layout.micro_batches} micro-batches</p>'
    timing = simulate_pipeline(program, durations)
    yield f'<div class="wide">{draw_svg(pipeline_timeline(program, timing), title=False)}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    words = [any(c.isalpha() for row in rows for c in row[at]) for at in range(len(head))]
    kinds = [' class="words"' if word else "" for word in words]
    body = ""
    for row in rows:
        cells = (f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        body += f"<tr>{''.join(cells)}</tr>\n"
    return (
        "<table><tr>"
        + "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(head, kinds, strict=True))
        + f"</tr>\n{body}</table>"
    )
