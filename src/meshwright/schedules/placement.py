"""Table of the stages and layers of each pipeline rank."""

from __future__ import annotations

from itertools import pairwise

from meshwright.errors import UserError
from meshwright.program.pipeline import PipelineProgram


def split_evenly(number: int, parts: int) -> list[range]:
    """Split the numbers 0 to number - 1 (of layers or micro-batches) into `parts` contiguous ranges whose sizes differ
    by at most one, larger ones first; return the ranges."""
    size, longer = divmod(number, parts)
    starts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def format_placement(program: PipelineProgram, layers: int | None = None) -> str:
    """Format the assignment of a pipeline schedule's stages to ranks as a text table: one line per rank, with one cell
    for each stage of the rank. A cell lists the stage's layers, embedding and head.

    layers: number of layers of the model, divided evenly among the stages (None: one layer per stage). Raises UserError
    for fewer layers than stages.
    """
    layers = program.stages if layers is None else layers
    if layers < program.stages:
        raise UserError(f"{layers} layers on {program.stages} stages: at least {program.stages} layers are needed")
    held = split_evenly(layers, program.stages)
    columns = [(replica, chunk) for replica in range(program.replicas) for chunk in range(program.chunks)]
    words = {replica: f"replica {replica}" if program.replicas > 1 else "" for replica in range(program.replicas)}
    rows = [["rank"] + [f"{words[r]} chunk {c}".strip() if program.chunks > 1 else words[r] for r, c in columns]]
    for rank in range(program.ranks):
        stages = [[stage for stage, home in enumerate(homes) if home == rank] for homes in program.placement]
        rows.append([str(rank)] + [_format_stage(stages[replica][chunk], held) for replica, chunk in columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _format_stage(stage: int, held: list[range]) -> str:
    """Return text on stage number `stage`, such as `stage 0: embedding, layers 0-3`. held: [stage], range of layers of
    every stage."""
    layers = held[stage]
    what = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
    first = "embedding, " if stage == 0 else ""
    last = ", head" if stage == len(held) - 1 else ""
    return f"stage {stage}: {first}{what}{last}"
