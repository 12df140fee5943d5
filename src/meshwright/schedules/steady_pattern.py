"""Orders that repeat: one micro-batch's tasks laid out so that every next micro-batch does the same a period later.

The building blocks of Qi et al. 2024, Pipeline Parallelism with Controllable Memory, arXiv 2405.15362: how long an
activation lives, over the period, is how many a rank holds. For uneven times the block is found as compilers lay out
loops (modulo scheduling: Rau, Iterative Modulo Scheduling, MICRO 1994).
"""

from __future__ import annotations

from meshwright.schedules.orders import Order, Problem


def shortest_period(problem: Problem) -> float:
    """The least time between micro-batches: what the busiest rank does for one, or how fast the memory lets them in."""
    s, t = problem.stages, problem.duration
    work = max(sum(t[x] + t[s + x] + t[2 * s + x] for x in held) for held in problem.held)
    return max(work, *(lives / limit for lives, limit in zip(problem.lives, problem.limit, strict=True)))


def steady_orders(problem: Problem, every: float, delays: tuple[float, ...]) -> list[Order]:
    """The orders of a block that is repeated after the time `every`.

    A micro-batch's forwards and input gradients go on as soon as what they need has come and their rank is free at this
    time of every period, weight gradients take what is left. delays: added before each forward by chunk, then before
    each input gradient by chunk; they shift where ranks meet themselves. A period that has no room left for a task lets
    it start at once; the clock then shifts what follows.
    """
    s, ranks, hair = problem.stages, problem.ranks, 1e-9 * every
    taken: list[list[tuple[float, float]]] = [[] for _ in range(ranks)]  # [start, end) in the period, by rank
    start = [0.0] * (3 * s)

    def place(task: int, earliest: float) -> float:
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
        end = place(x, end + problem.lag[x] + delays[x // ranks])
    for x in range(s - 1, -1, -1):
        end = place(s + x, end + problem.lag[s + x] + delays[problem.chunks + x // ranks])
    for x in range(s - 1, -1, -1):
        place(2 * s + x, start[s + x] + problem.duration[s + x])
    orders = []
    for held in problem.held:
        tasks = [kind * s + x for x in held for kind in range(3)]
        runs = sorted((start[x] + k * every, x) for x in tasks for k in range(problem.micro_batches))
        orders.append([x for _, x in runs])
    return orders
