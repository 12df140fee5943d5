"""Runs a pipeline program on symbols with blocking sends in a random interleaving, and writes random programs.

It shares nothing with check and simulation but the columns of the program: every rank has a memory of its own, a step
that does not find what it reads there waits for ever, and the end is compared with what one device computes.
"""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np

from meshwright.program.pipeline import (
    Builder,
    Kind,
    PipelineProgram,
    Placement,
    build_program,
    place_cyclically,
    place_in_v_shape,
)

COLUMNS = ("rank", "group", "kind", "stage", "replica", "micro_batch", "component")


def failure(program: PipelineProgram, rng: random.Random) -> str | None:
    """Return the failure, or None if every stage has the gradient of every micro-batch at the end."""
    s, placement = program.steps, program.placement
    last = program.stages - 1
    groups: list[list[list[int]]] = [[] for _ in range(program.ranks)]
    for step in range(len(s)):
        if not groups[s.rank[step]] or s.group[step - 1] != s.group[step] or s.rank[step - 1] != s.rank[step]:
            groups[s.rank[step]].append([])
        groups[s.rank[step]][-1].append(step)
    at = [0] * program.ranks
    memory: list[dict[tuple[object, ...], object]] = [{} for _ in range(program.ranks)]  # by rank: (what, place)
    gradients: dict[tuple[int, int], list[object]] = defaultdict(list)  # by replica and stage: summed gradients
    summed: list[tuple[int, int, object]] = []  # by the current group
    posted: dict[tuple[int, int, bool], list[int]] = defaultdict(list)  # by sender, receiver, end: posted steps
    under_way: list[set[int] | None] = [None] * program.ranks

    def compute(rank: int, step: int) -> bool:
        kind, stage, replica, m = (int(c[step]) for c in (s.kind, s.stage, s.replica, s.micro_batch))
        here, mine = (replica, stage, m), memory[rank]
        if kind == Kind.UPDATE:
            return True
        if kind == Kind.FORWARD:
            source = mine.get(("output", replica, stage - 1, m)) if stage else m
            if source is None:
                return False
            mine["output", *here] = ("F", stage, source)
            mine["kept", *here] = source
        elif kind in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            kept = mine.get(("kept", *here))
            source = mine.get(("gradient", replica, stage + 1, m)) if stage < last else mine.get(("output", *here))
            if source is None or kept is None:
                return False
            mine["gradient", *here] = ("I", stage, source, kept)
            mine["queued", *here] = ("W", stage, source, kept)
        if kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            queued = mine.get(("queued", *here))
            if queued is None:
                return False
            summed.append((replica, stage, queued))
        return True

    def value(step: int, arriving: bool) -> tuple[object, ...]:
        kind, stage, replica, m = (int(c[step]) for c in (s.kind, s.stage, s.replica, s.micro_batch))
        if kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD):
            return "output", replica, stage - arriving, m
        return "gradient", replica, stage + arriving, m

    def meet(rank: int, step: int) -> bool:
        """Complete a transfer if both ends are posted, in posting order between two ranks."""
        sends = s.kind[step] in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
        peer = program.find_peer(step)
        pair = (rank, peer) if sends else (peer, rank)
        out, back = posted[*pair, True], posted[*pair, False]
        if not out or not back or step != (out if sends else back)[0]:
            return False
        send, receive = out.pop(0), back.pop(0)
        what = value(send, False)
        message = memory[pair[0]].get(what)
        if message is None:
            raise LookupError(f"{program.describe(send)} before it is made")
        memory[pair[1]][value(receive, True)] = message
        for end, step_done in ((pair[0], send), (pair[1], receive)):
            ends = under_way[end]
            assert ends is not None
            ends.discard(step_done)
        return True

    def advance(rank: int) -> bool:
        """Advance a rank by one event if possible."""
        if at[rank] == len(groups[rank]):
            return False
        group = groups[rank][at[rank]]
        if s.kind[group[0]] <= Kind.UPDATE:
            if not program.has_transfers:
                fetch(rank, group)
            before = dict(memory[rank])
            summed.clear()
            alone = []
            for step in group:  # no step of a group reads the result of another
                memory[rank] = dict(before)
                if not compute(rank, step):
                    memory[rank] = before
                    return False
                alone.append(memory[rank])
            for after in alone:
                before |= after
            memory[rank] = before
            for replica, stage, gradient in summed:
                gradients[replica, stage].append(gradient)
            at[rank] += 1
            return True
        open_steps = under_way[rank]
        if open_steps is None:
            open_steps = under_way[rank] = set(group)
            for step in group:
                sends = s.kind[step] in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
                peer = program.find_peer(step)
                posted[(rank, peer, True) if sends else (peer, rank, False)].append(step)
            return True
        if open_steps:
            return any(meet(rank, step) for step in rng.sample(sorted(open_steps), len(open_steps)))
        under_way[rank] = None
        at[rank] += 1
        return True

    def fetch(rank: int, group: list[int]) -> None:
        """Without explicit transfers, fetch what a step reads once it is produced."""
        for step in group:
            replica, stage, m = (int(c[step]) for c in (s.replica, s.stage, s.micro_batch))
            for what, neighbour in (("output", stage - 1), ("gradient", stage + 1)):
                if 0 <= neighbour <= last and placement[replica][neighbour] != rank:
                    made = memory[placement[replica][neighbour]].get((what, replica, neighbour, m))
                    if made is not None:
                        memory[rank][what, replica, neighbour, m] = made

    try:
        while True:
            order = rng.sample(range(program.ranks), program.ranks)
            if not any(advance(rank) for rank in order):
                break
    except LookupError as error:
        return str(error)
    if any(at[rank] < len(groups[rank]) for rank in range(program.ranks)):
        return "stuck"
    for stage in range(program.stages):
        found = [gradient for replica in range(program.replicas) for gradient in gradients[replica, stage]]
        if sorted(map(repr, found)) != sorted(repr(_gradient(stage, last, m)) for m in range(program.micro_batches)):
            return f"stage {stage} has the wrong gradients"
    return None


def _gradient(stage: int, last: int, micro_batch: int) -> object:
    """Return the gradient that one device computes."""
    inputs: list[object] = [micro_batch]
    for s in range(last + 1):
        inputs.append(("F", s, inputs[-1]))
    source: object = inputs[-1]
    for s in range(last, stage, -1):
        source = ("I", s, source, inputs[s])
    return ("W", stage, source, inputs[stage])


def random_program(rng: random.Random) -> PipelineProgram:
    """A program that holds: steps in a random order in which each finds what it reads, some backwards cut in two,
    some forwards with a backward in a group. Up to 4 ranks, 5 micro-batches and 8 stages, in one replica or two."""
    ranks, micro_batches = rng.randint(1, 4), rng.randint(1, 5)
    placement: Placement = rng.choice(
        [
            (place_cyclically(ranks),),
            (place_cyclically(ranks, 2),),
            (place_in_v_shape(ranks),),
            (place_cyclically(ranks), tuple(reversed(place_cyclically(ranks)))),
        ]
    )
    stages = len(placement[0])
    program = Builder("random", ranks, micro_batches, placement)
    left: list[tuple[Kind, int, int, int]] = []
    for m in range(micro_batches):
        replica = rng.randrange(len(placement))
        for stage in range(stages):
            left.append((Kind.FORWARD, m, stage, replica))
            if rng.random() < 0.5:
                left.append((Kind.BACKWARD, m, stage, replica))
            else:
                left += [(Kind.INPUT_GRADIENT, m, stage, replica), (Kind.WEIGHT_GRADIENT, m, stage, replica)]
    made: set[tuple[str, int, int]] = set()

    def ready(step: tuple[Kind, int, int, int]) -> bool:
        kind, m, stage, _ = step
        if kind == Kind.FORWARD:
            return stage == 0 or ("F", m, stage - 1) in made
        if kind == Kind.WEIGHT_GRADIENT:
            return ("B", m, stage) in made
        return ("F", m, stage) in made and (stage == stages - 1 or ("B", m, stage + 1) in made)

    while left:
        step = rng.choice([step for step in left if ready(step)])
        rank = placement[step[3]][step[2]]
        partners = [
            other
            for other in left
            if {other[0], step[0]} == {Kind.FORWARD, Kind.BACKWARD}
            and ready(other)
            and placement[other[3]][other[2]] == rank
        ]
        together = [step, rng.choice(partners)] if partners and rng.random() < 0.5 else [step]
        if len(together) == 2:
            with program.ranks[rank].overlap():
                for each in together:
                    program.ranks[rank].add(*each)
        else:
            program.ranks[rank].add(*step)
        for kind, m, stage, replica in together:
            left.remove((kind, m, stage, replica))
            made.add(("F" if kind == Kind.FORWARD else "W" if kind == Kind.WEIGHT_GRADIENT else "B", m, stage))
    return program.build()


def rows_of(program: PipelineProgram) -> list[list[int]]:
    """Return one row per step: rank, group, kind, stage, replica, micro-batch, component."""
    return np.stack([getattr(program.steps, name) for name in COLUMNS], axis=1).tolist()


def with_rows(program: PipelineProgram, rows: list[list[int]]) -> PipelineProgram:
    """Return the program with these steps."""
    return build_program(program.name, program.ranks, program.micro_batches, program.placement, rows)
