"""Search of `auto`: a pipeline schedule for given durations and memory, at least as good as every feasible named
schedule.

Every named schedule is simulated. Then, for each placement, task orders are built in three ways: named schedules with
split backwards, greedy list scheduling, periodic patterns. They are reordered out of order, and the best are improved
by local search. The result is the best of all candidates, so never worse than a named schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from operator import itemgetter
from random import Random
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from meshwright.errors import UserError
from meshwright.names import ASYNCHRONOUS_SCHEDULES, BIDIRECTIONAL_SCHEDULES, SCHEDULE_CHUNKS
from meshwright.program.durations import Durations, StageDurations
from meshwright.program.pipeline import PipelineProgram, build_program, place_cyclically, place_in_v_shape
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.schedules.list_scheduling import GreedyParameters, reorder_out_of_order, schedule_greedily
from meshwright.schedules.local_search import improve_orders
from meshwright.schedules.named import generate_named
from meshwright.schedules.orders import (
    Order,
    Problem,
    build_program_from_orders,
    extract_orders,
    is_feasible,
    simulate_orders,
)
from meshwright.schedules.steady_pattern import build_periodic_orders, compute_shortest_period

TimedOrders: TypeAlias = tuple[float, list[Order]]  # makespan and orders
_get_makespan = itemgetter(0)

EFFORT = 4_000_000
"""Default number of task runs (one pass of one micro-batch on one stage) that the search simulates for each placement,
approximately: one to two seconds."""


@dataclass(frozen=True)
class Candidate:
    """Simulated pipeline schedule that the search for schedule `auto` compares with others.

    Attributes:
        name: Named schedule such as "1f1b", or kind of search.
        program: The schedule.
        makespan: Total time, in the unit of the step durations.
        peak: Peak of saved activations of each rank [ranks], in micro-batches: activations of one micro-batch on one of
            the rank's n stages count as 1/n.
        fits: True if all peaks are within the memory limits.
    """

    name: str
    program: PipelineProgram
    makespan: float
    peak: tuple[float, ...]
    fits: bool


@dataclass(frozen=True)
class SearchResult:
    """Result of the search for schedule `auto`. Times are in the unit in which the durations of steps were given.

    Attributes:
        program: Schedule of the best candidate, renamed `auto`.
        winner: The best candidate.
        candidates: All candidates: first the candidates within the memory limits, then all others; both groups by
            increasing makespan (total time).
        refused: {named schedule: reason why it does not accept the numbers of ranks and micro-batches}.
        lower_bound: Lower bound of the makespan of any schedule with the searched placements and memory limits. None if
            it does not hold for all candidates, because some have two replicas, or overlap a forward with a backward in
            less than the sum of their times.
    """

    program: PipelineProgram
    winner: Candidate
    candidates: tuple[Candidate, ...]  # by makespan, those that fit first
    refused: dict[str, str] = field(default_factory=dict)  # named schedule -> why it does not accept these sizes
    lower_bound: float | None = None

    @property
    def makespan(self) -> float:
        """Makespan (total time) of the winning program, in the unit of the step durations."""
        return self.winner.makespan

    @property
    def gap(self) -> float | None:
        """Difference between the winner's makespan and the lower bound, divided by the lower bound (0.01: 1% above the
        bound); None without a bound."""
        return self.makespan / self.lower_bound - 1 if self.lower_bound else None

    def explain(self) -> str:
        """Return text on the search: one line per candidate, one per named schedule that does not accept these numbers
        of ranks and micro-batches, and a last line that compares the winner with the other candidates."""
        lines = [f"{'candidate':<24} {'makespan':>12} {'peak':>8}"]
        for one in self.candidates:
            note = "" if one.fits else "  over the memory limit"
            lines.append(f"{one.name:<24} {one.makespan:>12.6g} {max(one.peak):>8.4g}{note}")
        lines += [f"{name:<24} {why}" for name, why in self.refused.items()]
        others = [one for one in self.candidates if one.fits and one.name in SCHEDULE_CHUNKS and one is not self.winner]
        won = f"{self.winner.name} wins: makespan {self.makespan:.6g}"
        if others:
            ratio = others[0].makespan / self.makespan if self.makespan else 1.0
            faster = f"{ratio:.4f} times as fast as" if ratio > 1.00005 else "as fast as"
            won += f", {faster} the best other named schedule, {others[0].name}"
        if self.gap is not None:
            optimal = self.gap < 5e-5  # rounding errors of sums of durations
            above = "equal to" if optimal else f"at most {100 * self.gap:.2f}% above"
            won += f"; {above} the lower bound ({self.lower_bound:.6g})"
        return "\n".join([*lines, won])


def search_schedule(
    ranks: int,
    micro_batches: int,
    durations: Durations | StageDurations,
    memory: ArrayLike | None = None,
    chunks: int | None = None,
    weight_copies: int = 1,
    effort: int = EFFORT,
) -> SearchResult:
    """Search for a synchronous pipeline schedule (steps of every rank) with a small makespan, the total time. Durations
    may differ by rank or stage. After Qi et al. 2024, arXiv 2401.10241, section 3, and arXiv 2405.15362.

    ranks, micro_batches: numbers of pipeline ranks and micro-batches. durations: times of the passes of one
    micro-batch, or a function (number of stages) -> `Durations`. A field with one number, or a list [ranks], is the
    time on all stages of a rank together, divided equally among them. A list [stages] ([stages - 1] for transfers) has
    the time of each stage, and so fixes the number of stages per rank.

    memory: maximum number of micro-batches whose activations a rank saves at once (activations on one of its n stages
    count as 1/n); one number, or a list with one per rank; None: no limit. chunks: stages per rank; None: 1 and 2 are
    tried. weight_copies: 2 to also consider named schedules with two replicas of the model. effort: approximate number
    of task runs (one pass of one micro-batch on one stage) to simulate for each placement of stages on ranks. Raises
    UserError for invalid numbers and for a memory below the minimum."""
    timed = _tabulate_durations(ranks, micro_batches, durations, chunks)
    counts = tuple(timed)
    limits = _check_memory(ranks, memory)

    candidates, refused = [], {}
    for name, count in _list_named_schedules(counts, weight_copies):
        try:
            program = generate_named(name, ranks, micro_batches, count)
        except UserError as error:
            refused[name] = str(error)
        else:
            candidates.append(_simulate_candidate(name, program, timed[count], limits))
    best = min((one.makespan for one in candidates if one.fits), default=inf)

    problems = {}
    for name, placement in _list_placements(ranks, counts):
        empty = build_program("", ranks, micro_batches, (placement,), ())
        by_stage = timed[len(placement) // ranks].split(empty)
        problems[name] = Problem.from_durations(ranks, micro_batches, placement, by_stage, limits)
    finished: list[tuple[float, str, list[Order]]] = []
    for name, problem in sorted(problems.items(), key=lambda item: item[1].lower_bound):
        if problem.lower_bound >= best * (1 - 1e-9):
            continue
        seeds = [
            extract_orders(one.program)
            for one in candidates
            if one.fits and one.program.placement == (problem.placement,)
        ]
        makespan, orders = _search_placement(problem, seeds, best, effort)
        finished.append((makespan, name, orders))
        best = min(best, makespan)
    finished.sort(key=_get_makespan)
    for _, name, orders in finished:
        program = build_program_from_orders("auto", problems[name], orders)
        candidates.append(_simulate_candidate(name, program, timed[problems[name].chunks], limits))

    bound = min(problem.lower_bound for problem in problems.values())
    covered = all(each.overlapped is None for each in timed.values()) and weight_copies == 1
    return _choose_winner(candidates, refused, bound if covered else None)


def _choose_winner(candidates: list[Candidate], refused: dict[str, str], bound: float | None) -> SearchResult:
    """Choose the candidate with the smallest makespan among the candidates within the memory limits; return the search
    result, with the winner and all candidates.

    Of candidates with equal makespan, the candidate with the smallest peak memory wins; if the peaks are equal too, a
    named schedule wins. candidates: simulated schedules, at least one within the limits. refused: named schedule ->
    reason why it does not accept the numbers of ranks and micro-batches. bound: lower bound of the makespan, None if
    unknown.
    """
    fitting = [one for one in candidates if one.fits]
    least = min(one.makespan for one in fitting)
    equal = [one for one in fitting if one.makespan <= least * (1 + 1e-9)]
    winner = min(equal, key=lambda one: (max(one.peak), sum(one.peak), one.name not in SCHEDULE_CHUNKS))
    ranked = sorted(candidates, key=lambda one: (not one.fits, one.makespan))
    return SearchResult(replace(winner.program, name="auto"), winner, tuple(ranked), refused, bound)


# Arguments


def _tabulate_durations(
    ranks: int, micro_batches: int, durations: Durations | StageDurations, chunks: int | None
) -> dict[int, Durations]:
    """Return {stages per rank: durations} for the numbers of stages per rank to try: `chunks` if given; else, if a
    field of `durations` is a list with one entry per stage, its length divided by `ranks`; else 1 and 2.

    ranks, micro_batches: numbers of pipeline ranks and micro-batches. durations: `Durations` whose fields are a number,
    a list with one per rank or a list with one per stage; or a function from the number of stages to `Durations`.
    Raises UserError for invalid or contradictory numbers."""
    for what, number in (
        ("ranks", ranks),
        ("micro-batches", micro_batches),
        ("chunks", 1 if chunks is None else chunks),
    ):
        if number < 1:
            raise UserError(f"auto with {number} {what}: at least 1 is needed")
    free = (1, 2) if ranks > 1 else (1,)
    if callable(durations):
        tried = free if chunks is None else (chunks,)
        timed = {count: found for count in tried if (found := durations(ranks * count)) is not None}
        if not timed:
            raise UserError(f"auto on {ranks} ranks: the model cannot be split into {ranks * tried[0]} stages")
        return timed
    settled = set() if chunks is None else {chunks}
    for name in ("forward", "input_gradient", "weight_gradient", "transfer"):
        array = np.asarray(getattr(durations, name), np.float64)
        stages = array.size + (name == "transfer")
        if array.ndim == 0 or (name != "transfer" and stages == ranks):
            continue
        if array.ndim > 1 or stages % ranks:
            right = f"1, {ranks - 1} or {2 * ranks - 1}" if name == "transfer" else f"1, {ranks} or {2 * ranks}"
            raise UserError(f"{name.replace('_', ' ')}: {array.size} values for {ranks} ranks; expected {right}")
        settled.add(stages // ranks)
    if len(settled) > 1:
        raise UserError(
            f"durations by stage are for {' and '.join(map(str, sorted(settled)))} chunks per rank; use one number"
        )
    return dict.fromkeys(settled or free, durations)


def _check_memory(ranks: int, memory: ArrayLike | None) -> tuple[float, ...]:
    """Check the memory limits; return the limit of each rank [ranks], infinite if `memory` is None.

    memory: maximum number of micro-batches whose activations a rank saves at once on all of its stages; one limit for
    all ranks, or one per rank. Raises UserError for a limit below 1, because a rank holds all activations of a
    micro-batch before the backward."""
    array = np.asarray(inf if memory is None else memory, np.float64)
    if array.shape not in ((), (1,), (ranks,)):
        raise UserError(f"memory: {array.size} values; expected 1 or {ranks} (one per rank)")
    limits = tuple(np.broadcast_to(array, (ranks,)).tolist())
    for rank, limit in enumerate(limits):
        if not limit >= 1:
            raise UserError(
                f"memory: {limit:g} micro-batches on rank {rank} are too few for any schedule; the minimum is 1, "
                "because every stage runs forward before the first backward"
            )
    return limits


def _list_named_schedules(counts: tuple[int, ...], weight_copies: int) -> Iterator[tuple[str, int]]:
    """Yield (name, stages per rank) of the named synchronous schedules that the search of `auto` simulates.

    counts: numbers of stages per rank to try. weight_copies: 2 to include schedules with two replicas of the model, 1
    to exclude them.
    """
    for name, (_, least, most) in SCHEDULE_CHUNKS.items():
        if name == "auto" or name in ASYNCHRONOUS_SCHEDULES or (name in BIDIRECTIONAL_SCHEDULES and weight_copies < 2):
            continue
        for count in counts:
            if least <= count and (most is None or count <= most):
                yield name, count


def _list_placements(ranks: int, counts: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield each placement of stages on ranks that the search tries, as (name, placement). The name, such as "search,
    V", is given to the schedules found with this placement. placement[s] is the rank of stage s. ranks: number of
    pipeline ranks. counts: numbers of stages per rank to try."""
    for count in counts:
        yield f"search, {count} chunk{'s' if count > 1 else ''}", place_cyclically(ranks, count)
        if count == 2 and ranks > 1:
            yield "search, V", place_in_v_shape(ranks)


def _simulate_candidate(
    name: str, program: PipelineProgram, durations: Durations, limits: tuple[float, ...]
) -> Candidate:
    """Simulate the pipeline schedule `program`; return it as a candidate of the search.

    name: name of the candidate. durations: times of the schedule's steps, by rank or by stage. limits: [ranks], maximum
    number of micro-batches whose activations a rank saves at once; activations on one of its n stages count as 1/n."""
    timing = simulate_pipeline(program, durations.split(program))
    peak = tuple(timing.peak_activations.tolist())
    fits_all = all(p <= limit + 1e-6 for p, limit in zip(peak, limits, strict=True))
    return Candidate(name, program, timing.makespan, peak, fits_all)


# The search for one placement


def _search_placement(problem: Problem, named: list[list[Order]], known: float, effort: int) -> TimedOrders:
    """Search the best schedule for one placement of stages on ranks; return (makespan, task orders of all ranks). A
    task is one pass on one stage.

    problem: placement, task durations and memory limits. named: task orders of named schedules to start from. known:
    makespan of the best schedule so far; orders with a much larger makespan are not improved further. effort:
    approximate number of task runs (a task on one micro-batch) to simulate. The search ends early when a makespan
    reaches the lower bound.
    """
    enough = problem.lower_bound * (1 + 1e-9)
    runs = max(20, effort // problem.size)
    few = min(3, 1 + runs // 60)
    pools = (
        ([(simulate_orders(problem, orders).makespan, orders) for orders in named], few),
        (_try_greedy(problem, max(4, min(36, runs // 50))), few),
        (_try_patterns(problem, max(16, min(300, runs // 6))), min(12, 2 + runs // 60)),
    )
    starts = [one for pool, keep in pools for one in sorted(pool, key=_get_makespan)[:keep]]
    # Two windows for all starts, more for the best of them, then local search for the best of these.
    windows = list(product((8, 32, 2, 16), (0.05, 1.0, 0.5)))
    for tried, kept in ((windows[:2], 6), (windows[2 : 2 + runs // 200], 4)):
        for at, one in enumerate(starts):
            starts[at] = min(
                [one, *(reorder_out_of_order(problem, one[1], *window) for window in tried)], key=_get_makespan
            )
            if starts[at][0] <= enough:
                return starts[at]
        starts = sorted(starts, key=_get_makespan)[:kept]
    near = 1.06 * min(known, starts[0][0])
    for at, one in enumerate(starts):
        if one[0] <= near:
            starts[at] = improve_orders(problem, one[1], min(1000, runs // 4))
            if starts[at][0] <= enough:
                break
    return min(starts, key=_get_makespan)


def _try_greedy(problem: Problem, trials: int) -> list[TimedOrders]:
    """Build up to `trials` candidate schedules by greedy list scheduling, each with other parameters; return (makespan,
    task orders of all ranks) of each. A task is one pass on one stage.

    problem: placement, task durations and memory limits. Parameters that are usually the best are tried first. Ends
    early when a makespan reaches the lower bound.
    """
    s, ranks = problem.stages, range(problem.ranks)
    found = []
    depths = [problem.micro_batches * problem.chunks, s, 2 * s - 1, 3 * s // 2]
    caps = [tuple(min(depth, problem.limit[r]) for r in ranks) for depth in depths]
    caps += [tuple(max(problem.chunks, min(s - slope * r, problem.limit[r])) for r in ranks) for slope in (1, 2)]
    caps = list(dict.fromkeys(caps))
    rules = list(product((False, True), (0.0, 0.5, 1.0), (1.0, 0.05, 0.5), (True, False)[: problem.chunks]))
    for (forward_first, hold, patience, deep_first), cap in list(product(rules, caps))[:trials]:
        found.append(schedule_greedily(problem, GreedyParameters(cap, forward_first, deep_first, hold, patience)))
        if found[-1][0] <= problem.lower_bound * (1 + 1e-9):
            break
    return found


def _try_patterns(problem: Problem, trials: int) -> list[TimedOrders]:
    """Build up to `trials` candidate schedules in which a fixed pattern of tasks repeats for each micro-batch, one
    period (fixed time) later than for the micro-batch before; return (makespan, task orders of all ranks) of each that
    fits into memory. A task is one pass on one stage.

    problem: placement, task durations and memory limits. The period grows from the shortest possible one; later trials
    also delay tasks at random (fixed seed).
    """
    found, draw = [], Random(0)
    least, v = compute_shortest_period(problem), problem.chunks
    stretch = (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.7, 2.0, 2.5, 3.0)
    delays = (0.0, 0.0, 0.25, 0.5, 1.0, 1.0, 2.0)
    unit = sum(problem.duration) / (3 * problem.stages)
    for trial in range(trials):
        every = least * stretch[trial % len(stretch)]
        drawn = [0.0 if trial < len(stretch) else delays[int(draw.random() * len(delays))] for _ in range(2 * v)]
        orders = build_periodic_orders(problem, every, tuple(unit * delay for delay in drawn))
        if all(is_feasible(problem, rank, order) for rank, order in enumerate(orders)):
            found.append((simulate_orders(problem, orders).makespan, orders))
    return found
