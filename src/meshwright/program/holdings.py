"""What the ranks of a pipeline program hold: activations of micro-batches under way, and versions of weights.

A rank takes one group at a time, so the order of its own steps decides both; no clock is needed.
"""

from __future__ import annotations

import numpy as np

from meshwright.program.dataflow import Dataflow
from meshwright.program.durations import Floats
from meshwright.program.order import Integers
from meshwright.program.pipeline import Kind, PipelineProgram


def activation_changes(flow: Dataflow) -> tuple[Integers, Integers]:
    """Steps at whose start an activation comes to be held, and steps at whose end one is freed.

    An activation counts from its forward's start to its weight gradient's end (the end of a backward that holds it).
    """
    program = flow.program
    values = program.replicas * program.stages * program.micro_batches
    output, gradient, weights = flow.last[:values], flow.last[values : 2 * values], flow.last[2 * values :]
    whole = np.append(program.steps.kind, -1)[gradient] == Kind.BACKWARD  # the last one stands for no gradient
    freed = np.where(weights >= 0, weights, np.where(whole, gradient, -1))
    return flow.first[:values][output >= 0], freed[(freed >= 0) & (output >= 0)]


def peak_activations(flow: Dataflow) -> Floats:
    """Most activations that each rank holds at once, in units of its whole share of one micro-batch."""
    program, s = flow.program, flow.program.steps
    born, freed = activation_changes(flow)
    groups = len(s.group_rank)
    # Before each group: what came to be held, and what was freed, by all groups ahead of it.
    came, went = (
        np.append(0, np.cumsum(np.bincount(s.group_index[steps], minlength=groups))) for steps in (born, freed)
    )
    first = np.searchsorted(s.group_rank, s.group_rank)  # group of the same rank
    held = (came[1:] - came[first]) - (went[:-1] - went[first])
    peaks = np.zeros(program.ranks)
    np.maximum.at(peaks, s.group_rank, held)
    return peaks / program.chunks


def weight_copies(program: PipelineProgram) -> Floats:
    """Most versions of its weights that each rank holds at once, in units of one copy of its share of the model.

    A program without updates holds one version of each replica's stages. An update brings a new version into use in the
    place where it stands; a forward uses the newest version on its rank, its backward the same one. A version that a
    later one replaced is held until the last backward that uses it. Where gradients that an update does not apply are
    computed before it, those that it applies must be kept apart from them: the version is made, and held, from there on
    (PipeDream-2BW's second buffer).
    """
    s = program.steps
    held = np.bincount(np.asarray(program.placement).ravel(), minlength=program.ranks) / program.chunks
    if not program.asynchronous:
        return held.astype(np.float64)
    newest: dict[tuple[int, int], int] = {}
    used: dict[tuple[int, int, int], int] = {}
    updates: dict[tuple[int, int], list[tuple[int, int]]] = {}  # where each version is made, and brought into use
    waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}  # gradients that no update has applied, and where
    last_use: dict[tuple[int, int, int], int] = {}
    columns = (s.kind.tolist(), s.replica.tolist(), s.stage.tolist(), s.micro_batch.tolist(), s.group.tolist())
    for kind, replica, stage, micro_batch, group in zip(*columns, strict=True):
        if kind == Kind.FORWARD:
            used[replica, stage, micro_batch] = newest.get((replica, stage), 0)
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            last_use[replica, stage, used.get((replica, stage, micro_batch), 0)] = group
        elif kind == Kind.UPDATE:
            newest[replica, stage] = newest.get((replica, stage), 0) + 1
            later = [gradient for gradient in waiting.get((replica, stage), []) if gradient[0] > micro_batch]
            waiting[replica, stage] = later
            made = min((where for _, where in later), default=group)
            updates.setdefault((replica, stage), []).append((made, group))
        if kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            waiting.setdefault((replica, stage), []).append((micro_batch, group))
    # At an update, in this order: a version in no further use goes and the new one comes; after a backward, a replaced
    # version goes.
    events: list[list[tuple[int, int, int]]] = [[] for _ in range(program.ranks)]
    for (replica, stage), versions in updates.items():
        of_rank = events[program.placement[replica][stage]]
        for version, (made, replaced) in enumerate(versions):
            until = last_use.get((replica, stage, version), -1)
            of_rank.append((replaced, 0, -1) if until < replaced else (until, 2, -1))
            of_rank.append((made, 1, +1))
    most = [max(np.cumsum([0, *(change for *_, change in sorted(rank))])) for rank in events]
    return np.asarray(held + np.array(most) / program.chunks, np.float64)
