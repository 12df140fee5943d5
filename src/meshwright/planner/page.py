"""The page of a plan: the best layouts, memory against time, time by part, the memory bill of each stage, the pipeline.
One file, nothing to download, readable by day and by night."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.estimate import Estimate
from meshwright.planner.memory import RankMemory, by_layers, memory_of, unlike_ranks
from meshwright.planner.nearest import Nearest
from meshwright.planner.pictures import STYLE, cloud, memory_bars, time_bar
from meshwright.planner.reference_step import in_place
from meshwright.planner.search import Found
from meshwright.planner.space import Problem
from meshwright.planner.step_time import PARTS, durations_of
from meshwright.planner.text import (
    LEAST_PART,
    Unit,
    around,
    headline,
    nearest_line,
    shape_text,
    there,
    undecided_text,
)
from meshwright.program.gantt import PAGE_STYLE, draw_overview, draw_svg
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.program.timeline import pipeline_timeline
from meshwright.spec.refuse import refuse

PAGE = """
h2 { font-size: 17px; margin: 28px 0 6px } .muted { color: #666 } td.words, th.words { text-align: left }
th, td.name { white-space: nowrap } td { vertical-align: top } td.words { min-width: 6em }
svg { max-width: 100%; height: auto } .wide svg { max-width: none }
@media (prefers-color-scheme: dark) { .muted { color: #9aa3ad } }
"""
MOST_RANKS = 64
"""Ranks of a pipeline whose memory is drawn: of more, those that differ."""
MOST_STEPS = 1500
"""Steps of a pipeline that are drawn one by one; more of them are drawn as a whole first."""
MOST_DRAWN = 60_000


def page(
    problem: Problem, model: str, best: Sequence[Estimate], found: Found | None = None, least: Nearest | None = None
) -> str:
    """The whole page. least: where nothing fits."""
    name, _, rest = headline(problem, model).partition(": ")
    parts = [f"<h1>{escape(name)}</h1>", f'<p class="muted">{escape(rest)}</p>']
    if found is not None:
        parts += _search(found, least)
    for one in [*best, *([least.least] if least else [])][:1]:
        parts += _layout(one)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>plan of {escape(model)}</title>'
        f'<meta name="color-scheme" content="light dark"><style>{PAGE_STYLE}{STYLE}{PAGE}</style></head><body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _search(found: Found, least: Nearest | None) -> Iterator[str]:
    if found.best:
        yield f"<h2>The best of {found.searched:,} layouts</h2>"
        yield _best(found)
    else:
        yield f"<h2>None of {found.searched:,} layouts fits</h2>"
        if least is not None:
            yield f"<p>The one that needs the least memory follows. {escape(nearest_line(least))}</p>"
    if found.undecided:
        yield f"<p>{undecided_text(found)}</p>"
    if found.advice and found.best:
        yield "<h2>Faster, but too large</h2>"
        larger = [
            (
                str(one.layout), around(found.problem, one.seconds), Unit.of(one.bytes).say(one.bytes),
                "no three changes" if one.change is None or one.instead_seconds is None
                else f"{one.change}: {around(found.problem, one.instead_seconds)}",
            )
            for one in found.advice
        ]  # fmt: skip
        yield _table(("layout", "a step", "memory", "would fit with"), larger)
    yield "<h2>Memory against time</h2>"
    yield cloud(found, found.best or ([least.least] if least else []))


def _best(found: Found) -> str:
    unit = Unit.of(max(one.memory.device_bytes for one in found.best))
    head = ("layout", "step s", "low", "high", "tokens/s/device", "MFU", f"memory {unit.name}")
    rows = [
        (
            str(one.layout), f"{one.time.seconds:.4g}", f"{one.time.low:.4g}", f"{one.time.high:.4g}",
            f"{one.tokens_per_second_per_device:,.0f}", f"{one.mfu:.1%}", unit.number(one.memory.device_bytes), why,
        )
        for one, why in zip(found.best, found.reasons, strict=True)
    ]  # fmt: skip
    return _table((*head, "compared with the first"), rows)


def _layout(one: Estimate) -> Iterator[str]:
    time, problem, room = one.time, one.problem, one.problem.cluster.device.memory_bytes
    yield f"<h2>{escape(str(one.layout))}</h2>"
    yield (
        f"<p>{time.seconds:.4g} s a step ({time.low:.4g} to {time.high:.4g}), "
        f"{one.tokens_per_second_per_device:,.0f} tokens/s a device, MFU {one.mfu:.1%}</p>"
    )
    for line in one.warnings:
        yield f"<p>warning: {escape(line)}</p>"
    yield "<h2>Time by part</h2>"
    yield time_bar({part: time.breakdown[part] for part in PARTS if time.breakdown[part] > LEAST_PART * time.seconds})
    yield "<h2>Memory of each stage</h2>"
    places = range(one.layout.pp) if one.layout.pp <= MOST_RANKS else unlike_ranks(problem, one.layout)
    ranks = [memory_of(problem, one.layout, rank) for rank in places]
    yield memory_bars(
        [(f"pp {rank.pp_rank}", {k: float(v) for k, v in rank.by_category().items()}) for rank in ranks], room
    )
    if one.layout.pp > len(ranks):
        yield (
            '<p class="muted">Of ranks of pp with the same layers the first and the last are shown: '
            "the others are between them.</p>"
        )
    yield _categories(ranks)
    if one.layout.pp > 1:
        yield "<h2>The pipeline</h2>"
        yield from _pipeline(one)
    yield from _bill(one.memory)


def _categories(ranks: Sequence[RankMemory]) -> str:
    """The figures of the bars; of many ranks those of the fullest and the emptiest."""
    shown = list(ranks)
    if len(shown) > 8:
        shown = sorted({id(rank): rank for rank in (ranks[0], min(ranks, key=_device), max(ranks, key=_device),
                                                    ranks[-1])}.values(), key=lambda rank: rank.pp_rank)  # fmt: skip
    unit = Unit.of(max(map(_device, shown)))
    named = [part for part in shown[0].by_category() if any(rank.by_category()[part] for rank in shown)]
    rows = [
        (
            f"pp {rank.pp_rank}", *(unit.number(rank.by_category()[part]) for part in named),
            unit.number(rank.device_bytes), rank.moment,
        )
        for rank in shown
    ]  # fmt: skip
    return _table((f"{unit.name} of rank", *named, "together", "fullest at"), rows)


def _device(rank: RankMemory) -> int:
    return rank.device_bytes


def _bill(memory: RankMemory) -> Iterator[str]:
    yield f"<h2>What fills rank {memory.pp_rank} of pp at {escape(memory.moment)}</h2>"
    unit, smallest = Unit.of(memory.peak_bytes), 1e-3 * memory.peak_bytes
    items = by_layers(memory.items)
    rows = [
        (
            item.name, item.category, shape_text(item.shape), item.dtype or "-", unit.number(item.bytes),
            "-" if item.stage is None else str(item.stage), there(item),
        )
        for item in items
        if abs(item.bytes) >= smallest
    ]  # fmt: skip
    rest = sum(item.bytes for item in items if abs(item.bytes) < smallest)
    rows.append((f"{len(items) - len(rows)} smaller ones", "", "", "", unit.number(rest), "", ""))
    yield _table(("tensor", "category", "shape", "type", unit.name, "stage", "there"), rows)


def _pipeline(one: Estimate) -> Iterator[str]:
    problem, layout = one.problem, one.layout
    short = _shortened(one)
    program, durations = durations_of(
        problem.config,
        short,
        problem.cluster,
        problem.sequence,
        problem.batch // layout.micro_batches * short.micro_batches,
        engine=problem.engine,
        documents=problem.documents,
        in_place=in_place(problem.cluster, problem.precision, problem.engine),
        pairs=problem.pairs,
    )
    many = f", with {short.micro_batches} of its {layout.micro_batches} micro-batches" if short != layout else ""
    timeline = pipeline_timeline(program, simulate_pipeline(program, durations))
    yield f'<p class="muted">Seconds from the first forward on{many}.</p>'
    yield draw_overview(timeline)
    if len(timeline.spans) <= MOST_STEPS:
        drawn = draw_svg(timeline, title=False)
        yield f'<details><summary>Step by step</summary><div class="wide">{drawn}</div></details>'


def _shortened(one: Estimate) -> Layout:
    """The layout with as few micro-batches as a picture can show, where it has more."""
    layout, problem = one.layout, one.problem
    each = 3 * layout.pp * layout.chunks
    for rounds in (8, 4, 2, 1):
        short = layout.with_(micro_batches=min(layout.micro_batches, rounds * layout.pp))
        if each * short.micro_batches > MOST_DRAWN and rounds > 1:
            continue
        try:
            batch = problem.batch // layout.micro_batches * short.micro_batches
            refuse(short, problem.config, batch, problem.sequence, planning=True)
        except UserError:
            break
        return short
    return layout.with_(micro_batches=min(layout.micro_batches, 2 * layout.pp))  # what every schedule takes


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    words = [any(c.isalpha() for row in rows for c in row[at]) for at in range(len(head))]
    kinds = [' class="words"' if word else "" for word in words]
    kinds[0] = ' class="words name"'
    body = ""
    for row in rows:
        cells = (f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        body += f"<tr>{''.join(cells)}</tr>\n"
    return (
        '<div class="wide"><table><tr>'
        + "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(head, kinds, strict=True))
        + f"</tr>\n{body}</table></div>"
    )
