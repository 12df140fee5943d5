"""Facts that follow from the order of a pipeline rank's steps: sent messages that it knows to be consumed, from the
order in which other ranks send to it, and forwards that are directly followed by their backward."""

from __future__ import annotations

from functools import lru_cache

from meshwright.program.dataflow import GRADIENT, OUTPUT
from meshwright.program.pipeline import ARRIVING, COMPUTING, SENDING, Kind, PipelineProgram, Placement

Row = tuple[int, int, int, int, int]
"""One step: its index in the program, kind, stage, replica, micro-batch."""
Value = tuple[int, int, int, int]
"""A value sent between stages: OUTPUT or GRADIENT, then replica, stage and micro-batch of the step that produces it."""


def find_read_value(program: PipelineProgram, at: int) -> Value | None:
    """Return the value (activation or gradient) that a compute step reads from another stage, or None if it reads none.

    at: index of the step in the program. A value is a tuple (0 for an activation or 1 for a gradient, replica, stage
    that produces the value, micro-batch).
    """
    s = program.steps
    return compute_read_value(
        program.stages - 1, *(int(column[at]) for column in (s.kind, s.stage, s.replica, s.micro_batch))
    )


def find_carried_value(program: PipelineProgram, at: int) -> Value:
    """Return the value (activation or gradient) that a send or receive step transfers.

    at: index of the step in the program. A value is a tuple (0 for an activation or 1 for a gradient, replica, stage
    that produces the value, micro-batch).
    """
    s = program.steps
    return compute_carried_value(*(int(column[at]) for column in (s.kind, s.stage, s.replica, s.micro_batch)))


def compute_read_value(last: int, kind: int, stage: int, replica: int, micro_batch: int) -> Value | None:
    """Return the value (activation or gradient) that a compute step reads from another stage, or None if it reads none.

    last: index of the pipeline's last stage. kind, stage, replica, micro_batch: fields of the step. A value is a tuple
    (0 for an activation or 1 for a gradient, replica, stage that produces the value, micro-batch).
    """
    if kind == _FORWARD:
        return (OUTPUT, replica, stage - 1, micro_batch) if stage > 0 else None
    return None if kind == _WEIGHT_GRADIENT or stage == last else (GRADIENT, replica, stage + 1, micro_batch)


def compute_carried_value(kind: int, stage: int, replica: int, micro_batch: int) -> Value:
    """Return the value (activation or gradient) that a send or receive step transfers. kind, stage, replica,
    micro_batch: fields of the step. A value is a tuple (0 for an activation or 1 for a gradient, replica, stage that
    produces the value, micro-batch)."""
    ahead = kind in _FORWARD_TRANSFERS
    maker = stage if kind in _SENDING else stage - 1 if ahead else stage + 1
    return OUTPUT if ahead else GRADIENT, replica, maker, micro_batch


# Plain integers, because programs have tens of thousands of steps and access to enumeration members is slow.
_FORWARD, _WEIGHT_GRADIENT = int(Kind.FORWARD), int(Kind.WEIGHT_GRADIENT)
_SENDING, _ARRIVING, _COMPUTING = (frozenset(map(int, kinds)) for kinds in (SENDING, ARRIVING, COMPUTING))
_FORWARD_TRANSFERS = frozenset((int(Kind.SEND_FORWARD), int(Kind.RECEIVE_FORWARD)))
_TO_NEXT_STAGE = frozenset((int(Kind.SEND_FORWARD), int(Kind.RECEIVE_BACKWARD)))


@lru_cache(maxsize=64)
def find_consumed_sends(program: PipelineProgram, rank: int) -> dict[int, list[Value]]:
    """Find when a rank can free the buffers from which it sends activations and gradients, without waiting for the
    sends. Return {index of a compute step of the rank: values whose send buffers can be freed once the step's input has
    arrived}. Each value is listed once, as a tuple (0 for an activation or 1 for a gradient, replica, stage that
    produces the value, micro-batch).

    program: the pipeline schedule. rank: number of the rank. The result is cached; do not change it. Reason: when an
    input arrives from another rank, that rank has run all its steps before the send of this input. It has then received
    every value from `rank` that these steps read.
    """
    last, placement = program.stages - 1, program.placement
    mine = list_rank_steps(program, rank)
    ours = {compute_carried_value(*key) for _, *key in mine if key[0] in _SENDING}
    neighbours = {_find_peer(placement, *key) for _, *key in mine if key[0] in _SENDING or key[0] in _ARRIVING}
    used: dict[int, list[tuple[int, Value]]] = {}  # by neighbour, latest first: its group, the value of ours it reads
    sent: dict[Value, int] = {}  # value that a neighbour sends to this rank -> the neighbour's group
    for neighbour in neighbours:
        theirs = list_rank_steps(program, neighbour)
        group = program.steps.group[theirs[0][0] : theirs[-1][0] + 1].tolist()
        used[neighbour] = []
        for number, (_, kind, stage, replica, micro_batch) in zip(reversed(group), reversed(theirs), strict=True):
            if kind in _COMPUTING:
                value = compute_read_value(last, kind, stage, replica, micro_batch)
                if value is not None and value in ours:
                    used[neighbour].append((number, value))
            elif kind in _SENDING and _find_peer(placement, kind, stage, replica, micro_batch) == rank:
                sent[compute_carried_value(kind, stage, replica, micro_batch)] = number
    found: dict[int, list[Value]] = {}
    for at, *key in mine:
        value = compute_read_value(last, *key) if key[0] in _COMPUTING else None
        if value is not None and value in sent:
            waiting = used[placement[value[1]][value[2]]]
            while waiting and waiting[-1][0] < sent[value]:
                found.setdefault(at, []).append(waiting.pop()[1])
    return found


def _find_peer(placement: Placement, kind: int, stage: int, replica: int, micro_batch: int) -> int:
    """Return the rank at the other end of a send or receive step. kind, stage, replica, micro_batch: fields of the
    step; `micro_batch` does not affect the result.

    placement: rank of each stage, indexed by replica, then by stage.
    """
    return placement[replica][stage + (1 if kind in _TO_NEXT_STAGE else -1)]


@lru_cache(maxsize=8)
def list_rank_steps(program: PipelineProgram, rank: int) -> list[Row]:
    """Return the steps of a rank in execution order, each as (index in program, kind, stage, replica, micro-batch)."""
    s, own = program.steps, program.steps.of_rank(rank)
    columns = (column[own.start : own.stop].tolist() for column in (s.kind, s.stage, s.replica, s.micro_batch))
    return list(zip(own, *columns, strict=True))


def find_followed_forwards(program: PipelineProgram, rank: int) -> set[tuple[int, int, int]]:
    """Return (stage, replica, micro-batch) of each forward of a rank that is directly followed by its own backward (or
    input-gradient pass): the rank runs no other pass between them."""
    found: set[tuple[int, int, int]] = set()
    before: tuple[int, int, int] | None = None
    for _, kind, stage, replica, micro_batch in list_rank_steps(program, rank):
        if kind not in _COMPUTING:
            continue
        now = stage, replica, micro_batch
        if now == before and kind != _WEIGHT_GRADIENT:
            found.add(now)
        before = now if kind == _FORWARD else None
    return found
