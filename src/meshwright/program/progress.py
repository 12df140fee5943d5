"""Whether the ranks of a pipeline program can go on: who waits for whom, and the loop that lets each rank run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.program.dataflow import GRADIENT, OUTPUT, Dataflow
from meshwright.program.durations import Floats
from meshwright.program.order import Integers, ProgramError
from meshwright.program.pipeline import Kind, PipelineProgram


def error(program: PipelineProgram, step: int, reason: str) -> ProgramError:
    """The error that names a step."""
    s = program.steps
    return ProgramError(int(s.rank[step]), int(s.group[step]), program.describe(step), reason)


def place(program: PipelineProgram, step: int) -> str:
    """`rank 2, step 7 (1F3)`."""
    s = program.steps
    return f"rank {s.rank[step]}, step {s.group[step]} ({program.describe(step)})"


@dataclass(frozen=True)
class Waits:
    """What ranks wait for on other ranks, one entry a value that crosses.

    reader, maker: the steps that use and make it. leaves, arrives: its send and its receive, or the maker and the
    reader again where transfers are not written out. boundary: it crosses from this stage to the next one or back.
    """

    reader: Integers
    maker: Integers
    leaves: Integers
    arrives: Integers
    boundary: Integers


def waits(flow: Dataflow) -> Waits:
    """Raises ProgramError where a value is never made, sent or received, and where what a step needs on its own rank
    does not stand before it."""
    program, needs, s = flow.program, flow.needs, flow.program.steps
    missing = np.flatnonzero(needs.maker < 0)
    if len(missing):
        at = missing[np.argmin(needs.reader[missing])]
        reader = int(needs.reader[at])
        tick, letter = "'" * int(s.replica[reader]), "F" if needs.what[at] == OUTPUT else "B"
        value = f"{needs.stage[at]}{tick}{letter}{s.micro_batch[reader]}"
        raise error(program, reader, f"waits for {value}, which no step makes")
    crosses = s.rank[needs.reader] != s.rank[needs.maker]
    _stand_before(
        program, needs.maker[~crosses | ~needs.between_stages], needs.reader[~crosses | ~needs.between_stages]
    )
    crosses &= needs.between_stages
    reader, maker = needs.reader[crosses], needs.maker[crosses]
    boundary = np.minimum(s.stage[reader], s.stage[maker])
    if not program.has_transfers:
        return Waits(reader, maker, maker, reader, boundary)
    what, replica, micro_batch = needs.what[crosses], s.replica[reader], s.micro_batch[reader]
    leaves = find_transfers(flow, Kind.SEND_FORWARD, what, replica, s.stage[maker], micro_batch)
    arrives = find_transfers(flow, Kind.RECEIVE_FORWARD, what, replica, s.stage[reader], micro_batch)
    for steps, rank, verb in ((leaves, s.rank[maker], "sends"), (arrives, s.rank[reader], "receives")):
        if (steps < 0).any():
            at = int(np.argmax(steps < 0))
            value = program.describe(int(maker[at]))
            raise error(program, int(reader[at]), f"waits for {value}, which rank {rank[at]} never {verb}")
    _stand_before(program, maker, leaves)
    _stand_before(program, arrives, reader)
    return Waits(reader, maker, leaves, arrives, boundary)


def find_transfers(
    flow: Dataflow, kind: Kind, what: Integers, replica: Integers, stage: Integers, micro_batch: Integers
) -> Integers:
    """The sends (kind SEND_FORWARD) or receives (RECEIVE_FORWARD) of outputs and gradients; -1 where there is none.

    stage: that sends or receives, as in the step.
    """
    program, s = flow.program, flow.program.steps
    steps = np.flatnonzero((s.kind == kind) | (s.kind == kind + 2))
    table = np.full(2 * program.replicas * program.stages * program.micro_batches, -1, np.int64)
    made = np.where(s.kind[steps] == kind, OUTPUT, GRADIENT)
    table[flow.key(made, s.replica[steps], s.stage[steps], s.micro_batch[steps])] = steps
    return table[flow.key(what, replica, stage, micro_batch)]


def _stand_before(program: PipelineProgram, earlier: Integers, later: Integers) -> None:
    """Raise for the first of `later` whose counterpart does not stand in a group before it on the same rank."""
    s = program.steps
    wrong = np.flatnonzero((s.rank[earlier] != s.rank[later]) | (s.group[earlier] >= s.group[later]))
    if len(wrong):
        at = wrong[np.argmin(later[wrong])]
        a, b = int(earlier[at]), int(later[at])
        if s.rank[a] != s.rank[b]:
            where = f"which is on rank {s.rank[a]}"
        elif s.group[a] == s.group[b]:
            where = "which is in the same group"
        else:
            where = f"which comes after it, as step {s.group[a]}"
        raise error(program, b, f"needs {program.describe(a)}, {where}")


def run(
    program: PipelineProgram, wait: Waits, duration: Floats, delay: Floats
) -> tuple[list[float], list[float], list[int]]:
    """Let every rank run its groups in order, each as soon as what it waits for is there.

    duration: how long each group occupies its rank. delay: how long each value is under way. Returns start and end of
    every group, and the groups in an order in which each comes after all that it waits for. Raises ProgramError with
    the circle when ranks wait for each other.
    """
    s = program.steps
    groups = len(s.group_rank)
    waiting = s.group_index[wait.reader]
    order = np.argsort(waiting, kind="stable")
    makers, delays = s.group_index[wait.leaves[order]], delay[order]
    ends = np.searchsorted(waiting[order], np.arange(groups + 1))
    # Most groups wait for one value at most: of each the first, and what there is beside it.
    first, count = ends[:-1], np.diff(ends)
    none = np.zeros(1, np.int64)
    need = np.where(count > 0, np.append(makers, none)[first], -1).tolist()
    lag = np.append(delays, none)[first].tolist()
    several = [(group, ends[group] + 1, ends[group + 1]) for group in np.flatnonzero(count > 1).tolist()]
    more = {group: list(zip(makers[a:b].tolist(), delays[a:b].tolist(), strict=True)) for group, a, b in several}
    lasts = duration.tolist()
    bounds = np.searchsorted(s.group_rank, np.arange(program.ranks + 1)).tolist()
    start, end = [0.0] * groups, [-1.0] * groups
    position, clock = bounds[:-1], [0.0] * program.ranks
    done: list[int] = []
    blocked: dict[int, list[int]] = {}  # by the group that they wait for: ranks
    runnable = list(range(program.ranks))
    while runnable:
        rank = runnable.pop()
        group, now, stop = position[rank], clock[rank], bounds[rank + 1]
        while group < stop:
            maker = need[group]
            if maker >= 0:
                made = end[maker]
                if made >= 0:
                    made += lag[group]
                    if made > now:
                        now = made
                    for maker, late in more.get(group, ()):
                        made = end[maker]
                        if made < 0:
                            break
                        made += late
                        if made > now:
                            now = made
                if made < 0:
                    blocked.setdefault(maker, []).append(rank)
                    break
            start[group] = now
            now += lasts[group]
            end[group] = now
            done.append(group)
            if group in blocked:
                runnable.extend(blocked.pop(group))
            group += 1
        position[rank], clock[rank] = group, now
    if blocked:
        raise _circle(program, position, {rank: group for group, ranks in blocked.items() for rank in ranks})
    return start, end, done


def _circle(program: PipelineProgram, position: list[int], awaits: dict[int, int]) -> ProgramError:
    """Who waits for whom, from the lowest rank in the circle. Every rank that a stuck rank waits for is stuck."""
    s = program.steps
    rank, path = min(awaits), list[int]()
    while rank not in path:
        path.append(rank)
        rank = int(s.group_rank[awaits[rank]])
    circle = path[path.index(rank) :]
    lowest = circle.index(min(circle))
    circle = circle[lowest:] + circle[:lowest]

    def step_of(group: int) -> int:
        return int(np.searchsorted(s.group_index, group))

    links = [
        f"{'' if i == 0 else f'{place(program, step_of(position[rank]))} '}waits for {program.describe(maker)} "
        f"of rank {s.rank[maker]}"
        for i, rank in enumerate(circle)
        for maker in [step_of(awaits[rank])]
    ]
    return error(program, step_of(position[circle[0]]), "waits in a circle: " + "; ".join(links))
