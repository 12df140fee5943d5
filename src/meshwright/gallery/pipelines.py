"""Worked examples of pipeline schedules: bubbles and memory of GPipe, 1F1B and interleaved 1F1B, simulated."""

from __future__ import annotations

from functools import partial

from meshwright.draw.gantt_text import draw_text
from meshwright.gallery.charts import draw_schedules
from meshwright.gallery.explanation import ExampleWriter
from meshwright.schedules.report import ScheduleReport, schedule

RANKS, MICRO_BATCHES = 4, 8


def explain_gpipe_bubble(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: simulation of the GPipe schedule and its bubble (idle
    time)."""
    writer.add_text(
        f"p = {RANKS} ranks, m = {MICRO_BATCHES} micro-batches, forward F = 1, backward B = 2 (in a rank's share)."
    )
    _show_schedule(writer, "gpipe", "schedules-gpipe")
    _show_bubble_table(writer, "gpipe")


def explain_1f1b_bubble(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: simulation of the 1F1B schedule, its peak activation memory
    compared with GPipe's."""
    writer.add_text(
        f"p = {RANKS}, m = {MICRO_BATCHES}, F = 1, B = 2. Rank r runs p − r forwards, then one backward and one "
        "forward in turn, then the backwards that are left."
    )
    report = _show_schedule(writer, "1f1b", "schedules-1f1b")
    gpipe = schedule("gpipe", RANKS, MICRO_BATCHES)
    peaks = [(f"rank {rank}", float(a), float(b)) for rank, (a, b) in
             enumerate(zip(gpipe.timing.peak_activations, report.timing.peak_activations, strict=True))]  # fmt: skip
    writer.add_table("Micro-batches in memory at the peak:", ("", "gpipe", "1f1b"), peaks)
    _show_bubble_table(writer, "1f1b")
    writer.record_result("peak of rank 0", report.timing.peak_activations[0])
    writer.record_result("peak of gpipe", gpipe.timing.peak_activations[0])


def explain_interleaved_bubble(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: simulation of interleaved 1F1B with two and four model chunks
    a rank."""
    writer.add_text(
        f"p = {RANKS}, m = {MICRO_BATCHES}, v = 2 chunks: rank r holds stages r and r + {RANKS}, a chunk takes 1/2. "
        f"In the chart capital letters are the chunk of stage r, small ones that of stage r + {RANKS}."
    )
    report = _show_schedule(writer, "interleaved", "schedules-1f1b")
    rows = []
    for chunks in (1, 2, 4):
        one = schedule("interleaved" if chunks > 1 else "1f1b", RANKS, MICRO_BATCHES, chunks if chunks > 1 else None)
        closed = (RANKS - 1) / (chunks * MICRO_BATCHES)
        rows.append((f"{chunks}", f"{closed:.2%}", f"{one.timing.bubble_to_ideal:.2%}",
                     int(one.timing.messages_sent.max()), float(one.timing.peak_activations.max())))  # fmt: skip
        writer.record_result(f"bubble to ideal, {chunks} chunks", one.timing.bubble_to_ideal)
        writer.record_result(f"peak activations, {chunks} chunks", float(one.timing.peak_activations.max()))
    head = ("chunks v", "(p−1)/(v m)", "simulated", "messages of a rank, at most", "peak activations")
    writer.add_table("More chunks: a smaller bubble, more messages, more memory than 1F1B, most at v = 2:", head, rows)
    writer.add_text(
        "Megatron's closed form of that memory: 1 + (p − 1)/(p v) times the p micro-batches of 1F1B, "
        f"{RANKS * (1 + (RANKS - 1) / (RANKS * 2)):g} at v = 2."
    )
    writer.record_result("peak of rank 0", report.timing.peak_activations[0])


def _show_schedule(writer: ExampleWriter, name: str, picture: str) -> ScheduleReport:
    """Simulate a pipeline schedule on 4 ranks with 8 micro-batches; append its Gantt chart and its busy and idle time
    to `writer`, and record makespan and bubble as results. Return the simulation's report.

    name: schedule, such as "gpipe". picture: name of its SVG file in docs/pictures, without ".svg".
    """
    report = schedule(name, RANKS, MICRO_BATCHES)
    names = ("1f1b", "interleaved") if picture == "schedules-1f1b" else (name,)
    writer.add_figure(
        picture,
        f"{' and '.join(names)}: which micro-batch each rank computes when",
        partial(draw_schedules, *names),
        partial(draw_text, report.timeline()),
    )
    timing = report.timing
    makespan, busy = float(timing.makespan), float(timing.busy.mean())
    writer.add_text(
        f"Makespan {makespan:g}; a rank is busy for m (F + B) = {busy:g} and waits for {makespan - busy:g}. Of the "
        f"step {1 - busy / makespan:.2%}; of the ideal time {makespan / busy - 1:.2%}."
    )
    writer.record_result("makespan", makespan)
    writer.record_result("bubble of the step", timing.bubble_fraction)
    writer.record_result("bubble to ideal", timing.bubble_to_ideal)
    return report


def _show_bubble_table(writer: ExampleWriter, name: str) -> None:
    """Append to `writer` a table of a schedule's bubble for several numbers of ranks and micro-batches, by closed form
    and as simulated. name: schedule, such as "gpipe"."""
    rows = []
    for p, m in ((4, 4), (4, 8), (4, 32), (8, 8), (8, 32)):
        timing = schedule(name, p, m).timing
        rows.append((f"{p}", f"{m}", f"{(p - 1) / (m + p - 1):.2%}", f"{timing.bubble_fraction:.2%}",
                     f"{(p - 1) / m:.2%}", f"{timing.bubble_to_ideal:.2%}"))  # fmt: skip
    head = ("p", "m", "(p−1)/(m+p−1)", "simulated", "(p−1)/m", "simulated")
    writer.add_table("Both ratios, by formula and simulated:", head, rows)
