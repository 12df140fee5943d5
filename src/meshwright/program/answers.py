"""Which messages of a rank have been used when: what it sent may go once something comes back that its receiver made
after using it.
"""

from __future__ import annotations

import numpy as np

from meshwright.program.dataflow import GRADIENT, OUTPUT
from meshwright.program.pipeline import ARRIVING, COMPUTING, SENDING, Kind, PipelineProgram

Value = tuple[int, int, int, int]
"""What passes between stages: OUTPUT or GRADIENT, and replica, stage and micro-batch of the step that made it."""


def reads(program: PipelineProgram, at: int) -> Value | None:
    """What a computing step reads from another stage."""
    s = program.steps
    return _reads(program.stages - 1, *(int(column[at]) for column in (s.kind, s.stage, s.replica, s.micro_batch)))


def carries(program: PipelineProgram, at: int) -> Value:
    """What a transfer carries."""
    s = program.steps
    return _carries(*(int(column[at]) for column in (s.kind, s.stage, s.replica, s.micro_batch)))


def _reads(last: int, kind: int, stage: int, replica: int, micro_batch: int) -> Value | None:
    if kind == _FORWARD:
        return (OUTPUT, replica, stage - 1, micro_batch) if stage > 0 else None
    return None if kind == _WEIGHT_GRADIENT or stage == last else (GRADIENT, replica, stage + 1, micro_batch)


def _carries(kind: int, stage: int, replica: int, micro_batch: int) -> Value:
    ahead = kind in _AHEAD
    maker = stage if kind in _SENDING else stage - 1 if ahead else stage + 1
    return OUTPUT if ahead else GRADIENT, replica, maker, micro_batch


# As plain numbers: programs have tens of thousands of steps, and members of an enumeration are slow to come by.
_FORWARD, _WEIGHT_GRADIENT = int(Kind.FORWARD), int(Kind.WEIGHT_GRADIENT)
_SENDING, _ARRIVING, _COMPUTING = (frozenset(map(int, kinds)) for kinds in (SENDING, ARRIVING, COMPUTING))
_AHEAD = frozenset((int(Kind.SEND_FORWARD), int(Kind.RECEIVE_FORWARD)))


def answers_to(program: PipelineProgram, rank: int) -> dict[int, list[Value]]:
    """By step of this rank: which of its messages have been used when what the step reads is there.

    A neighbour sends its answer after it has used what it was sent before, in the order of its own steps.
    """
    last = program.stages - 1
    mine = _rows(program, rank)
    ours = {_carries(*key) for _, _, *key in mine if key[0] in _SENDING}
    neighbours = {program.peer(at) for at, _, kind, *_ in mine if kind in _SENDING or kind in _ARRIVING}
    used: dict[int, list[tuple[int, Value]]] = {}  # by neighbour, latest first: group there, what it reads of ours
    sent: dict[Value, int] = {}  # what neighbours send to this rank: group there
    for neighbour in neighbours:
        used[neighbour] = []
        for at, group, *key in reversed(_rows(program, neighbour)):
            if key[0] in _COMPUTING:
                value = _reads(last, *key)
                if value is not None and value in ours:
                    used[neighbour].append((group, value))
            elif key[0] in _SENDING and program.peer(at) == rank:
                sent[_carries(*key)] = group
    found: dict[int, list[Value]] = {}
    for at, _, *key in mine:
        value = _reads(last, *key) if key[0] in _COMPUTING else None
        if value is not None and value in sent:
            waiting = used[program.placement[value[1]][value[2]]]
            while waiting and waiting[-1][0] < sent[value]:
                found.setdefault(at, []).append(waiting.pop()[1])
    return found


def _rows(program: PipelineProgram, rank: int) -> list[tuple[int, ...]]:
    """Of each step of a rank its number, group, kind, stage, replica and micro-batch."""
    s = program.steps
    steps = np.flatnonzero(s.rank == rank)
    columns = (steps, *(column[steps] for column in (s.group, s.kind, s.stage, s.replica, s.micro_batch)))
    return list(zip(*(column.tolist() for column in columns), strict=True))
