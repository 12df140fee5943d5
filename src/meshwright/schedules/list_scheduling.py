"""Orders of tasks made as time goes by: whenever a rank is free, a rule picks what it does next.

Two rules: one that knows only what has come in and what is about to (after the heuristic of Qi et al. 2024, Zero Bubble
Pipeline Parallelism, arXiv 2401.10241, section 3.1), and one that follows a given order but takes a later task ahead of
one that has to wait, as processors execute instructions out of order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from meshwright.schedules.orders import Order, Problem


@dataclass
class State:
    """What is known while orders are made. A rule sees the past, and what is already under way."""

    problem: Problem
    ends: list[list[float]]  # of the tasks so far; the last list: zeros for what the first forward needs
    used: list[int]  # activations that each rank holds, in stages

    def comes(self, task: int) -> float:
        """When what the next run of a task needs will be there; infinite while nobody knows."""
        needed, k = self.ends[self.problem.needs[task]], len(self.ends[task])
        return needed[k] + self.problem.lag[task] if k < len(needed) else inf


# (rank, now) -> the task to do now and 0, or -1 and until when to wait (infinite: until something is under way).
Rule = Callable[[int, float], tuple[int, float]]


def _make(problem: Problem, rule: Rule, state: State) -> tuple[float, list[Order]]:
    """Makespan and orders; the makespan is infinite where the rule let the ranks wait for ever."""
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
        for reader in problem.readers[task]:
            other = problem.rank[reader]
            if waits[other]:  # it now knows of one more task that it can wait for
                heappush(turns, (now, other))
    return (inf if left else max(free)), orders


@dataclass(frozen=True)
class Greed:
    """What the greedy rule prefers.

    cap: most activations a rank takes on, by rank, in stages. forward_first: forwards before input gradients.
    deep_first: of the forwards, those of later stages first. hold: wait for an input gradient that is to come within
    this part of a forward's time. patience: a weight gradient fills a gap of at least this part of its time.
    """

    cap: tuple[int, ...]
    forward_first: bool = False
    deep_first: bool = True
    hold: float = 0.0
    patience: float = 1.0


def greedy(problem: Problem, greed: Greed) -> tuple[float, list[Order]]:
    """Makespan and orders by the greedy rule: input gradients as they come, forwards as memory allows, weight gradients
    in the gaps and where memory is full. Never stuck: a forward is let in only if the oldest micro-batch that has not
    left the rank can still pass through all of its stages (the banker's algorithm)."""
    s, m, duration = problem.stages, problem.micro_batches, problem.duration
    state = State(problem, [[] for _ in range(3 * s)] + [[0.0] * m], [0] * problem.ranks)
    ends = state.ends
    preferred = [sorted(held, reverse=greed.deep_first) for held in problem.held]

    def rule(rank: int, now: float) -> tuple[int, float]:
        held = problem.held[rank]
        oldest = min(len(ends[2 * s + x]) for x in held)
        reserved = sum(len(ends[x]) <= oldest for x in held)
        room = greed.cap[rank] - state.used[rank]
        forward, forward_comes, full = -1, inf, False
        for x in preferred[rank]:
            if len(ends[x]) == m:
                continue
            comes = state.comes(x)
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
                comes = state.comes(s + x)
                if comes <= now:
                    gradient = s + x  # the latest stage's: its stages before wait for it
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

    return _make(problem, rule, state)


def out_of_order(problem: Problem, orders: list[Order], window: int, patience: float) -> tuple[float, list[Order]]:
    """Makespan and orders that follow given ones, but take one of the next `window` tasks ahead of those before it that
    cannot start yet, if it is done for the most part (`patience`: how much of its time) before one of them can, and if
    the memory limit still holds for all that it overtakes."""
    s, duration = problem.stages, problem.duration
    state = State(problem, [[] for _ in range(3 * s)] + [[0.0] * problem.micro_batches], [0] * problem.ranks)
    ends, needs, lag = state.ends, problem.needs, problem.lag
    left = [order[::-1] for order in orders]

    def rule(rank: int, now: float) -> tuple[int, float]:
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

    return _make(problem, rule, state)
