"""Local search: moves of single tasks along the critical path of given orders.

The critical path is the chain of tasks that determines the makespan. It consists of blocks, runs of tasks on one rank
without idle time, joined by transfers. Only another order inside a block can shorten it: a task moves behind the
block's last or before its first one (Dell'Amico and Trubian 1993, Applying tabu search to the job-shop scheduling
problem). Weight gradients leave a block most easily, because nothing waits for them.
"""

from __future__ import annotations

from bisect import bisect_left
from random import Random

from meshwright.schedules.orders import Order, Problem, TaskTimes, is_feasible, simulate_orders

Block = tuple[int, int, int]  # rank, first and last position


def find_critical_blocks(problem: Problem, orders: list[Order], clock: TaskTimes) -> list[Block]:
    """Return the critical path (chain of tasks that determines the makespan) as a list of blocks, from the end of the
    schedule to its start. A block is a sequence of tasks of one rank without idle time between the tasks. It is given
    as (rank, first position, last position), where positions are indices into the rank's order.

    problem: placement and task durations. orders: for each rank, its task numbers in execution order (a task is one
    pass on one stage). clock: end times of the tasks under these orders."""
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
        needed = problem.predecessor[task]
        if needed == 3 * problem.stages or start <= hair:
            return blocks
        k = orders[rank][:position].count(task)
        rank = problem.rank[needed]
        position = bisect_left(clock.by_rank[rank], clock.by_task[needed][k])
        while orders[rank][position] != needed:  # tasks of zero duration end at the same time
            position += 1
        last = position


def improve_orders(problem: Problem, orders: list[Order], runs: int) -> tuple[float, list[Order]]:
    """Improve task orders by local search; return (makespan, improved orders), whose makespan is at most the makespan
    of `orders`.

    problem: placement, task durations and memory limits. orders: for each rank, its task numbers in execution order (a
    task is one pass on one stage). runs: number of moves to try; the search ends early at the lower bound. The seed of
    the random moves is fixed, so equal arguments give equal results. To leave plateaus, moves that hardly change the
    makespan may be accepted too.
    """
    draw, middle = Random(0), problem.micro_batches // 2
    enough = problem.lower_bound * (1 + 1e-9)

    def compute_value(clock: TaskTimes) -> float:
        """Return the value that the search minimizes: the makespan (total time) plus a small term that prefers, of
        orders of equal makespan, those in which tasks end earlier. The term is 0.0005 times the end times of the middle
        and the last micro-batch (their sum, averaged over the forward and input-gradient tasks).

        clock: end times of the tasks (passes on one stage).
        """
        stages = range(2 * problem.stages)
        return clock.makespan + 5e-4 * sum(clock.by_task[x][-1] + clock.by_task[x][middle] for x in stages) / len(
            stages
        )

    now, clock = [list(order) for order in orders], simulate_orders(problem, orders)
    best, found, value = clock.makespan, now[:], compute_value(clock)
    blocks = find_critical_blocks(problem, now, clock)
    for _ in range(runs):
        if best <= enough:
            break
        rank, order = _draw_move(problem, now, blocks, draw)
        if order is None:
            continue
        old = now[rank]
        first = next(i for i, (a, b) in enumerate(zip(old, order, strict=True)) if a != b)
        now[rank] = order
        trial = simulate_orders(problem, now, clock, clock.by_rank[rank][first])
        if trial.makespan <= clock.makespan * 1.01 and compute_value(trial) <= value * (1 + 1e-12):
            clock, value = trial, compute_value(trial)
            blocks = find_critical_blocks(problem, now, clock)
            if clock.makespan < best * (1 - 1e-12):
                best, found = clock.makespan, now[:]
        else:
            now[rank] = old
    return best, found


def _draw_move(problem: Problem, orders: list[Order], blocks: list[Block], draw: Random) -> tuple[int, Order | None]:
    """Draw a random move of one task (a pass on one stage) on the critical path; return (rank, new feasible order of
    that rank). The order is None if ten draws in a row give no feasible one. The task moves by one position, or to the
    start or end of its block, or a few positions beyond the block.

    problem: placement and memory limits. orders: for each rank, its task numbers in execution order. blocks: (rank,
    first position, last position) of consecutive tasks on the critical path. draw: random-number generator."""
    for _ in range(10):
        rank, first, last = blocks[int(draw.random() * len(blocks))]
        order = orders[rank]
        one, how = first + int(draw.random() * (last - first + 1)), draw.random()
        if how < 0.4:  # behind the last task of the block, or a little further
            to = last + (int(draw.random() * 8) if draw.random() < 0.3 else 0)
            to = min(to, len(order) - 1)
        elif how < 0.8:  # before the first task of the block, or a little further
            to = max(0, first - (int(draw.random() * 8) if draw.random() < 0.4 else 0))
        else:
            to = min(one + 1, last)
        new = order[:one] + order[one + 1 :]
        new.insert(to, order[one])
        if new != order and is_feasible(problem, rank, new):
            return rank, new
    return 0, None
