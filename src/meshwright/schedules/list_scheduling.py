"""List scheduling: orders built in the order of time, where a rule picks the next task of each free rank.

Two rules: a greedy one, which knows only arrived inputs and those in flight (after the heuristic of Qi et al. 2024,
Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1), and one that follows a given order but runs a later
task ahead of one that has to wait, like out-of-order execution in a processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from meshwright.schedules.orders import Order, Problem


@dataclass
class PartialOrders:
    """State of all ranks while a schedule is built task by task, from which a scheduling rule chooses the next task of
    a rank. A task is one pass on one stage, numbered kind x stages + stage, with kinds 0 forward, 1 input gradient, 2
    weight gradient; its k-th run (from 0) is on micro-batch k.

    Attributes:
        problem: Ranks, placement, task durations and memory limits.
        ends: [tasks + 1], end times of the runs of each task so far; the last list is all zeros and stands for the
            input of the first stage's forward.
        used: [ranks], saved activations on each rank, in units of one stage and micro-batch.
    """

    problem: Problem
    ends: list[list[float]]  # [tasks + 1], end times of the runs so far; the last list is zeros, for the first forward
    used: list[int]  # [ranks], activations held, in stages

    def find_input_time(self, task: int) -> float:
        """Return the time at which the input of a task's next run arrives at its rank: the end of the run that computes
        the input, plus the transfer time; infinite if that run is not scheduled yet.

        task: number of a task (one pass on one stage), kind x stages + stage, with kinds 0 forward, 1 input gradient, 2
        weight gradient. The next run of a task is on the first micro-batch that the task has not processed.
        """
        needed, k = self.ends[self.problem.predecessor[task]], len(self.ends[task])
        return needed[k] + self.problem.lag[task] if k < len(needed) else inf


# (rank, now) -> (task to run now, 0), or (-1, time until which to wait; infinite: until a predecessor is scheduled).
Rule = Callable[[int, float], tuple[int, float]]


def _build_orders(problem: Problem, rule: Rule, state: PartialOrders) -> tuple[float, list[Order]]:
    """Build the task orders of all ranks: whenever a rank is free, ask `rule` for its next task (one pass on one
    stage). Return (makespan, orders), where orders[rank] lists the rank's task numbers. The makespan (total time) is
    infinite if some tasks never run.

    problem: ranks, placement, task durations and memory limits. rule: function (rank, time) that returns (task number,
    0) to run this task now, or (-1, time at which to ask again). `rule` is also called for a rank when a task that
    produces an input for the rank is scheduled. state: end times and memory use of all ranks, which this function
    updates."""
    stages = problem.stages
    orders: list[Order] = [[] for _ in range(problem.ranks)]
    free = [0.0] * problem.ranks
    waits = [False] * problem.ranks
    turns = [(0.0, rank) for rank in range(problem.ranks)]
    left = problem.size
    while turns:
        now, rank = heappop(turns)
        if now < free[rank]:
            continue
        task, until = rule(rank, now)
        waits[rank] = task < 0
        if task < 0:
            if until < inf:
                heappush(turns, (until, rank))
            continue
        end = now + problem.duration[task]
        state.ends[task].append(end)
        orders[rank].append(task)
        state.used[rank] += (task < stages) - (task >= 2 * stages)
        free[rank] = end
        left -= 1
        heappush(turns, (end, rank))
        for reader in problem.successors[task]:
            other = problem.rank[reader]
            if waits[other]:  # it has one more task to wait for
                heappush(turns, (now, other))
    return (inf if left else max(free)), orders


@dataclass(frozen=True)
class GreedyParameters:
    """Parameters of greedy list scheduling, which picks the next step of each free rank.

    Attributes:
        cap: [ranks], maximum saved activations of each rank, in units of one stage and micro-batch.
        forward_first: True to prefer forwards to input gradients.
        deep_first: True to prefer forwards of later stages to forwards of earlier stages.
        hold: Fraction of a forward's duration. A rank does not start the forward if an input gradient will arrive
            within this time.
        patience: Fraction of a weight gradient's duration. The weight gradient starts only in an idle interval of at
            least this length, or when memory is full.
    """

    cap: tuple[int, ...]
    forward_first: bool = False
    deep_first: bool = True
    hold: float = 0.0
    patience: float = 1.0


def schedule_greedily(problem: Problem, greed: GreedyParameters) -> tuple[float, list[Order]]:
    """Build task orders by greedy list scheduling; return (makespan, task numbers of each rank in order). A task is one
    pass on one stage.

    problem: placement, task durations and memory limits. greed: parameters of the rule that picks the next task of a
    free rank. Input gradients run as they arrive, forwards as memory allows, weight gradients in idle intervals or when
    memory is full. Never deadlocks: a forward is admitted only if the oldest micro-batch on the rank can still pass
    through all of the rank's stages (banker's algorithm).
    """
    s, m, duration = problem.stages, problem.micro_batches, problem.duration
    state = PartialOrders(problem, [[] for _ in range(3 * s)] + [[0.0] * m], [0] * problem.ranks)
    ends = state.ends
    preferred = [sorted(held, reverse=greed.deep_first) for held in problem.stages_by_rank]

    def choose_task(rank: int, now: float) -> tuple[int, float]:
        """Choose the next task (one pass on one stage) of `rank` at time `now`. Return (task number, 0) to run it now,
        or (-1, time at which to ask again); this time is infinite if the rank has to wait for a task that is not
        scheduled yet, or has no tasks left."""
        held = problem.stages_by_rank[rank]
        oldest = min(len(ends[2 * s + x]) for x in held)
        reserved = sum(len(ends[x]) <= oldest for x in held)
        room = greed.cap[rank] - state.used[rank]
        forward, forward_comes, full = -1, inf, False
        for x in preferred[rank]:
            if len(ends[x]) == m:
                continue
            comes = state.find_input_time(x)
            admitted = room > 0 if len(ends[x]) == oldest else room > reserved
            if comes <= now:
                full = full or not admitted
                if admitted and forward < 0:
                    forward = x
            elif admitted:
                forward_comes = min(forward_comes, comes)
        gradient, gradient_comes = -1, inf
        for x in held:
            if len(ends[s + x]) < m:
                comes = state.find_input_time(s + x)
                if comes <= now:
                    gradient = s + x  # of the latest stage, because earlier stages wait for it
                else:
                    gradient_comes = min(gradient_comes, comes)
        waiting = [2 * s + x for x in held if len(ends[2 * s + x]) < len(ends[s + x])]
        if gradient >= 0 and not (greed.forward_first and forward >= 0):
            return gradient, 0
        until = gradient_comes
        if forward >= 0:
            if greed.forward_first or gradient_comes - now >= greed.hold * duration[forward]:
                return forward, 0
        else:
            until = min(until, forward_comes)
        for x in waiting:
            if full or until - now >= greed.patience * duration[x]:
                return x, 0
        return -1, until

    return _build_orders(problem, choose_task, state)


def reorder_out_of_order(
    problem: Problem, orders: list[Order], window: int, patience: float
) -> tuple[float, list[Order]]:
    """Reorder task orders as a processor with out-of-order execution would: while a rank's next task waits for its
    input, a later task runs ahead. Return (makespan, task numbers of each rank in order). A task is one pass on one
    stage.

    problem: placement, task durations and memory limits. orders: for each rank, its task numbers in execution order.
    window: number of next tasks of the rank that may run ahead; the memory limit holds for them too. patience: a later
    task runs ahead only if at least this fraction of its duration passes before the input of an overtaken task arrives
    (1: overtaken tasks are not delayed; 0: any delay is accepted)."""
    s, duration = problem.stages, problem.duration
    state = PartialOrders(problem, [[] for _ in range(3 * s)] + [[0.0] * problem.micro_batches], [0] * problem.ranks)
    ends, needs, lag = state.ends, problem.predecessor, problem.lag
    left = [order[::-1] for order in orders]

    def choose_task(rank: int, now: float) -> tuple[int, float]:
        """Choose the next task (one pass on one stage) of `rank` at time `now`. Return (task number, 0) to run it now,
        or (-1, time at which to ask again); this time is infinite if the rank has to wait for a task that is not
        scheduled yet, or has no tasks left."""
        tasks, limit = left[rank], problem.limit[rank]
        used = most = state.used[rank]
        seen, unseen, until = 0, 3 * problem.chunks, inf
        for at in range(len(tasks) - 1, max(-1, len(tasks) - 1 - window), -1):
            x = tasks[at]
            if not seen >> x & 1:
                seen, unseen = seen | 1 << x, unseen - 1
                needed, k = ends[needs[x]], len(ends[x])
                if k < len(needed) and (x >= s or most < limit):
                    comes = needed[k] + lag[x]
                    if comes > now:
                        until = min(until, comes)
                    elif until - now >= patience * duration[x]:
                        del tasks[at]
                        return x, 0
                if not unseen:
                    break
            if x < s:
                used += 1
                most = max(most, used)
            elif x >= 2 * s:
                used -= 1
        return -1, until

    return _build_orders(problem, choose_task, state)
