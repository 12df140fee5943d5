"""Which messages of a rank have been used when: what it sent may go once something comes back that its receiver made
after using it.
"""

from __future__ import annotations

from functools import lru_cache

from meshwright.program.dataflow import GRADIENT, OUTPUT
from meshwright.program.pipeline import ARRIVING, COMPUTING, SENDING, Kind, PipelineProgram, Placement

Row = tuple[int, int, int, int, int]
"""A step in plain numbers: its place among all, kind, stage, replica and micro-batch."""
Value = tuple[int, int, int, int]
"""What passes between stages: OUTPUT or GRADIENT, and replica, stage and micro-batch of the step that made it."""


def reads(program: PipelineProgram, at: int) -> Value | None:
    """What a computing step reads from another stage."""
    s = program.steps
    return read(program.stages - 1, *(int(column[at]) for column in (s.kind, s.stage, s.replica, s.micro_batch)))


def carries(program: PipelineProgram, at: int) -> Value:
    """What a transfer carries."""
    s = program.steps
    return carried(*(int(column[at]) for column in (s.kind, s.stage, s.replica, s.micro_batch)))


def read(last: int, kind: int, stage: int, replica: int, micro_batch: int) -> Value | None:
    """`reads` of a step in plain numbers; last: the last stage."""
    if kind == _FORWARD:
        return (OUTPUT, replica, stage - 1, micro_batch) if stage > 0 else None
    return None if kind == _WEIGHT_GRADIENT or stage == last else (GRADIENT, replica, stage + 1, micro_batch)


def carried(kind: int, stage: int, replica: int, micro_batch: int) -> Value:
    """`carries` of a transfer in plain numbers."""
    ahead = kind in _AHEAD
    maker = stage if kind in _SENDING else stage - 1 if ahead else stage + 1
    return OUTPUT if ahead else GRADIENT, replica, maker, micro_batch


# As plain numbers: programs have tens of thousands of steps, and members of an enumeration are slow to come by.
_FORWARD, _WEIGHT_GRADIENT = int(Kind.FORWARD), int(Kind.WEIGHT_GRADIENT)
_SENDING, _ARRIVING, _COMPUTING = (frozenset(map(int, kinds)) for kinds in (SENDING, ARRIVING, COMPUTING))
_AHEAD = frozenset((int(Kind.SEND_FORWARD), int(Kind.RECEIVE_FORWARD)))
_TO_THE_NEXT = frozenset((int(Kind.SEND_FORWARD), int(Kind.RECEIVE_BACKWARD)))


def answers_to(program: PipelineProgram, rank: int) -> dict[int, list[Value]]:
    """By step of this rank: which of its messages have been used when what the step reads is there.

    A neighbour sends its answer after it has used what it was sent before, in the order of its own steps.
    """
    last, placement = program.stages - 1, program.placement
    mine = rows_of(program, rank)
    ours = {carried(*key) for _, *key in mine if key[0] in _SENDING}
    neighbours = {_peer(placement, *key) for _, *key in mine if key[0] in _SENDING or key[0] in _ARRIVING}
    used: dict[int, list[tuple[int, Value]]] = {}  # by neighbour, latest first: group there, what it reads of ours
    sent: dict[Value, int] = {}  # what neighbours send to this rank: group there
    for neighbour in neighbours:
        theirs = rows_of(program, neighbour)
        group = program.steps.group[theirs[0][0] : theirs[-1][0] + 1].tolist()
        used[neighbour] = []
        for number, (_, kind, stage, replica, micro_batch) in zip(reversed(group), reversed(theirs), strict=True):
            if kind in _COMPUTING:
                value = read(last, kind, stage, replica, micro_batch)
                if value is not None and value in ours:
                    used[neighbour].append((number, value))
            elif kind in _SENDING and _peer(placement, kind, stage, replica, micro_batch) == rank:
                sent[carried(kind, stage, replica, micro_batch)] = number
    found: dict[int, list[Value]] = {}
    for at, *key in mine:
        value = read(last, *key) if key[0] in _COMPUTING else None
        if value is not None and value in sent:
            waiting = used[placement[value[1]][value[2]]]
            while waiting and waiting[-1][0] < sent[value]:
                found.setdefault(at, []).append(waiting.pop()[1])
    return found


def _peer(placement: Placement, kind: int, stage: int, replica: int, micro_batch: int) -> int:
    """The other rank of a transfer."""
    return placement[replica][stage + (1 if kind in _TO_THE_NEXT else -1)]


@lru_cache(maxsize=8)
def rows_of(program: PipelineProgram, rank: int) -> list[Row]:
    """The steps of a rank, in their order."""
    s, own = program.steps, program.steps.of_rank(rank)
    columns = (column[own.start : own.stop].tolist() for column in (s.kind, s.stage, s.replica, s.micro_batch))
    return list(zip(own, *columns, strict=True))
