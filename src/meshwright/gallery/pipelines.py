"""Worked examples of pipeline schedules: bubbles and memory of GPipe, 1F1B and interleaved 1F1B, simulated."""

from __future__ import annotations

from functools import partial

from meshwright.draw.gantt_text import draw_text
from meshwright.gallery.charts import draw_schedules
from meshwright.gallery.explanation import Work
from meshwright.schedules.report import ScheduleReport, schedule

RANKS, MICRO_BATCHES = 4, 8


def show_gpipe(work: Work) -> None:
    """Append to `work` the worked example: simulation of GPipe and its bubble."""
    work.text(
        f"p = {RANKS} ranks, m = {MICRO_BATCHES} micro-batches, forward F = 1, backward B = 2 (in a rank's share)."
    )
    _show(work, "gpipe", "schedules-gpipe")
    _sweep(work, "gpipe")


def show_1f1b(work: Work) -> None:
    """Append to `work` the worked example: simulation of 1F1B, its peak activation memory beside GPipe's."""
    work.text(
        f"p = {RANKS}, m = {MICRO_BATCHES}, F = 1, B = 2. Rank r runs p − r forwards, then one backward and one "
        "forward in turn, then the backwards that are left."
    )
    report = _show(work, "1f1b", "schedules-1f1b")
    gpipe = schedule("gpipe", RANKS, MICRO_BATCHES)
    peaks = [(f"rank {rank}", float(a), float(b)) for rank, (a, b) in
             enumerate(zip(gpipe.timing.peak_activations, report.timing.peak_activations, strict=True))]  # fmt: skip
    work.table("Micro-batches in memory at the peak:", ("", "gpipe", "1f1b"), peaks)
    _sweep(work, "1f1b")
    work.result("peak of rank 0", report.timing.peak_activations[0])
    work.result("peak of gpipe", gpipe.timing.peak_activations[0])


def show_interleaved(work: Work) -> None:
    """Append to `work` the worked example: simulation of interleaved 1F1B with two and four model chunks a rank."""
    work.text(
        f"p = {RANKS}, m = {MICRO_BATCHES}, v = 2 chunks: rank r holds stages r and r + {RANKS}, a chunk takes 1/2. "
        f"In the chart capital letters are the chunk of stage r, small ones that of stage r + {RANKS}."
    )
    report = _show(work, "interleaved", "schedules-1f1b")
    rows = []
    for chunks in (1, 2, 4):
        one = schedule("interleaved" if chunks > 1 else "1f1b", RANKS, MICRO_BATCHES, chunks if chunks > 1 else None)
        closed = (RANKS - 1) / (chunks * MICRO_BATCHES)
        rows.append((f"{chunks}", f"{closed:.2%}", f"{one.timing.bubble_to_ideal:.2%}",
                     int(one.timing.messages_sent.max()), float(one.timing.peak_activations.max())))  # fmt: skip
        work.result(f"bubble to ideal, {chunks} chunks", one.timing.bubble_to_ideal)
        work.result(f"peak activations, {chunks} chunks", float(one.timing.peak_activations.max()))
    head = ("chunks v", "(p−1)/(v m)", "simulated", "messages of a rank, at most", "peak activations")
    work.table("More chunks: a smaller bubble, more messages, more memory than 1F1B, most at v = 2:", head, rows)
    work.text(
        "Megatron's closed form of that memory: 1 + (p − 1)/(p v) times the p micro-batches of 1F1B, "
        f"{RANKS * (1 + (RANKS - 1) / (RANKS * 2)):g} at v = 2."
    )
    work.result("peak of rank 0", report.timing.peak_activations[0])


def _show(work: Work, name: str, picture: str) -> ScheduleReport:
    """Append to `work` the Gantt chart of a pipeline schedule on 4 ranks with 8 micro-batches and its busy and idle
    time, and record its makespan and bubble as results; return the simulation's report.

    name: schedule, such as "gpipe". picture: name of its SVG file in docs/pictures, without ".svg".
    """
    report = schedule(name, RANKS, MICRO_BATCHES)
    names = ("1f1b", "interleaved") if picture == "schedules-1f1b" else (name,)
    drawing = draw_text(report.timeline(), 78)
    work.figure(picture, f"{name}: which micro-batch each rank computes when", partial(draw_schedules, *names), drawing)
    timing = report.timing
    makespan, busy = float(timing.makespan), float(timing.busy.mean())
    work.text(
        f"Makespan {makespan:g}; a rank is busy for m (F + B) = {busy:g} and waits for {makespan - busy:g}. Of the "
        f"step {1 - busy / makespan:.2%}; of the ideal time {makespan / busy - 1:.2%}."
    )
    work.result("makespan", makespan)
    work.result("bubble of the step", timing.bubble_fraction)
    work.result("bubble to ideal", timing.bubble_to_ideal)
    return report


def _sweep(work: Work, name: str) -> None:
    """Append to `work` a table of a schedule's bubble for several numbers of ranks and micro-batches, by closed form
    and as simulated. name: schedule, such as "gpipe"."""
    rows = []
    for p, m in ((4, 4), (4, 8), (4, 32), (8, 8), (8, 32)):
        timing = schedule(name, p, m).timing
        rows.append((f"{p}", f"{m}", f"{(p - 1) / (m + p - 1):.2%}", f"{timing.bubble_fraction:.2%}",
                     f"{(p - 1) / m:.2%}", f"{timing.bubble_to_ideal:.2%}"))  # fmt: skip
    head = ("p", "m", "(p−1)/(m+p−1)", "simulated", "(p−1)/m", "simulated")
    work.table("Both ratios, by formula and simulated:", head, rows)
