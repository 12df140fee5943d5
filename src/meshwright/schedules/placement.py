"""Which layers a schedule puts on which rank, as a table to read."""

from __future__ import annotations

from itertools import pairwise

from meshwright.errors import UserError
from meshwright.program.pipeline import PipelineProgram


def stage_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage, in turn, at most one more on one stage than on another; the longer ones come first."""
    short, longer = divmod(layers, stages)
    starts = [stage * short + min(stage, longer) for stage in range(stages + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def placement_table(program: PipelineProgram, layers: int | None = None) -> str:
    """A line a rank and a column for each stage that it holds: stage and layers, with the embedding and the head.

    layers: of the model; None: one a stage. Raises UserError for fewer layers than stages.
    """
    layers = program.stages if layers is None else layers
    if layers < program.stages:
        raise UserError(f"{layers} layers on {program.stages} stages: take at least {program.stages} layers")
    held = stage_layers(layers, program.stages)
    columns = [(replica, chunk) for replica in range(program.replicas) for chunk in range(program.chunks)]
    words = {replica: f"replica {replica}" if program.replicas > 1 else "" for replica in range(program.replicas)}
    rows = [["rank"] + [f"{words[r]} chunk {c}".strip() if program.chunks > 1 else words[r] for r, c in columns]]
    for rank in range(program.ranks):
        stages = [[stage for stage, home in enumerate(homes) if home == rank] for homes in program.placement]
        rows.append([str(rank)] + [_cell(stages[replica][chunk], held) for replica, chunk in columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _cell(stage: int, held: list[range]) -> str:
    """`stage 0: embedding, layers 0-3`."""
    layers = held[stage]
    what = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
    first = "embedding, " if stage == 0 else ""
    last = ", head" if stage == len(held) - 1 else ""
    return f"stage {stage}: {first}{what}{last}"
