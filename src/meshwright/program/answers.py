"""Which messages of a rank have been used when: what it sent may go once something comes back that its receiver made
after using it.
"""

from __future__ import annotations

from meshwright.program.dataflow import GRADIENT, OUTPUT
from meshwright.program.pipeline import ARRIVING, COMPUTING, SENDING, Kind, PipelineProgram

Value = tuple[int, int, int, int]
"""What passes between stages: OUTPUT or GRADIENT, and replica, stage and micro-batch of the step that made it."""


def reads(program: PipelineProgram, at: int) -> Value | None:
    """What a computing step reads from another stage."""
    s = program.steps
    kind, stage, replica, micro_batch = (int(column[at]) for column in (s.kind, s.stage, s.replica, s.micro_batch))
    if kind == Kind.FORWARD:
        return (OUTPUT, replica, stage - 1, micro_batch) if stage > 0 else None
    if kind == Kind.WEIGHT_GRADIENT or stage == program.stages - 1:
        return None
    return GRADIENT, replica, stage + 1, micro_batch


def carries(program: PipelineProgram, at: int) -> Value:
    """What a transfer carries."""
    s = program.steps
    kind, stage = Kind(int(s.kind[at])), int(s.stage[at])
    ahead = kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
    maker = stage if kind in SENDING else stage - 1 if ahead else stage + 1
    return OUTPUT if ahead else GRADIENT, int(s.replica[at]), maker, int(s.micro_batch[at])


def answers_to(program: PipelineProgram, rank: int) -> dict[int, list[Value]]:
    """By step of this rank: which of its messages have been used when what the step reads is there.

    A neighbour sends its answer after it has used what it was sent before, in the order of its own steps.
    """
    s = program.steps
    transfers = [at for at in s.of_rank(rank) if s.kind[at] in SENDING or s.kind[at] in ARRIVING]
    ours = {carries(program, at) for at in transfers if s.kind[at] in SENDING}
    used: dict[int, list[tuple[int, Value]]] = {}  # by neighbour, latest first: group there, what it reads of ours
    sent: dict[Value, int] = {}  # what neighbours send to this rank: group there
    for neighbour in {program.peer(at) for at in transfers}:
        used[neighbour] = []
        for at in reversed(s.of_rank(neighbour)):
            if s.kind[at] in COMPUTING and (value := reads(program, at)) in ours and value is not None:
                used[neighbour].append((int(s.group[at]), value))
            elif s.kind[at] in SENDING and program.peer(at) == rank:
                sent[carries(program, at)] = int(s.group[at])
    found: dict[int, list[Value]] = {}
    for at in s.of_rank(rank):
        value = reads(program, at) if s.kind[at] in COMPUTING else None
        if value is not None and value in sent:
            waiting = used[program.placement[value[1]][value[2]]]
            while waiting and waiting[-1][0] < sent[value]:
                found.setdefault(at, []).append(waiting.pop()[1])
    return found
