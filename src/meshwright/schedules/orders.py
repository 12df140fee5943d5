"""A pipeline schedule as a search sees it: the order of tasks on every rank, a clock for it, and a bound on its time.

A task is forward, input gradient or weight gradient of one stage, as one number: kind x stages + stage, kinds 0, 1, 2.
The k-th time that a task stands in a rank's order it is that of micro-batch k. Micro-batches are alike, so every stage
can take them by number: of any program without replicas the k-th output of each stage can be given to the k-th
micro-batch, and it starts and ends its tasks at the same times as before.
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

Order = list[int]  # the tasks of one rank in turn
KINDS = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


@dataclass(frozen=True)
class Problem:
    """What is given: where stages live, how long tasks last, how much memory ranks have.

    placement: rank of each stage. duration: by task. hop: transfer time by boundary between stages, 0 inside a rank.
    limit: most activations a rank may hold, counted in stages (a rank's share of one micro-batch is `chunks` of them).
    """

    ranks: int
    micro_batches: int
    placement: tuple[int, ...]
    duration: tuple[float, ...]
    hop: tuple[float, ...]
    limit: tuple[int, ...]

    @classmethod
    def of(
        cls,
        ranks: int,
        micro_batches: int,
        placement: tuple[int, ...],
        durations: Durations,
        memory: tuple[float, ...],
    ) -> Problem:
        """durations: by stage. memory: by rank, in micro-batches of a rank's whole share (may be infinite)."""
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
        return len(self.placement)

    @property
    def chunks(self) -> int:
        return self.stages // self.ranks

    @property
    def size(self) -> int:
        """Tasks of all ranks together."""
        return 3 * self.stages * self.micro_batches

    @cached_property
    def rank(self) -> tuple[int, ...]:
        """Rank of each task."""
        return self.placement * 3

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Stages on each rank."""
        return tuple(tuple(s for s, home in enumerate(self.placement) if home == r) for r in range(self.ranks))

    @cached_property
    def needs(self) -> tuple[int, ...]:
        """The task whose k-th run a task's k-th run needs; 3 x stages for the first forward, which needs none."""
        s = self.stages
        forwards = [3 * s, *range(s - 1)]
        return (*forwards, *range(s + 1, 2 * s), s - 1, *range(s, 2 * s))

    @cached_property
    def lag(self) -> tuple[float, ...]:
        """How long what a task needs is under way to it."""
        return (0.0, *self.hop, *self.hop, 0.0, *[0.0] * self.stages)

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """The tasks that need a task, weight gradients left out: they are on its rank."""
        return tuple(tuple(y for y in range(2 * self.stages) if self.needs[y] == x) for x in range(3 * self.stages))

    @cached_property
    def turn(self) -> tuple[float, ...]:
        """The least time from the end of a stage's forward to the start of its input gradient."""
        s, t = self.stages, self.duration
        turn = [0.0] * s
        for x in range(s - 2, -1, -1):
            turn[x] = 2 * self.hop[x] + t[x + 1] + turn[x + 1] + t[s + x + 1]
        return tuple(turn)

    @cached_property
    def lives(self) -> tuple[float, ...]:
        """The least time that a rank holds the activations of one micro-batch, in turn or at once, by rank."""
        s, t = self.stages, self.duration
        return tuple(sum(t[x] + self.turn[x] + t[s + x] + t[2 * s + x] for x in held) for held in self.held)

    @cached_property
    def lower_bound(self) -> float:
        """A makespan that no order of these tasks within the memory can beat; the largest of three, over the ranks.

        A rank starts when its first micro-batch can have come and works off all it has; before its first input gradient
        can start it has only as many forwards to do as its memory takes. After its last input gradient those of the
        stages before and the first stage's weight gradient follow. And what it holds over time, memory x time, is at
        least the shortest life of an activation, times their number.
        """
        s, m, t = self.stages, self.micro_batches, self.duration
        comes, after = [0.0] * s, [t[2 * s]] + [0.0] * (s - 1)
        for x in range(1, s):
            comes[x] = comes[x - 1] + t[x - 1] + self.hop[x - 1]
            after[x] = max(t[2 * s + x], self.hop[x - 1] + t[s + x - 1] + after[x - 1])
        best = 0.0
        for limit, held, lives in zip(self.limit, self.held, self.lives, strict=True):
            first, last = held[0], held[-1]
            forwards, inputs, weights = (m * sum(t[kind * s + x] for x in held) for kind in range(3))
            gradients_from = comes[last] + t[last] + self.turn[last]
            until_then = sum(nlargest(limit, [t[x] for x in held for _ in range(m)]))
            start = gradients_from - min(gradients_from - comes[first], until_then)
            best = max(best, start + forwards + inputs + max(weights, after[first]), comes[first] + m * lives / limit)
        return best


@dataclass(frozen=True)
class Clock:
    """When tasks end: `by_task[x][k]`, with zeros for what the first forward needs, and `by_rank[r][position]`."""

    makespan: float  # infinite where the ranks wait for each other in a circle
    by_task: list[list[float]]
    by_rank: list[list[float]]


def run(problem: Problem, orders: list[Order], before: Clock | None = None, since: float = 0.0) -> Clock:
    """Let every rank take its tasks in turn, each as soon as what it needs has come.

    before: the clock of orders in which the first task that differs ended at `since`, to be taken over up to there.
    """
    needs, lag, duration = problem.needs, problem.lag, problem.duration
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
        return Clock(inf, by_task, by_rank)
    return Clock(max(ends[-1] for ends in by_rank), by_task, by_rank)


def fits(problem: Problem, rank: int, order: Order) -> bool:
    """Whether a rank's order holds its memory limit and takes no task before one of its own that it needs."""
    stages, limit, needs, on = problem.stages, problem.limit[rank], problem.needs, problem.rank
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


def orders_of(program: PipelineProgram) -> list[Order]:
    """The order of tasks in a program of one replica: a backward in two halves, groups and micro-batches forgotten."""
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


def program_from(name: str, problem: Problem, orders: list[Order]) -> PipelineProgram:
    """The program of the orders."""
    rows = []
    for rank, order in enumerate(orders):
        count = [0] * (3 * problem.stages)
        for group, x in enumerate(order):
            rows.append((rank, group, KINDS[x // problem.stages], x % problem.stages, 0, count[x], 0))
            count[x] += 1
    return build_program(name, problem.ranks, problem.micro_batches, (problem.placement,), np.array(rows))
