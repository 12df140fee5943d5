"""Waits of pipeline ranks for values from other ranks, and the loop that runs all ranks in dependency order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.program.dataflow import GRADIENT, OUTPUT, Dataflow
from meshwright.program.durations import Floats
from meshwright.program.matching import make_deadlock_error
from meshwright.program.order import Integers
from meshwright.program.pipeline import Kind, PipelineProgram


@dataclass(frozen=True)
class RemoteReads:
    """Activations and gradients that steps read from other ranks, as columns with one entry per value.

    reader, maker: indices of the steps that read and compute the value. leaves, arrives: indices of the steps that send
    and receive the value; equal to `maker` and `reader` in a program without explicit transfers. boundary: stage
    boundary that the value crosses: s between stages s and s + 1, in either direction.
    """

    reader: Integers
    maker: Integers
    leaves: Integers
    arrives: Integers
    boundary: Integers


def find_remote_reads(flow: Dataflow) -> RemoteReads:
    """Return all values that a step reads from another rank, with the steps that produce, send and receive them.

    flow: data flow of the program. Raises ProgramError if a value is never produced, sent or received, or if a step
    runs before the step of the same rank that produces its input.
    """
    program, needs, s = flow.program, flow.reads, flow.program.steps
    missing = np.flatnonzero(needs.maker < 0)
    if len(missing):
        at = missing[np.argmin(needs.reader[missing])]
        reader = int(needs.reader[at])
        tick, letter = "'" * int(s.replica[reader]), "F" if needs.what[at] == OUTPUT else "B"
        value = f"{needs.stage[at]}{tick}{letter}{s.micro_batch[reader]}"
        raise program.make_error(reader, f"waits for {value}, which no step produces")
    crosses = s.rank[needs.reader] != s.rank[needs.maker]
    _check_order(program, needs.maker[~crosses | ~needs.between_stages], needs.reader[~crosses | ~needs.between_stages])
    crosses &= needs.between_stages
    reader, maker = needs.reader[crosses], needs.maker[crosses]
    boundary = np.minimum(s.stage[reader], s.stage[maker])
    if not program.has_transfers:
        return RemoteReads(reader, maker, maker, reader, boundary)
    what, replica, micro_batch = needs.what[crosses], s.replica[reader], s.micro_batch[reader]
    leaves = find_transfers(flow, Kind.SEND_FORWARD, what, replica, s.stage[maker], micro_batch)
    arrives = find_transfers(flow, Kind.RECEIVE_FORWARD, what, replica, s.stage[reader], micro_batch)
    for steps, rank, verb in ((leaves, s.rank[maker], "sends"), (arrives, s.rank[reader], "receives")):
        if (steps < 0).any():
            at = int(np.argmax(steps < 0))
            value = program.describe(int(maker[at]))
            raise program.make_error(int(reader[at]), f"waits for {value}, which rank {rank[at]} never {verb}")
    _check_order(program, maker, leaves)
    _check_order(program, arrives, reader)
    return RemoteReads(reader, maker, leaves, arrives, boundary)


def find_transfers(
    flow: Dataflow, kind: Kind, what: Integers, replica: Integers, stage: Integers, micro_batch: Integers
) -> Integers:
    """Return, for each of several values, the index of the step that sends it, or that receives it: [values]. -1 for a
    value that no step sends (or receives). A value is an activation or its gradient.

    flow: data flow of the schedule. kind: SEND_FORWARD to find the sending steps of activations and gradients,
    RECEIVE_FORWARD to find the receiving steps of both. what: [values], OUTPUT for an activation, GRADIENT for a
    gradient. replica, stage, micro_batch: [values], fields of the step that is searched for."""
    program, s = flow.program, flow.program.steps
    steps = np.flatnonzero((s.kind == kind) | (s.kind == kind + 2))
    table = np.full(2 * program.replicas * program.stages * program.micro_batches, -1, np.int64)
    made = np.where(s.kind[steps] == kind, OUTPUT, GRADIENT)
    table[flow.index_values(made, steps)] = steps
    return table[flow.compute_value_index(what, replica, stage, micro_batch)]


def _check_order(program: PipelineProgram, earlier: Integers, later: Integers) -> None:
    """Raise ProgramError unless, for each i, the step `earlier[i]` is in an earlier group (steps that run together)
    than the step `later[i]` of the same rank. earlier, later: [pairs], step indices."""
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
            where = f"which runs later, in step {s.group[a]}"
        raise program.make_error(b, f"needs {program.describe(a)}, {where}")


def run_groups(
    program: PipelineProgram, wait: RemoteReads, duration: Floats, delay: Floats
) -> tuple[list[float], list[float], list[int]]:
    """Simulate the groups (steps run together) of every rank in order, each starting as soon as its inputs have
    arrived. Returns (start time of every group, end time of every group, group indices in dependency order). Times are
    in the unit of `duration`.

    program: the schedule. wait: values read across ranks. duration: [groups], time that each group occupies its rank.
    delay: [values of wait], time of each message. Raises ProgramError with the cycle for a deadlock.
    """
    s = program.steps
    groups = len(s.group_rank)
    waiting = s.group_index[wait.reader]
    order = np.argsort(waiting, kind="stable")
    makers, delays = s.group_index[wait.leaves[order]], delay[order]
    ends = np.searchsorted(waiting[order], np.arange(groups + 1))
    # Most groups wait for at most one value: `need` has the first, `more` the others of groups with several.
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
    blocked: dict[int, list[int]] = {}  # group -> ranks that wait for it
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
        awaits = {rank: group for group, ranks in blocked.items() for rank in ranks}
        rank, path = min(awaits), list[int]()
        while rank not in path:
            path.append(rank)
            rank = int(s.group_rank[awaits[rank]])
        waits = [(position[rank], awaits[rank]) for rank in path[path.index(rank) :]]
        first_steps = np.searchsorted(s.group_index, waits).tolist()
        raise make_deadlock_error(program, "deadlock", [(step, awaited) for step, awaited in first_steps])
    return start, end, done
