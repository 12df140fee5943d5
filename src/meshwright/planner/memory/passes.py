"""The passes (forwards and backwards) of a pipeline rank in execution order, and how many tensors stay allocated
between them: what the memory of every layout with the same schedule follows from."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.program import consumed_sends
from meshwright.program.order import Integers
from meshwright.program.pipeline import ARRIVING, COMPUTING, PipelineProgram

SAVED, SAVED_AT_ONCE, SENT, RECEIVED, QUEUE = range(5)
"""Tensors that stay allocated between passes: saved activations without and with `StagePass.at_once`, outputs and
gradients being sent and received, queues of weight gradients."""

# As plain numbers: programs have tens of thousands of steps, and enumeration members are slow.
FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = map(int, COMPUTING)
_ARRIVING = frozenset(map(int, ARRIVING))


class StagePass(NamedTuple):
    """A pass of a micro-batch through a stage. stage: index of the stage; at_once: True if the micro-batch's backward
    directly follows its forward; kind: kind of the pass; later: True for a backward that is not the stage's first of
    the step; last: True for passes after which the stage runs no backward."""

    stage: int
    at_once: bool
    kind: int
    later: bool
    last: bool


@lru_cache(maxsize=64)
def list_passes(program: PipelineProgram, rank: int) -> tuple[list[StagePass], list[tuple[int, int]], Integers]:
    """Return the passes of pipeline rank `rank` of a schedule, in execution order; the tensors that stay allocated
    between passes, each as (what, such as `SENT`; index of the stage); and how many of each are allocated while each
    pass runs [passes, tensors]. Messages between ranks are counted only in a schedule with sends and receives."""
    steps, last = consumed_sends.list_rank_steps(program, rank), program.stages - 1
    answers = consumed_sends.find_consumed_sends(program, rank)
    followed = consumed_sends.find_followed_forwards(program, rank)
    forwards = Counter(stage for _, kind, stage, *_ in steps if kind == FORWARD)
    ran, passes, complete = Counter[int](), list[StagePass](), program.has_transfers
    changes: list[tuple[int, int, int, int]] = []  # (first pass with the new count, tensor, its stage, +1 or -1)
    for at, kind, stage, *of in steps:
        now = len(passes)
        if kind in _ARRIVING:
            changes.append((now, RECEIVED, consumed_sends.compute_carried_value(kind, stage, *of)[2], 1))
        if kind > WEIGHT_GRADIENT:
            continue
        changes += [(now, SENT, value[2], -1) for value in answers.get(at, ())]
        read = consumed_sends.compute_read_value(last, kind, stage, *of)
        if read is not None:  # it becomes the stage's input, or the gradient that its snapshots count
            local = program.placement[read[1]][read[2]] == rank
            changes += [(now, SENT if local else RECEIVED, read[2], -1)] * (local or complete)
        forward, at_once = kind == FORWARD, (stage, *of) in followed
        saved = SAVED_AT_ONCE if at_once else SAVED
        if kind in (BACKWARD, INPUT_GRADIENT):
            ran[stage] += 1
            changes.append((now, saved, stage, -1))
        later, ends = ran[stage] > 1, ran[stage] == forwards[stage]
        passes.append(StagePass(stage, at_once, kind, not forward and later, not forward and ends))
        if forward:
            changes.append((now + 1, saved, stage, 1))
        if kind in (INPUT_GRADIENT, WEIGHT_GRADIENT):
            changes.append((now + 1, QUEUE, stage, 1 if kind == INPUT_GRADIENT else -1))
        reader = stage + 1 if forward else stage - 1
        if kind != WEIGHT_GRADIENT and 0 <= reader <= last and (complete or program.placement[of[0]][reader] == rank):
            changes.append((now + 1, SENT, stage, 1))
    begins, what, stages, change = np.array(changes, np.int64).T
    tensors, columns = np.unique(what * program.stages + stages, return_inverse=True)
    counts = np.zeros((len(passes) + 1, len(tensors)), np.int64)
    np.add.at(counts, (begins, columns), change)
    counts = counts.cumsum(axis=0)[:-1]
    assert counts.min(initial=0) >= 0, tensors
    return passes, [divmod(each, program.stages) for each in tensors.tolist()], counts
