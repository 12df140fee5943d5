"""Periodic orders: the tasks of one micro-batch, repeated for every micro-batch one period later.

The building blocks of Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: a rank holds as
many activations as their lifetime divided by the period. For uneven durations the block is found by modulo scheduling,
as compilers schedule loops (Rau, Iterative Modulo Scheduling, MICRO 1994).
"""

from __future__ import annotations

from meshwright.schedules.orders import Order, Problem


def compute_shortest_period(problem: Problem) -> float:
    """Return a lower bound of the period (time per micro-batch while the pipeline is full), in the unit of the step
    durations. The bound is the larger of two maxima over ranks: the rank's work on one micro-batch; the memory-time
    product of one micro-batch's activations on the rank, divided by the rank's memory limit.

    problem: placement of stages, task durations and memory limits."""
    s, t = problem.stages, problem.duration
    work = max(sum(t[x] + t[s + x] + t[2 * s + x] for x in held) for held in problem.stages_by_rank)
    return max(
        work, *(lives / limit for lives, limit in zip(problem.activation_memory_time, problem.limit, strict=True))
    )


def build_periodic_orders(problem: Problem, every: float, delays: tuple[float, ...]) -> list[Order]:
    """Build task orders in which the tasks of micro-batch k start k x `every` time units after the tasks of micro-batch
    0 (modulo scheduling); return for each rank its task numbers in execution order. A task is one pass on one stage.

    problem: placement of stages, task durations and memory limits. every: period, in the unit of the durations. delays:
    [2 x stages per rank], times added, to separate tasks that collide on a rank: first a time before the forward of
    each stage of a rank, then a time before the input gradient of each stage.

    Forwards and input gradients of micro-batch 0 start as soon as their input has arrived and the rank is free at that
    point of the period; weight gradients fill the remaining gaps. A task that fits into no gap overlaps other tasks,
    which is allowed because only the order is used.
    """
    s, ranks, hair = problem.stages, problem.ranks, 1e-9 * every
    taken: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]  # [start, end) in the period, by rank
    start = [0.0] * (3 * s)

    def place_task(task: int, earliest: float) -> float:
        """Choose when a task (one pass on one stage) of micro-batch 0 starts: the first time from `earliest` on at
        which no other task of its rank, repeated in every period, runs. Return the task's end time. If there is no such
        time, it starts at `earliest`."""
        lasts, mine = problem.duration[task], taken[problem.rank[task]]
        at = earliest
        for _ in range(len(mine) + 1):
            phase = at % every
            shift = max((b - phase for a, b in mine if a < phase + lasts - hair and phase < b - hair), default=0.0)
            if not shift:
                mine += [(phase, phase + lasts), (phase - every, phase + lasts - every)]
                mine.append((phase + every, phase + lasts + every))
                break
            at += shift
        else:
            at = earliest
        start[task] = at
        return at + lasts

    end = 0.0
    for x in range(s):
        end = place_task(x, end + problem.lag[x] + delays[x // ranks])
    for x in range(s - 1, -1, -1):
        end = place_task(s + x, end + problem.lag[s + x] + delays[problem.chunks + x // ranks])
    for x in range(s - 1, -1, -1):
        place_task(2 * s + x, start[s + x] + problem.duration[s + x])
    orders = []
    for held in problem.stages_by_rank:
        tasks = [kind * s + x for x in held for kind in range(3)]
        runs = sorted((start[x] + k * every, x) for x in tasks for k in range(problem.micro_batches))
        orders.append([x for _, x in runs])
    return orders
