"""Pictures computed from programs and from the sizes of model states: ring all-reduce, ZeRO, pipeline schedules."""

from __future__ import annotations

from dataclasses import replace

from meshwright.collectives.library import generate
from meshwright.draw.bars import draw_stacked_bars
from meshwright.draw.gantt import draw_svg
from meshwright.draw.markup import Markup
from meshwright.draw.picture import Picture, css_var, stack_pictures
from meshwright.gallery.diagrams import draw_arrow
from meshwright.planner.memory.published import state_bytes
from meshwright.program.buffer_frames import LETTERS, Frame, build_frames
from meshwright.program.check_collective import check_collective
from meshwright.schedules.api import StepDurations, schedule
from meshwright.schedules.report import ScheduleReport

PAGE_WIDTH = 900  # pixels; no more than a page of the documentation has, so that labels are not shrunk
RANK_COLOURS = ("blue", "orange", "purple", "teal")
STATE_COLOURS = {"parameters": "blue", "gradients": "orange", "optimizer states": "purple"}


def compute_zero_bytes(parameters: float, ranks: int, level: int) -> dict[str, float]:
    """Return the bytes of model states on each rank under ZeRO `level` (0 to 3), in mixed precision with Adam (2 + 2 +
    12 bytes a parameter before sharding): {"parameters": bytes, "gradients": bytes, "optimizer states": bytes}.

    parameters: number of model parameters. ranks: number of data-parallel ranks.
    """
    each = state_bytes(level, ranks)
    parts = zip(STATE_COLOURS, (each.weights, each.gradients, each.optimizer), strict=True)
    return {part: parameters * size for part, size in parts}


def draw_zero_memory() -> Markup:
    """Return an SVG of Figure 1 of the ZeRO paper: bytes of model states (parameters, gradients, optimizer states) per
    rank, for 7.5 billion parameters on 64 ranks under ZeRO 0 to 3."""
    names = ("data parallel, zero0", "zero1", "zero2", "zero3")
    states = [compute_zero_bytes(7.5e9, 64, level) for level in range(len(names))]
    # The bars of sharded states are too narrow to be compared: the sizes of the parts stand before them.
    rows = [
        (f"{name}: {' + '.join(f'{size / 1e9:.3g}' for size in sizes.values())}", sizes)
        for name, sizes in zip(names, states, strict=True)
    ]
    bars = draw_stacked_bars(rows, STATE_COLOURS, lambda size: f"{size / 1e9:.1f} GB", "model states on a rank")
    legend = Picture()
    swatches = {"parameters": "2 bytes each", "gradients": "2 bytes each",
                "optimizer states": "12 bytes each: fp32 master weights, two moments"}  # fmt: skip
    entries = [
        (f"{part}, {said}", {"style": f"fill:{css_var(STATE_COLOURS[part])}"}) for part, said in swatches.items()
    ]
    legend.add_legend(entries, 4, 880, 12)
    heading = "Model states of 7.5 billion parameters on each of 64 ranks (ZeRO paper, Figure 1)"
    return stack_pictures(
        [(heading, legend.to_svg(900, 24, "legend")), (f"{' + '.join(STATE_COLOURS)} = sum on each rank, in GB", bars)],
        heading,
        gap=0,
        left=4,
    )


def draw_ring_all_reduce(ranks: int = 4) -> Markup:
    """Return an SVG of the ring all-reduce on `ranks` ranks, round by round: every rank's chunks, labelled with the
    ranks whose data they have summed so far, and arrows for the sends."""
    frames = build_frames(check_collective(generate("all-reduce", "ring", ranks)))
    picture = Picture()
    cell, gap, left, row, pitch = 44, 34, 128, 26, 66
    span = ranks * cell + gap
    picture.add_text(14, 22, f"Ring all-reduce on {ranks} ranks", class_="title")
    said = "ab is the sum of the contributions of ranks a and b; Σ, in green, of all ranks"
    picture.add_text(
        14, 42, f"Four chunks per rank; {said}. An arrow carries one chunk to the next rank.", class_="dim"
    )
    for rank in range(ranks):
        middle = left + rank * span + ranks * cell / 2
        picture.add_text(middle, 68, f"rank {rank} (its own values: {LETTERS[rank]})", "middle", class_="strong")
        for chunk in range(ranks):
            picture.add_text(left + rank * span + (chunk + 0.5) * cell, 86, f"{chunk}", "middle", class_="dim small")
    picture.add_text(14, 86, "chunk", class_="dim small")
    for number, frame in enumerate(frames):
        top = 94 + number * pitch
        half = "reduce-scatter" if number < ranks else "all-gather"
        picture.add_text(14, top + 11, frame.title.partition(" of")[0], class_="strong")
        picture.add_text(14, top + 26, half if number else "", class_="dim small")
        _draw_cells(picture, frame, left, top, (cell, span, row))
        for arrow in frame.arrows:
            begin = left + arrow.source * span + (arrow.slot + 0.5) * cell, top - pitch + row + 1
            end = left + arrow.target * span + (arrow.into + 0.5) * cell, top - 1
            draw_arrow(picture, begin, end, RANK_COLOURS[arrow.source % len(RANK_COLOURS)])
    bottom = 94 + len(frames) * pitch - 14
    rounds = 2 * (ranks - 1)
    words = (
        f"{rounds} = 2(n − 1) rounds; a rank sends {rounds}/{ranks} of the vector: {ranks - 1} chunks to reduce them, "
    )
    picture.add_text(14, bottom, words + f"{ranks - 1} to spread the sums.", class_="dim")
    picture.add_text(
        14, bottom + 17, "Thick frame: changed in this round. Arrow: in its sender's colour.", class_="dim"
    )
    return picture.to_svg(left + ranks * span - gap + 14, bottom + 31, f"ring all-reduce on {ranks} ranks", alone=True)


def _draw_cells(picture: Picture, frame: Frame, left: float, top: float, sizes: tuple[int, int, int]) -> None:
    """Draw the buffers of all ranks in one line, side by side. Each chunk is a cell, labelled with the ranks whose data
    it sums.

    picture: SVG to draw into. frame: buffers after one round. left, top: top left corner of the line in pixels. sizes:
    (width of a cell, distance from one rank's first cell to the next rank's, height of a cell), in pixels.
    """
    cell, span, height = sizes
    for rank, cells in enumerate(frame.cells):
        for chunk, one in enumerate(cells):
            x = left + rank * span + chunk * cell
            share = len(one.origins) / len(frame.cells)
            fill = (
                f"fill:{css_var('green' if share == 1 else 'blue')};fill-opacity:{0.5 if share == 1 else 0.5 * share:g}"
            )
            style = f"{fill};stroke:{css_var('ink' if one.fresh else 'line')};stroke-width:{2 if one.fresh else 1}"
            picture.add("rect", x=x + 1, y=top, width=cell - 2, height=height, rx=4, style=style)
            label = "Σ" if share == 1 else "".join(LETTERS[origin] for origin in one.origins)
            picture.add_text(
                x + cell / 2, top + height / 2 + 4, label, "middle", class_="strong" if one.fresh else None
            )


def draw_schedules(*names: str, ranks: int = 4, micro_batches: int = 8) -> Markup:
    """Return an SVG of pipeline schedules as Gantt charts, one below the other on one time scale. They are simulated
    with a backward that takes twice as long as a forward.

    names: schedules such as "1f1b". ranks: pipeline ranks. micro_batches: micro-batches per step.
    """
    durations: StepDurations = {"forward": 1, "input_gradient": 1, "weight_gradient": 1}
    reports = [schedule(name, ranks, micro_batches, **durations) for name in names]
    until = max(float(report.timing.makespan) for report in reports)
    timelines = [replace(report.timeline(), notes=()) for report in reports]
    charts = [draw_svg(one, PAGE_WIDTH, alone=False, until=until, widen=False) for one in timelines]
    return stack_pictures(
        list(zip(map(format_heading, reports), charts, strict=True)), f"pipeline schedules: {', '.join(names)}"
    )


def format_heading(report: ScheduleReport) -> str:
    """Return one line of text on the simulated schedule of `report`: name, numbers of ranks and micro-batches,
    makespan, bubble, peak activations.
    """
    program, timing = report.program, report.timing
    chunks = f", {program.chunks} chunks" if program.chunks > 1 else ""
    low, high = timing.peak_activations.min(), timing.peak_activations.max()
    peaks = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return (
        f"{program.name}: {program.ranks} ranks, {program.micro_batches} micro-batches{chunks}; "
        f"makespan {timing.makespan:g}, bubble {timing.bubble_fraction:.1%}, peak activations {peaks}"
    )
