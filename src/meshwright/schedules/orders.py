"""Scheduling problem of a pipeline, as the search sees it: task orders of all ranks, their times, and a lower bound.

A task is forward, input gradient or weight gradient of one stage, as one number: kind x stages + stage, with kinds 0,
1, 2. The k-th occurrence of a task in a rank's order is that of micro-batch k. Micro-batches are interchangeable, so
each stage can run them in number order: renumbering the micro-batches of any program with one replica leaves all start
and end times unchanged.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from heapq import nlargest
from math import inf

import numpy as np

from meshwright.program.durations import Durations
from meshwright.program.pipeline import Kind, PipelineProgram, build_program

Order = list[int]  # tasks of one rank, in execution order
KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class Problem:
    """Scheduling problem of a pipeline: find, for each rank, an order of its tasks with a small makespan (total time),
    within the rank's memory. A task is one pass on one stage, which runs once per micro-batch; its number is kind x
    stages + stage, with kinds 0 forward, 1 input gradient, 2 weight gradient.

    Attributes:
        ranks, micro_batches: Numbers of pipeline ranks and micro-batches.
        placement: [stages], rank of each stage.
        duration: [tasks], time of one run.
        hop: [stages - 1], time of a message across each stage boundary, 0 inside a rank.
        limit: [ranks], maximum number of saved activations in units of one stage and micro-batch.
    """

    ranks: int
    micro_batches: int
    placement: tuple[int, ...]
    duration: tuple[float, ...]
    hop: tuple[float, ...]
    limit: tuple[int, ...]

    @classmethod
    def from_durations(
        cls,
        ranks: int,
        micro_batches: int,
        placement: tuple[int, ...],
        durations: Durations,
        memory: tuple[float, ...],
    ) -> Problem:
        """Build the scheduling problem of one placement of stages on ranks.

        ranks, micro_batches: numbers of pipeline ranks and micro-batches. placement: [stages], rank of each stage.
        durations: times by stage, in any unit. memory: [ranks], maximum number of micro-batches whose activations each
        rank saves at once on all of its stages; may be infinite."""
        stages = len(placement)
        program = build_program("", ranks, micro_batches, (placement,), ())
        names = ("forward", "input_gradient", "weight_gradient")
        hop = durations.tabulate("transfer", program)[0].tolist()
        most = stages // ranks * micro_batches
        return cls(
            ranks,
            micro_batches,
            placement,
            tuple(t for name in names for t in durations.tabulate(name, program)[0].tolist()),
            tuple(t if a != b else 0.0 for t, a, b in zip(hop, placement, placement[1:], strict=False)),
            tuple(min(most, int(m * (stages // ranks) + 1e-6)) if m < inf else most for m in memory),
        )

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline, over all ranks."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """Number of stages on each rank (virtual pipeline stages)."""
        return self.stages // self.ranks

    @property
    def size(self) -> int:
        """Number of task runs (one pass of one micro-batch on one stage) on all ranks together: 3 passes x stages x
        micro-batches."""
        return 3 * self.stages * self.micro_batches

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Rank on which each task (one pass on one stage) runs: [tasks]."""
        return self.placement * 3

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """Stages on each rank, ascending, indexed by rank."""
        return tuple(tuple(s for s, home in enumerate(self.placement) if home == r) for r in range(self.ranks))

    @cached_property
    def predecessor(self) -> tuple[int, ...]:
        """For each task (one pass on one stage), the number of the task whose result it reads: [tasks]. The first
        stage's forward reads no result; its entry is 3 x stages, one more than the last task number."""
        s = self.stages
        forwards = [3 * s, *range(s - 1)]
        return (*forwards, *range(s + 1, 2 * s), s - 1, *range(s, 2 * s))

    @cached_property
    def lag(self) -> tuple[float, ...]:
        """Transfer time of each task's input (a task is one pass on one stage), [tasks]; 0 if the input is produced on
        the task's rank."""
        return (0.0, *self.hop, *self.hop, 0.0, *[0.0] * self.stages)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the forward and input-gradient tasks (passes on one stage) that read the result of each task:
        [tasks][readers]."""
        return tuple(
            tuple(y for y in range(2 * self.stages) if self.predecessor[y] == x) for x in range(3 * self.stages)
        )

    @cached_property
    def turnaround(self) -> tuple[float, ...]:
        """Lower bound of the time from the end of a stage's forward to the start of its input gradient, for one
        micro-batch: [stages]."""
        s, t = self.stages, self.duration
        turn = [0.0] * s
        for x in range(s - 2, -1, -1):
            turn[x] = 2 * self.hop[x] + t[x + 1] + turn[x + 1] + t[s + x + 1]
        return tuple(turn)

    @cached_property
    def activation_memory_time(self) -> tuple[float, ...]:
        """Lower bound of the memory-time product of one micro-batch on each rank, [ranks]: its saved activations times
        the time for which they are saved, summed over the rank's stages, in (activations of one stage) x (unit of the
        step durations)."""
        s, t = self.stages, self.duration
        return tuple(
            sum(t[x] + self.turnaround[x] + t[s + x] + t[2 * s + x] for x in held) for held in self.stages_by_rank
        )

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound of the makespan (total time) over all orders within the memory limits: the maximum, over all
        ranks, of a work bound and a memory bound.

        The work bound of a rank is the sum of three times. (1) Minimum idle time before its first input gradient, given
        when its first micro-batch arrives and how many forwards memory allows until then. (2) Time of all its forwards
        and input gradients. (3) The longer of: all its weight gradients; the passes of earlier stages that follow its
        last input gradient.

        The memory bound of a rank is the arrival time of its first micro-batch, plus the memory-time product of all its
        activations divided by the memory limit."""
        s, m, t = self.stages, self.micro_batches, self.duration
        comes, after = [0.0] * s, [t[2 * s]] + [0.0] * (s - 1)
        for x in range(1, s):
            comes[x] = comes[x - 1] + t[x - 1] + self.hop[x - 1]
            after[x] = max(t[2 * s + x], self.hop[x - 1] + t[s + x - 1] + after[x - 1])
        best = 0.0
        for limit, held, lives in zip(self.limit, self.stages_by_rank, self.activation_memory_time, strict=True):
            first, last = held[0], held[-1]
            forwards, inputs, weights = (m * sum(t[kind * s + x] for x in held) for kind in range(3))
            gradients_from = comes[last] + t[last] + self.turnaround[last]
            until_then = sum(nlargest(limit, [t[x] for x in held for _ in range(m)]))
            start = gradients_from - min(gradients_from - comes[first], until_then)
            best = max(best, start + forwards + inputs + max(weights, after[first]), comes[first] + m * lives / limit)
        return best


@dataclass(frozen=True)
class TaskTimes:
    """End times of all task runs under given task orders, in the unit of the step durations. A task is one pass on one
    stage.

    Attributes:
        makespan: Total time, infinite for a deadlock.
        by_task: For each task, the times at which it ends on micro-batch 0, 1 ...; an extra last list of zeros stands
            for the input of the first stage's forward.
        by_rank: For each rank, the end times of its tasks in execution order.
    """

    makespan: float  # infinite for a deadlock
    by_task: list[list[float]]
    by_rank: list[list[float]]


def simulate_orders(
    problem: Problem, orders: list[Order], before: TaskTimes | None = None, since: float = 0.0
) -> TaskTimes:
    """Simulate task orders, each task as early as its rank and its input allow; return all end times.

    problem: placement and task durations. orders: for each rank, its task numbers in execution order (a task is one
    pass on one stage). before: earlier result for orders that differ only in tasks which end at time `since` or later;
    end times before `since` are copied from it, to save time. None: all times are computed."""
    needs, lag, duration = problem.predecessor, problem.lag, problem.duration
    ranks = range(problem.ranks)
    if before is None:
        by_task: list[list[float]] = [[] for _ in duration]
        by_rank: list[list[float]] = [[] for _ in ranks]
    else:
        by_task = [ends[: bisect_left(ends, since)] for ends in before.by_task[:-1]]
        by_rank = [ends[: bisect_left(ends, since)] for ends in before.by_rank]
    by_task.append([0.0] * problem.micro_batches)
    runnable = list(reversed(ranks))
    waits_for: list[list[float] | None] = [None] * problem.ranks
    while runnable:
        rank = runnable.pop()
        order, ends = orders[rank], by_rank[rank]
        position = begun = len(ends)
        now = ends[-1] if ends else 0.0
        waits_for[rank] = None
        for x in order[position:] if position else order:
            mine, needed = by_task[x], by_task[needs[x]]
            if len(mine) == len(needed):
                waits_for[rank] = needed
                break
            comes = needed[len(mine)] + lag[x]
            now = (comes if comes > now else now) + duration[x]
            mine.append(now)
            ends.append(now)
        position = len(ends)
        if position > begun:
            for other in ranks:
                awaited = waits_for[other]
                if awaited is not None and len(awaited) > len(by_task[orders[other][len(by_rank[other])]]):
                    waits_for[other] = None
                    runnable.append(other)
    if any(len(ends) < len(order) for ends, order in zip(by_rank, orders, strict=True)):
        return TaskTimes(inf, by_task, by_rank)
    return TaskTimes(max(ends[-1] for ends in by_rank), by_task, by_rank)


def is_feasible(problem: Problem, rank: int, order: Order) -> bool:
    """Return True if a rank's task order respects its memory limit and runs each task after the tasks of the same rank
    that produce its input.

    problem: placement and memory limits. rank: index of the rank. order: task numbers (a task is one pass on one stage)
    in execution order.
    """
    stages, limit, needs, on = problem.stages, problem.limit[rank], problem.predecessor, problem.rank
    count, used = [0] * (3 * stages), 0
    for x in order:
        count[x] += 1
        if x < stages:
            used += 1
            if used > limit:
                return False
        else:
            if x >= 2 * stages:
                used -= 1
            if count[x] > count[needs[x]] and on[needs[x]] == rank:
                return False
    return True


def extract_orders(program: PipelineProgram) -> list[Order]:
    """Return the task orders of a pipeline schedule with one replica: for each rank, its task numbers in execution
    order. A task is one pass on one stage, numbered kind x stages + stage with kinds 0 forward, 1 input gradient, 2
    weight gradient.

    A full backward becomes two tasks. Groups (steps that run together) and micro-batch numbers are lost: the n-th run
    of a task is taken as its run on micro-batch n."""
    stages, orders = program.stages, []
    kinds = {int(kind): number for number, kind in enumerate(KINDS)}
    for rank in range(program.ranks):
        order: Order = []
        steps = program.steps.of_rank(rank)
        columns = (program.steps.kind, program.steps.stage)
        for kind, stage in zip(*(column[steps.start : steps.stop].tolist() for column in columns), strict=True):
            if kind == Kind.BACKWARD:
                order += [stages + stage, 2 * stages + stage]
            else:
                order.append(kinds[kind] * stages + stage)
        orders.append(order)
    return orders


def build_program_from_orders(name: str, problem: Problem, orders: list[Order]) -> PipelineProgram:
    """Build the pipeline schedule called `name` from task orders. A task is one pass on one stage; its number is kind x
    stages + stage, with kinds 0 forward, 1 input gradient, 2 weight gradient.

    problem: gives the placement of stages on ranks. orders: for each rank, its task numbers in execution order; the
    n-th occurrence of a number is the task's run on micro-batch n."""
    rows = []
    for rank, order in enumerate(orders):
        count = [0] * (3 * problem.stages)
        for group, x in enumerate(order):
            rows.append((rank, group, KINDS[x // problem.stages], x % problem.stages, 0, count[x], 0))
            count[x] += 1
    return build_program(name, problem.ranks, problem.micro_batches, (problem.placement,), np.array(rows))
