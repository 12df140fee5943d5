"""Micro-batches in flight in closed form match the pipeline programs, and the screened memory is near the ledger."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import ASYNCHRONOUS_SCHEDULES, BIDIRECTIONAL_SCHEDULES
from meshwright.names import SCHEDULES as EVERY_SCHEDULE
from meshwright.planner.cost.bubbles import SPLIT_SCHEDULES, in_flight
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.memory.rank_memory import memory_of
from meshwright.planner.problem import Problem
from meshwright.planner.search.screen import screen
from meshwright.planner.search.space import layout_of
from meshwright.program.pipeline import Kind, PipelineProgram
from meshwright.spec.presets import preset
from meshwright.spec.stage_times import program_for

MODEL = dataclasses.replace(preset("llama-tiny"), layers=64)
SCHEDULES = {
    "1f1b": (1,), "gpipe": (1,), "interleaved": (2, 3, 4), "interleaved-zb": (2,), "zb-h1": (1,), "zb-h2": (1,),
    "zb-v": (2,), "v-half": (2,), "v-min": (2,), "dualpipe": (1,), "dualpipe-v": (2,), "chimera": (1,), "gems": (1,),
}  # fmt: skip
QUEUE_SHARES = 0.35, 0.7, 4.0
"""What weight gradients need, over what a micro-batch keeps: of which nothing is computed again, and everything."""


def held(program: PipelineProgram, rank: int) -> Iterator[tuple[float, float]]:
    """Of a rank after each of its steps: micro-batches that wait, and those whose weight gradients are left, as shares
    of all that the rank has of a micro-batch."""
    waiting = queued = 0
    steps, share = program.steps, 1 / len(program.stages_by_rank[rank])
    for at in steps.of_rank(rank):
        kind = int(steps.kind[at])
        waiting += (kind == Kind.FORWARD) - (kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT))
        queued += (kind == Kind.INPUT_GRADIENT) - (kind == Kind.WEIGHT_GRADIENT)
        yield waiting * share, queued * share


@pytest.mark.parametrize(
    ("pipelines", "micro_batches"),
    [
        pytest.param((2, 4, 6), (1, 2, 3, 4, 6, 8, 16), id="some"),
        pytest.param(
            (2, 3, 4, 5, 6, 8, 10, 12, 16), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64), id="all",
            marks=[pytest.mark.exhaustive, pytest.mark.timeout(1200)],
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight_match_program(
    schedule: str, pipelines: tuple[int, ...], micro_batches: tuple[int, ...]
) -> None:
    looked_at = 0
    for ranks in pipelines:
        for chunks in SCHEDULES[schedule]:
            for micro in micro_batches:
                name = schedule if chunks == 1 else f"{schedule}:{chunks}"
                try:
                    program = program_for(Layout.parse(f"pp{ranks}:{name} mb{micro}"), MODEL, 64)
                except UserError:  # the schedule needs more micro-batches, or an even number
                    continue
                points = {point for rank in range(ranks) for point in held(program, rank)}
                replicas = 2 if schedule in BIDIRECTIONAL_SCHEDULES else 1
                waiting, queued = (each / replicas for each in in_flight(schedule, ranks, chunks, micro))
                for share in QUEUE_SHARES:
                    real = max(waits + share * left for waits, left in points)
                    ratio = float((waiting + share * queued).max()) / real
                    most = 1.3 if schedule == "dualpipe" else 1.15
                    # V-Half and V-Min have nearly all micro-batches in flight: their queues are estimated too short.
                    least = 0.75 if schedule in ("v-half", "v-min") and micro in (5, 7) else 0.9
                    assert least <= ratio <= most, (schedule, chunks, ranks, micro, share, ratio)
                    looked_at += 1
    assert looked_at >= 9


@pytest.mark.parametrize(
    ("model", "sequence", "pipelines", "micro_batches"),
    [
        pytest.param("llama-3-8b", 4096, (4,), (2, 16), id="some"),
        pytest.param("llama-3-8b", 4096, (2, 4, 8), (2, 3, 4, 8, 16, 32), id="llama", marks=pytest.mark.exhaustive),
        pytest.param("gpt2-xl", 1024, (4, 6), (1, 4, 6, 12, 24), id="gpt2", marks=pytest.mark.exhaustive),
    ],
)
def test_screened_pipeline_memory_is_near_ledger(
    model: str, sequence: int, pipelines: tuple[int, ...], micro_batches: tuple[int, ...]
) -> None:
    """For the rank with the highest peak, with every kind of activation checkpointing."""
    looked_at = 0
    for ranks in pipelines:
        for micro in micro_batches:
            problem = Problem(preset(model), cluster(f"{ranks}xh100-sxm"), sequence, micro)
            every = screen(problem)
            for at, size in enumerate(every.bytes):
                way, pipe = every.candidates[every.candidate[at]], every.pipelines[every.pipe[at]]
                plain = way.layout.tp == way.layout.cp == way.rows == 1 and not every.zero[at]
                if not plain or pipe.ranks != ranks or pipe.chunks > 2:
                    continue
                layout = layout_of(problem, way, pipe, 0, 0)
                real = max(memory_of(problem, layout, rank).peak_bytes for rank in range(ranks))
                assert 0.9 <= float(size) / real <= 1.15, (str(layout), float(size) / real)
                looked_at += 1
    assert looked_at >= 30


def test_split_backward_schedules_match_programs() -> None:
    for name in EVERY_SCHEDULE:
        if name not in ASYNCHRONOUS_SCHEDULES:
            program = program_for(Layout.parse(f"pp4:{name} mb8"), dataclasses.replace(MODEL, layers=8), 64)
            split = bool((program.steps.kind == Kind.INPUT_GRADIENT).any())
            assert split == (name in SPLIT_SCHEDULES), name
