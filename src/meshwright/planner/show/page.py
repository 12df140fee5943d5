"""HTML page of a plan: best layouts, memory against time, time by part, memory of each rank, the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter

import numpy as np

from meshwright.collectives.quantities import ByteUnit, format_size
from meshwright.draw import page as draw
from meshwright.draw.axis import make_log_axis
from meshwright.draw.bars import draw_page_bars
from meshwright.draw.gantt import draw_overview, draw_svg
from meshwright.draw.markup import Content, Markup, element, join
from meshwright.draw.page import legend, paragraph, table
from meshwright.draw.scatter import draw_scatter
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.api import Plan
from meshwright.planner.memory.ledger import Ledger
from meshwright.planner.memory.rank_memory import distinct_ranks, memory_of, merge_layers
from meshwright.planner.search.estimate import Estimate, predict_step
from meshwright.planner.search.nearest import Nearest
from meshwright.planner.search.search import SearchResult
from meshwright.planner.search.shortlist import add_device_overhead
from meshwright.planner.show import text
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.program.timeline import build_pipeline_timeline
from meshwright.spec.refuse import refuse
from meshwright.spec.stage_times import program_for

MOST_RANKS = 64
"""Maximum number of pipeline ranks whose memory is drawn; of more, only ranks with different stages are."""
MOST_STEPS = 1500
"""Maximum number of pipeline steps that are drawn one by one."""
MOST_DRAWN = 60_000


def plan_page(plan: Plan, model: str) -> str:
    """Return the HTML page of a plan. model: name of the model, for the title."""
    name, _, rest = text.headline(plan.problem, model).partition(": ")
    parts: list[Content] = [element("h1", name), paragraph(rest, muted=True)]
    if plan.search is not None:
        parts += _search(plan.search, plan.nearest)
    for one in [*plan.estimates, *([plan.nearest.least] if plan.nearest else [])][:1]:
        parts += _layout(one)
    notation = text.notation_legend(one.layout for one in plan.estimates)
    parts += [element("h2", "Layout notation"), table((), notation)] if notation else []
    return draw.page(f"plan of {model}", *parts)


def _search(result: SearchResult, least: Nearest | None) -> Iterator[Markup]:
    """Yield the page's sections on a search: a table of the best layouts, a list of faster layouts that do not fit, and
    a scatter plot of memory against time. least: layouts that come closest to fitting; None if some layout fits."""
    if result.best:
        unit = ByteUnit.find(max(one.memory.device_bytes for one in result.best))
        head = ("layout", "step s", "low", "high", "tokens/s/device", "MFU", f"memory {unit.name}")
        yield element("h2", f"The best of {result.searched:,} layouts")
        yield table((*head, "compared with the first"), text.best_cells(result, unit))
        yield paragraph(text.selection_note(result.best), muted=True)
        yield paragraph("Low and high: bounds within which measured step times are expected.", muted=True)
    else:
        yield element("h2", f"None of {result.searched:,} layouts fits in memory")
        if least is not None:
            yield paragraph(f"The layout that needs the least memory follows. {text.nearest_line(least)}")
    if result.undecided:
        yield paragraph(text.undecided_text(result))
    if result.advice and result.best:
        yield element("h2", "Faster layouts that do not fit")
        larger = [
            (
                str(one.layout), text.seconds_text(result.problem, one.layout, one.seconds),
                format_size(one.bytes), text.change_text(result.problem, one) or text.NO_CHANGE,
            )
            for one in result.advice
        ]  # fmt: skip
        yield table(("layout", "step", "memory", "fits with"), larger)
    yield element("h2", "Memory against time")
    yield memory_time_scatter(result, result.best or ([least.least] if least else []))
    yield paragraph(f"Grey: a sample of all layouts. Orange: the {'best' if result.best else 'smallest'}.", muted=True)


def _layout(estimate: Estimate) -> Iterator[Markup]:
    """Yield the page's sections on one layout: time by part, memory of each rank, largest tensors, pipeline."""
    time, problem, room = estimate.time, estimate.problem, estimate.problem.usable_bytes
    yield element("h2", str(estimate.layout))
    yield paragraph(text.step_text(estimate))
    yield paragraph(f"Memory of a device: {text.memory_text(estimate)}")
    for line in estimate.warnings:
        yield paragraph(f"warning: {line}")
    if estimate.fits and not problem.only_planned:
        yield paragraph("Set these keys in your recipe:", muted=True)
        yield element("pre", text.recipe_block(estimate))
    yield element("h2", "Time by component")
    yield time_bar(text.list_parts(time))
    if estimate.layout.world_size > 1:
        yield paragraph(
            f"Communication: {text.communication_text(estimate)}. Exposed: devices wait for it (tensor, context, "
            "expert, data, pipeline above); the rest overlaps with computation.",
            muted=True,
        )
    yield element("h2", "Memory of each pipeline rank")
    count = estimate.layout.pp
    places = range(count) if count <= MOST_RANKS else sorted(distinct_ranks(problem, estimate.layout))
    ranks = [memory_of(problem, estimate.layout, rank) for rank in places]
    bars = [(f"pp {rank.pp_rank}", {k: float(v) for k, v in rank.by_category().items()}) for rank in ranks]
    yield memory_bars(bars, room)
    if count > len(ranks):
        shown = "the first, the last and the one with the most micro-batches in flight are shown"
        yield paragraph(f"Of pipeline ranks with equal stages, {shown}; the others need no more.", muted=True)
    yield from _categories(ranks)
    if count > 1:
        yield element("h2", "The pipeline")
        yield from _pipeline(estimate)
    yield from _bill(estimate.memory)


def _categories(ranks: Sequence[Ledger]) -> Iterator[Markup]:
    """Yield an HTML table of memory at the peak: one row per category, one column per pipeline rank. A paragraph after
    the table names the memory snapshot (point in time) at which each rank peaks. Of more than eight ranks only four are
    shown: the first, the last, and the ranks with the most and the least memory. ranks: memory of each pipeline rank.
    """
    shown = list(ranks)
    if len(shown) > 8:
        size = attrgetter("device_bytes")
        some = {rank.pp_rank: rank for rank in (ranks[0], min(ranks, key=size), max(ranks, key=size), ranks[-1])}
        shown = [some[number] for number in sorted(some)]
    unit = ByteUnit.find(max(rank.device_bytes for rank in shown))
    named = [part for part in shown[0].by_category() if any(rank.by_category()[part] for rank in shown)]
    rows = [(part, *(unit.number(rank.by_category()[part]) for rank in shown)) for part in named]
    rows.append(("total", *(unit.number(rank.device_bytes) for rank in shown)))
    yield table((f"{unit.name} of rank", *(f"pp {rank.pp_rank}" for rank in shown)), rows)
    yield paragraph("Peak at: " + "; ".join(f"pp {rank.pp_rank} {rank.peak_snapshot}" for rank in shown), muted=True)


def _bill(memory: Ledger) -> Iterator[Markup]:
    """Yield the page's section on the tensors of one pipeline rank at its memory peak: a heading and a table. memory:
    memory of the rank."""
    yield element("h2", f"Memory of pipeline rank {memory.pp_rank} at its peak ({memory.peak_snapshot})")
    unit, smallest = ByteUnit.find(memory.peak_bytes), 1e-3 * memory.peak_bytes
    items = merge_layers(memory.items)
    head, *rows = text.tensor_rows([item for item in items if abs(item.bytes) >= smallest], unit)
    rest = sum(item.bytes for item in items if abs(item.bytes) < smallest)
    rows.append((f"{len(items) - len(rows)} smaller tensors", "", "", "", unit.number(rest), "", ""))
    yield table(head, rows)


def _pipeline(estimate: Estimate) -> Iterator[Markup]:
    """Yield the drawing of an estimate's simulated pipeline schedule."""
    problem, layout = estimate.problem, estimate.layout
    short = _shortened(estimate)
    part = replace(problem, batch=problem.batch // layout.micro_batches * short.micro_batches)
    step, program = predict_step(part, short), program_for(short, problem.config, problem.sequence)
    durations = step.durations(step.pipeline(program), problem.cluster.time_factor)
    many = f", with {short.micro_batches} of its {layout.micro_batches} micro-batches" if short != layout else ""
    timeline = replace(build_pipeline_timeline(program, simulate_pipeline(program, durations)), time_title="seconds")
    yield paragraph(f"Seconds since the first forward{many}.", muted=True)
    yield draw_overview(timeline)
    if len(timeline.spans) <= MOST_STEPS:
        drawn = element("div", draw_svg(timeline, alone=False), class_="wide")
        yield element("details", element("summary", "Step by step"), drawn)


def _shortened(estimate: Estimate) -> Layout:
    """Return the layout of an estimate for the drawing of its pipeline schedule: the number of micro-batches is reduced
    to what a drawing can show."""
    layout, problem = estimate.layout, estimate.problem
    eight, four, two, one = (min(layout.micro_batches, rounds * layout.pp) for rounds in (8, 4, 2, 1))
    shown = next((few for few in (eight, four, two) if 3 * layout.pp * layout.chunks * few <= MOST_DRAWN), one)
    batch = problem.batch // layout.micro_batches * shown
    with suppress(UserError):
        short = layout.with_(micro_batches=shown)
        refuse(short, problem.config, batch, problem.sequence, planning=True)
        return short
    return layout.with_(micro_batches=two)  # what every schedule takes


# --- pictures

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
    shown = [(one.time.seconds, float(one.memory.device_bytes), one.layout) for one in marked]
    best = [(took, size, f"{layout}: {took:.4g} s, {format_size(size)}") for took, size, layout in shown]
    seconds, sizes = ([*(point[at] for point in points), *(one[at] for one in best)] for at in (0, 1))
    unit = ByteUnit.find(max(min(*sizes, room), room / 100))
    across = make_log_axis(seconds, "time of a step", lambda at: f"{at:.4g} s")
    up = make_log_axis(
        [*sizes, room], "memory of a device against time of a step",
        lambda at: f"{at:,.0f} {unit.name}" if at >= 1 else f"{at:g} {unit.name}", unit.bytes,
    )  # fmt: skip
    return draw_scatter(across, up, points, best, _device_limit(room))


def time_bar(parts: dict[str, float]) -> Markup:
    """Return one stacked bar of a step's time with a legend. parts: seconds by part, such as "compute"."""
    whole = sum(parts.values())
    words = [f"{part} {size:.3g} s ({text.share_text(size / whole)})" for part, size in parts.items()]
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
