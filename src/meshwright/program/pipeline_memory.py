"""Memory of pipeline ranks: saved activations of micro-batches in flight, and versions of the weights.

A rank runs one group at a time, so the order of its own steps determines both; no simulated time is needed.
"""

from __future__ import annotations

import numpy as np

from meshwright.program.dataflow import Dataflow
from meshwright.program.durations import Floats
from meshwright.program.order import Integers
from meshwright.program.pipeline import Kind, PipelineProgram


def find_activation_events(flow: Dataflow) -> tuple[Integers, Integers]:
    """Return two arrays of step indices, which are not paired: the steps at whose start an activation is allocated, and
    the steps at whose end a saved activation is freed.

    flow: data flow of the schedule. An activation lives from the start of its forward to the end of its weight gradient
    (or full backward).
    """
    program = flow.program
    values = program.replicas * program.stages * program.micro_batches
    output, gradient, weights = (
        flow.last_step[:values],
        flow.last_step[values : 2 * values],
        flow.last_step[2 * values :],
    )
    whole = np.append(program.steps.kind, -1)[gradient] == Kind.BACKWARD  # index -1 (no gradient) reads the appended -1
    freed = np.where(weights >= 0, weights, np.where(whole, gradient, -1))
    return flow.first_step[:values][output >= 0], freed[(freed >= 0) & (output >= 0)]


def compute_peak_activations(flow: Dataflow) -> Floats:
    """Return the peak of saved activations of each rank, [ranks]. Activations are counted in micro-batches: 1 is one
    micro-batch saved on all stages that the rank has in one replica (copy of the model). flow: data flow of the
    pipeline schedule."""
    program, s = flow.program, flow.program.steps
    born, freed = find_activation_events(flow)
    groups = len(s.group_rank)
    # Activations allocated and freed by all groups before each group.
    came, went = (
        np.append(0, np.cumsum(np.bincount(s.group_index[steps], minlength=groups))) for steps in (born, freed)
    )
    first = np.searchsorted(s.group_rank, s.group_rank)  # group of the same rank
    held = (came[1:] - came[first]) - (went[:-1] - went[first])
    peaks = np.zeros(program.ranks)
    np.maximum.at(peaks, s.group_rank, held)
    return peaks / program.chunks


def count_weight_copies(program: PipelineProgram) -> Floats:
    """Return the peak number of weight copies that each rank of the schedule `program` holds, [ranks]. One copy is one
    version of the weights of all stages that the rank has in one replica.

    A synchronous schedule holds one copy per replica. In an asynchronous schedule (PipeDream), each update (optimizer
    step) makes a new version of a stage's weights, and a replaced version is kept (stashed) until the last backward
    that uses it: a backward uses the version of its forward. With double buffering (PipeDream-2BW) a new version takes
    memory from its first gradient on.
    """
    s = program.steps
    held = np.bincount(np.asarray(program.placement).ravel(), minlength=program.ranks) / program.chunks
    if not program.asynchronous:
        return held.astype(np.float64)
    newest: dict[tuple[int, int], int] = {}
    used: dict[tuple[int, int, int], int] = {}
    updates: dict[tuple[int, int], list[tuple[int, int]]] = {}  # groups that allocate a version and make it current
    waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}  # gradients not yet applied: micro-batch, group
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
    # Order of events in a group: an update frees an unused version (0), then allocates the new one (1); a backward
    # frees a replaced version after it (2).
    events: list[list[tuple[int, int, int]]] = [[] for _ in range(program.ranks)]
    for (replica, stage), versions in updates.items():
        of_rank = events[program.placement[replica][stage]]
        for version, (made, replaced) in enumerate(versions):
            until = last_use.get((replica, stage, version), -1)
            of_rank.append((replaced, 0, -1) if until < replaced else (until, 2, -1))
            of_rank.append((made, 1, +1))
    most = [max(np.cumsum([0, *(change for *_, change in sorted(rank))])) for rank in events]
    return np.asarray(held + np.array(most) / program.chunks, np.float64)
