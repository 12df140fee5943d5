"""Better orders from good ones: move single tasks along the critical path, and keep what is no worse.

The critical path is the chain of tasks that makes the makespan what it is. It consists of blocks, each a run of tasks
without a gap on one rank, joined by transfers. A shorter makespan needs another order inside a block: a task moved out
behind its last or before its first one (Dell'Amico and Trubian 1993, Applying tabu search to the job-shop scheduling
problem). Weight gradients leave a block most easily: nobody waits for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from random import Random

from meshwright.schedules.orders import Clock, Order, Problem, fits, run

Block = tuple[int, int, int]  # rank, first and last position


def critical_blocks(problem: Problem, orders: list[Order], clock: Clock) -> list[Block]:
    """The blocks of one critical path, from the end to the start."""
    rank = max(range(problem.ranks), key=lambda r: clock.by_rank[r][-1])
    position = last = len(orders[rank]) - 1
    blocks, hair = [], 1e-9 * clock.makespan
    while True:
        ends = clock.by_rank[rank]
        task, end = orders[rank][position], ends[position]
        start = end - problem.duration[task]
        if position > 0 and ends[position - 1] >= start - hair:
            position -= 1
            continue
        blocks.append((rank, position, last))
        needed = problem.needs[task]
        if needed == 3 * problem.stages or start <= hair:
            return blocks
        k = orders[rank][:position].count(task)
        rank = problem.rank[needed]
        position = bisect_left(clock.by_rank[rank], clock.by_task[needed][k])
        while orders[rank][position] != needed:  # tasks that take no time end together
            position += 1
        last = position


def improve(
    problem: Problem,
    orders: list[Order],
    runs: int,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[float, list[Order]]:
    """Makespan and orders, no worse than those given, after as many trials as `runs` of the whole clock pay for.

    The same seed gives the same result. Trials of equal worth are taken too, to leave plateaus. Ends early at the lower
    bound or when `stop` says so.
    """
    draw, middle = Random(seed), problem.micro_batches // 2
    enough = problem.lower_bound * (1 + 1e-9)

    def worth(clock: Clock) -> float:
        """The makespan; a little also when the middle and the last micro-batch are through, to tell equals apart."""
        stages = range(2 * problem.stages)
        return clock.makespan + 5e-4 * sum(clock.by_task[x][-1] + clock.by_task[x][middle] for x in stages) / len(
            stages
        )

    now, clock = [list(order) for order in orders], run(problem, orders)
    best, found, value = clock.makespan, now[:], worth(clock)
    blocks = critical_blocks(problem, now, clock)
    for _ in range(runs):
        if best <= enough or stop():
            break
        rank, order = _moved(problem, now, blocks, draw)
        if order is None:
            continue
        old = now[rank]
        first = next(i for i, (a, b) in enumerate(zip(old, order, strict=True)) if a != b)
        now[rank] = order
        trial = run(problem, now, clock, clock.by_rank[rank][first])
        if trial.makespan <= clock.makespan * 1.01 and worth(trial) <= value * (1 + 1e-12):
            clock, value = trial, worth(trial)
            blocks = critical_blocks(problem, now, clock)
            if clock.makespan < best * (1 - 1e-12):
                best, found = clock.makespan, now[:]
        else:
            now[rank] = old
    return best, found


def _moved(problem: Problem, orders: list[Order], blocks: list[Block], draw: Random) -> tuple[int, Order | None]:
    """A rank and a new order for it that its memory allows; None if ten moves drawn at random all fail."""
    for _ in range(10):
        rank, first, last = blocks[int(draw.random() * len(blocks))]
        order = orders[rank]
        one, how = first + int(draw.random() * (last - first + 1)), draw.random()
        if how < 0.4:  # out behind the last, or a little further
            to = last + (int(draw.random() * 8) if draw.random() < 0.3 else 0)
            to = min(to, len(order) - 1)
        elif how < 0.8:  # out before the first, or a little further
            to = max(0, first - (int(draw.random() * 8) if draw.random() < 0.4 else 0))
        else:
            to = min(one + 1, last)
        new = order[:one] + order[one + 1 :]
        new.insert(to, order[one])
        if new != order and fits(problem, rank, new):
            return rank, new
    return 0, None
