"""Reader and writer of PyTorch's schedule CSV: one row a rank, one cell a step, as in `_load_csv` and `_dump_csv` of
`torch.distributed.pipelining` 2.13, in the forms `compute_only` and `compute_comms`.

A cell is stage, kind and micro-batch: `2F0`, `3SEND_B1`; an overlapped forward and backward is `(0F4;7B1)OVERLAP_F_B`.
"""

from __future__ import annotations

import csv
import io
import re
from itertools import groupby
from pathlib import Path

import numpy as np

from meshwright.errors import UserError
from meshwright.program.pipeline import (
    COMPUTING,
    LETTERS,
    Builder,
    Component,
    Kind,
    PipelineProgram,
    Placement,
    RankBuilder,
)

KINDS = {letters: kind for kind, letters in LETTERS.items() if kind != Kind.UPDATE}
# All-gather of parameters and reduction of gradients: not steps of a pipeline schedule, so derived when written.
SHARDING = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
CELL = re.compile(rf"(\d{{1,9}})({'|'.join([*KINDS, *SHARDING])})(\d{{0,9}})")
OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")

Step = tuple[Kind, int, int]  # kind, stage, micro-batch


def from_csv(text: str, where: str = "schedule") -> PipelineProgram:
    """Parse a PyTorch schedule CSV (one row of actions such as `2F5` per rank) into a pipeline schedule. Empty cells
    and cells about sharded parameters are ignored.

    where: prefix of error messages, such as the path of the file; the file's name becomes the schedule's name. The
    number of stages follows from the highest stage number, the number of micro-batches from the stage with the most
    forwards; `check_pipeline` finds inconsistencies. Raises UserError with row and cell for invalid text."""
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        raise UserError(f"{where}: not a CSV of a schedule: {error}") from None
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    groups = [
        [
            group
            for column, cell in enumerate(row, 1)
            if (group := _parse_cell(cell, f"{where}, row {number}, cell {column}"))
        ]
        for number, row in enumerate(rows, 1)
    ]
    steps = [(rank, step) for rank, row in enumerate(groups) for group in row for step in group]
    placement = _find_placement([(rank, step) for rank, step in steps if step[0] in COMPUTING], len(rows), where)
    forwards: dict[int, set[int]] = {}
    for _, (kind, stage, micro_batch) in steps:
        if kind == Kind.FORWARD:
            forwards.setdefault(stage, set()).add(micro_batch)
    program = Builder(Path(where).stem, len(rows), max(map(len, forwards.values()), default=0), placement)
    for rank, row in zip(program.ranks, groups, strict=True):
        for group in row:
            if len(group) == 1:
                _add_step(rank, group[0])
            else:
                with rank.overlap():
                    for step in group:
                        _add_step(rank, step)
    return program.build()


def _add_step(rank: RankBuilder, step: Step) -> None:
    """Append one parsed step (kind, stage, micro-batch) to a rank's builder."""
    kind, stage, micro_batch = step
    rank.add(kind, micro_batch, stage)


def _parse_cell(cell: str, where: str) -> list[Step]:
    """Parse a CSV cell such as `2F5`; return a list of steps (kind, stage, micro-batch): one step, several steps that
    overlap, or no step. where: row and cell, as prefix of error messages."""
    cell = cell.strip()
    if overlap := OVERLAP.fullmatch(cell):
        return [step for part in overlap[1].split(";") for step in _parse_cell(part, where)]
    found = CELL.fullmatch(cell)
    if cell and (not found or (not found[3] and found[2] in KINDS)):
        raise UserError(f'{where}: "{cell}" is no step; steps are written as 2F0, 2I0, 2W0, 2B0, 2SEND_F0 or 2RECV_B0')
    if not found or found[2] in SHARDING:
        return []
    return [(KINDS[found[2]], int(found[1]), int(found[3]))]


def _find_placement(computing: list[tuple[int, Step]], ranks: int, where: str) -> Placement:
    """Return the placement of the stages of a parsed schedule: the rank that computes each stage, indexed by replica
    (there is only replica 0), then by stage. Raises UserError unless each stage is on one rank and all ranks have
    equally many stages.

    computing: (rank, step) of all compute steps, where a step is (kind, stage, micro-batch). ranks: number of ranks.
    where: prefix of error messages.
    """
    home: dict[int, int] = {}
    for rank, (_, stage, _) in computing:
        if home.setdefault(stage, rank) != rank:
            raise UserError(
                f"{where}: stage {stage} is computed on rank {home[stage]} and on rank {rank}; a stage has one rank"
            )
    if not home:
        raise UserError(f"{where}: no rank computes anything")
    stages = max(home) + 1
    absent = next((stage for stage in range(stages) if stage not in home), None)
    if absent is not None:
        raise UserError(f"{where}: no rank computes stage {absent} of {stages}")
    held = np.bincount(list(home.values()), minlength=ranks)
    if len(set(held.tolist())) > 1:
        raise UserError(f"{where}: ranks hold {', '.join(map(str, held))} stages; all ranks must hold equally many")
    return (tuple(home[stage] for stage in range(stages)),)


def to_csv(program: PipelineProgram) -> str:
    """Format a pipeline schedule in PyTorch's schedule CSV format: `compute_only` or, if it has explicit sends and
    receives, `compute_comms`.

    The second form also has the cells that PyTorch requires for sharded parameters: UNSHARD before a stage's first
    step, REDUCE_GRAD and RESHARD after the stage's last step. Raises UserError with the reason for programs that
    PyTorch cannot express.
    """
    _check_expressible(program)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank in range(program.ranks):
        writer.writerow(_format_row(program, rank))
    return out.getvalue()


def _format_row(program: PipelineProgram, rank: int) -> list[str]:
    """Return the PyTorch CSV cells of one rank in execution order, one or more cells per group (steps that run
    together). Overlapped compute steps share a cell; each transfer has a cell."""
    s = program.steps
    steps = s.of_rank(rank)
    computing = [step for step in steps if s.kind[step] in COMPUTING]
    first = {int(s.stage[step]): step for step in reversed(computing)} if program.has_transfers else {}
    last = {int(s.stage[step]): step for step in computing} if program.has_transfers else {}
    cells: list[str] = []
    for _, group in groupby(steps, key=lambda step: int(s.group[step])):
        members = list(group)
        cells += [f"{stage}UNSHARD" for stage, step in first.items() if step in members]
        names = [program.describe(step) for step in members]
        together = len(members) > 1 and any(s.kind[step] in COMPUTING for step in members)
        cells += [f"({';'.join(names)})OVERLAP_F_B"] if together else names
        for stage in [stage for stage, step in last.items() if step in members]:
            cells += [f"{stage}REDUCE_GRAD", f"{stage}RESHARD"]
    return cells


def _check_expressible(program: PipelineProgram) -> None:
    """Raise UserError, with the reason, for a program that PyTorch's schedule CSV cannot express."""
    s = program.steps
    why = None
    if program.replicas > 1:
        why = f"it has {program.replicas} replicas, and PyTorch has one rank per stage"
    elif program.asynchronous:
        why = "its weight updates are asynchronous, and PyTorch has no step for them"
    elif (s.component != Component.WHOLE).any():
        why = "its steps are layer components, and PyTorch's are whole stages"
    else:
        kinds_of_group: dict[int, list[int]] = {}
        for kind, group in zip(s.kind.tolist(), s.group_index.tolist(), strict=True):
            kinds_of_group.setdefault(group, []).append(kind)
        allowed = ([Kind.FORWARD, Kind.BACKWARD], [Kind.FORWARD, Kind.INPUT_GRADIENT])
        for group, kinds in kinds_of_group.items():
            if len(kinds) > 1 and min(kinds) <= Kind.WEIGHT_GRADIENT and sorted(kinds) not in allowed:
                rank = int(s.group_rank[group])
                why = f"rank {rank} overlaps steps other than one forward and one backward"
                break
    if why:
        raise UserError(f"{program.name} cannot be written as PyTorch's CSV: {why}")
