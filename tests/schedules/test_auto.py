"""`auto`: never worse than a named schedule, better for uneven durations, within memory, optimal for small sizes."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.names import BIDIRECTIONAL_SCHEDULES, SCHEDULE_CHUNKS
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.durations import Durations
from meshwright.program.pipeline import PipelineProgram, place_cyclically, place_in_v_shape
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.schedules.auto import search_schedule
from meshwright.schedules.library import generate
from meshwright.schedules.list_scheduling import GreedyParameters, reorder_out_of_order, schedule_greedily
from meshwright.schedules.local_search import find_critical_blocks, improve_orders
from meshwright.schedules.orders import Problem, build_program_from_orders, extract_orders, is_feasible, simulate_orders
from meshwright.schedules.report import schedule
from meshwright.schedules.steady_pattern import build_periodic_orders, compute_shortest_period
from meshwright.schedules.transfers import with_transfers

QUICK, THOROUGH = 40_000, 400_000  # task runs; no claim here depends on a long search
TIMES = st.sampled_from((0.1, 0.4, 0.5, 1.0, 1.0, 1.3, 2.0))


def makespan_and_peak(program: PipelineProgram, durations: Durations) -> tuple[float, list[float]]:
    """Return makespan and peak activations by the simulator, for durations by rank."""
    by_stage = Durations.per_rank(
        program, durations.forward, durations.input_gradient, durations.weight_gradient, durations.transfer
    )
    timing = simulate_pipeline(program, by_stage)
    return timing.makespan, timing.peak_activations.tolist()


def named_that_fit(ranks: int, micro_batches: int, durations: Durations, memory: float) -> dict[str, float]:
    """Return the makespan of each synchronous named schedule with one replica within the memory limit."""
    found = {}
    for name in SCHEDULE_CHUNKS:
        if name in ("auto", "pipedream", "pipedream-2bw", *BIDIRECTIONAL_SCHEDULES):
            continue
        try:
            program = generate(name, ranks, micro_batches)
        except UserError:
            continue
        makespan, peak = makespan_and_peak(program, durations)
        if max(peak) <= memory + 1e-9:
            found[name] = makespan
    return found


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, Durations, float]:
    ranks, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    by_rank = st.lists(TIMES, min_size=ranks, max_size=ranks)
    durations = Durations(draw(by_rank), draw(by_rank), draw(by_rank), draw(st.sampled_from((0.0, 0.05, 0.5))))
    return ranks, micro_batches, durations, draw(st.sampled_from((1.0, 1.5, 2.0, 3.0, inf)))


@settings(max_examples=25)
@given(problems())
def test_never_worse_than_a_named_schedule_and_within_memory(problem):
    ranks, micro_batches, durations, memory = problem
    found = search_schedule(ranks, micro_batches, durations, memory, effort=QUICK)
    check_pipeline(found.program)
    makespan, peak = makespan_and_peak(found.program, durations)
    assert makespan == pytest.approx(found.makespan)
    assert max(peak) <= memory
    assert makespan <= min(named_that_fit(ranks, micro_batches, durations, memory).values(), default=inf) * (1 + 1e-9)
    assert found.lower_bound is not None and makespan >= found.lower_bound * (1 - 1e-9)


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 3), (5, 10), (8, 16)])
@pytest.mark.parametrize("memory", [None, 1.0, 0.5])  # as a fraction of the number of ranks
def test_never_worse_on_even_times_either(ranks, micro_batches, memory):
    limit = inf if memory is None else max(1.0, memory * ranks)
    durations = Durations(1.0, 1.0, 1.0)
    found = search_schedule(ranks, micro_batches, durations, limit, effort=QUICK)
    named = named_that_fit(ranks, micro_batches, durations, limit)
    assert found.makespan <= min(named.values(), default=inf) * (1 + 1e-9)
    assert max(found.winner.peak) <= limit


UNEVEN = {
    "weight gradient half of the input gradient, transfers": (Durations(1.0, 1.2, 0.6, 0.1), 4),
    "the same without a limit": (Durations(1.0, 1.2, 0.6, 0.1), None),
    "embedding and loss": (Durations([1.2, 1, 1, 1.5], [1.2, 1, 1, 1.5], 1.0), 3),
    "one slow rank": (Durations([1, 1.4, 1, 1], [1, 1.4, 1, 1], [1, 1.4, 1, 1], 0.05), 3),
    "hardly a weight gradient": (Durations(1.0, 1.4, 0.2), None),
    "hardly a weight gradient, little memory": (Durations(1.0, 1.4, 0.2), 2),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_strictly_better_on_uneven_times(case):
    durations, memory = UNEVEN[case]
    program = search_schedule(4, 8, durations, memory, effort=THOROUGH).program
    limit = inf if memory is None else memory
    makespan, peak = makespan_and_peak(program, durations)
    assert max(peak) <= limit
    assert makespan < 0.995 * min(named_that_fit(4, 8, durations, limit).values())


def test_the_program_checks_with_transfers_too():
    durations, memory = UNEVEN["weight gradient half of the input gradient, transfers"]
    program = search_schedule(4, 8, durations, memory, effort=QUICK).program
    check_pipeline(with_transfers(program, Durations.per_rank(program, 1.0, 1.2, 0.6, 0.1)))


# Against every possible order


def every_order(micro_batches: int, rank: int, ranks: int) -> list[list[int]]:
    """Return all orders of the tasks of one stage in which each kind runs in micro-batch order."""
    found: list[list[int]] = []

    def go_on(order: list[int], counts: tuple[int, int, int]) -> None:
        if len(order) == 3 * micro_batches:
            found.append(order)
        for kind in range(3):
            if counts[kind] < (micro_batches if kind == 0 else counts[kind - 1]):
                after = tuple(count + (at == kind) for at, count in enumerate(counts))
                go_on([*order, kind * ranks + rank], after)

    go_on([], (0, 0, 0))
    return found


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 1), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("memory", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_search_is_optimal_where_exhaustive_search_is_possible(ranks, micro_batches, memory, seed):
    draw = np.random.default_rng([seed, ranks, micro_batches, memory])
    times = draw.choice([0.2, 0.5, 1.0, 1.3, 2.0], (3, ranks))
    durations = Durations(*times, transfer=float(draw.choice([0.0, 0.1, 0.4])))
    problem = Problem.from_durations(ranks, micro_batches, place_cyclically(ranks), durations, (float(memory),) * ranks)
    orders = [
        [order for order in every_order(micro_batches, rank, ranks) if is_feasible(problem, rank, order)]
        for rank in range(ranks)
    ]
    least = min(simulate_orders(problem, list(each)).makespan for each in product(*orders))
    found = search_schedule(ranks, micro_batches, durations, memory, chunks=1, effort=THOROUGH)
    assert found.makespan == pytest.approx(least)
    assert problem.lower_bound <= least * (1 + 1e-9)


def test_taking_micro_batches_in_order_loses_no_solution():
    """All orders of two micro-batches on two ranks, against those in which each kind runs in micro-batch order."""
    durations = Durations([1.0, 0.7], [0.4, 1.5], [0.3, 1.0], 0.2)
    problem = Problem.from_durations(2, 2, place_cyclically(2), durations, (inf, inf))
    by_number = min(
        simulate_orders(problem, list(each)).makespan for each in product(*(every_order(2, r, 2) for r in range(2)))
    )
    lasts = {
        (kind, stage): t
        for kind, times in enumerate(([1.0, 0.7], [0.4, 1.5], [0.3, 1.0]))
        for stage, t in enumerate(times)
    }
    tasks = list(product(range(3), range(2)))  # kind, micro-batch

    def all_orders(rest: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        if not rest:
            return [[]]
        ready = [t for t in rest if t[0] == 0 or (t[0] - 1, t[1]) not in rest]
        return [[t, *more] for t in ready for more in all_orders([r for r in rest if r != t])]

    def clock(orders: tuple[list[tuple[int, int]], ...]) -> float:
        ends: dict[tuple[int, int, int], float] = {}  # (kind, micro-batch, stage)
        position, free, moved = [0, 0], [0.0, 0.0], True
        while moved:
            moved = False
            for stage in range(2):
                while position[stage] < 6:
                    kind, m = orders[stage][position[stage]]
                    needed = {(0, 1): (0, m, 0), (1, 0): (1, m, 1), (1, 1): (0, m, 1)}.get((kind, stage))
                    needed = (1, m, stage) if kind == 2 else needed
                    if needed is not None and needed not in ends:
                        break
                    comes = 0.0 if needed is None else ends[needed] + (0.2 if needed[2] != stage else 0.0)
                    free[stage] = ends[kind, m, stage] = max(free[stage], comes) + lasts[kind, stage]
                    position[stage], moved = position[stage] + 1, True
        return max(free) if position == [6, 6] else inf

    assert min(clock(each) for each in product(all_orders(tasks), repeat=2)) == pytest.approx(by_number)


# The parts of the search

LAYOUTS = {"one chunk": place_cyclically(4), "two chunks": place_cyclically(4, 2), "V": place_in_v_shape(4)}


def uneven_problem(layout: str, limit: float = inf, seed: int = 0) -> tuple[Problem, Durations]:
    draw, stages = np.random.default_rng(seed), len(LAYOUTS[layout])
    durations = Durations(*draw.uniform(0.1, 2.0, (3, stages)), transfer=draw.uniform(0, 0.3, stages - 1))
    return Problem.from_durations(4, 6, LAYOUTS[layout], durations, (limit,) * 4), durations


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limit", [1.0, 2.0, inf])
def test_its_clock_and_its_memory_are_the_simulators(layout, limit):
    problem, durations = uneven_problem(layout, limit)
    makespan, orders = schedule_greedily(problem, GreedyParameters(problem.limit))
    program = build_program_from_orders("greedy", problem, orders)
    check_pipeline(program)
    timing = simulate_pipeline(program, durations)
    assert timing.makespan == pytest.approx(makespan) == pytest.approx(simulate_orders(problem, orders).makespan)
    assert max(timing.peak_activations) <= limit
    assert extract_orders(program) == orders


@pytest.mark.parametrize("layout", LAYOUTS)
def test_incremental_timing_equals_full_timing(layout):
    problem, _ = uneven_problem(layout)
    _, orders = schedule_greedily(problem, GreedyParameters(problem.limit))
    clock, differed = simulate_orders(problem, orders), 0
    for rank, position in product(range(4), range(len(orders[0]) - 1)):
        changed = [list(order) for order in orders]
        changed[rank][position : position + 2] = reversed(changed[rank][position : position + 2])
        if is_feasible(problem, rank, changed[rank]):
            whole = simulate_orders(problem, changed)
            part = simulate_orders(problem, changed, clock, clock.by_rank[rank][position])
            assert part.makespan == whole.makespan
            assert whole.makespan == inf or part.by_task == whole.by_task
            differed += whole.makespan != clock.makespan
    assert differed > 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("limit", [1.5, 2.0, inf])
@pytest.mark.parametrize("seed", range(3))
def test_every_search_move_respects_memory_and_order(layout, limit, seed):
    problem, durations = uneven_problem(layout, limit, seed)
    pattern = build_periodic_orders(problem, 1.5 * compute_shortest_period(problem), (0.0,) * 2 * problem.chunks)
    starts = [schedule_greedily(problem, GreedyParameters(problem.limit, patience=0.5))[1]]
    starts += [pattern] if all(is_feasible(problem, rank, order) for rank, order in enumerate(pattern)) else []
    for orders in starts:
        _, overtaken = reorder_out_of_order(problem, orders, 8, 0.3)
        makespan, improved = improve_orders(problem, overtaken, 60)
        assert makespan == simulate_orders(problem, improved).makespan <= simulate_orders(problem, overtaken).makespan
        for found in (orders, overtaken, improved):
            program = build_program_from_orders("part", problem, found)
            check_pipeline(program)
            assert max(simulate_pipeline(program, durations).peak_activations) <= limit


def test_order_is_feasible_within_memory_and_task_dependencies():
    problem = Problem.from_durations(
        1, 2, (0,), Durations(1.0, 1.0, 1.0), (1.0,)
    )  # tasks: forward 0, input gradient 1, weight gradient 2
    assert is_feasible(problem, 0, [0, 1, 2, 0, 1, 2])
    assert not is_feasible(problem, 0, [0, 0, 1, 2, 1, 2]), "two activations"
    assert not is_feasible(problem, 0, [0, 2, 1, 0, 1, 2]), "a weight gradient before its input gradient"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "looped-bfs", "zb-v", "dualpipe-v"])
def test_a_backward_cut_in_two_is_no_slower(name):
    program, durations = generate(name, 4, 8), Durations(1.0, 0.7, 1.1, 0.2)
    by_stage = Durations.per_rank(program, 1.0, 0.7, 1.1, 0.2)
    problem = Problem.from_durations(4, 8, program.placement[0], by_stage, (inf,) * 4)
    cut = build_program_from_orders("cut", problem, extract_orders(program))
    check_pipeline(cut)
    assert makespan_and_peak(cut, durations)[0] <= makespan_and_peak(program, durations)[0] * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [3, 4, 5, 8])
@pytest.mark.parametrize("layout", [place_cyclically, place_in_v_shape])
def test_periodic_pattern_takes_one_period_per_micro_batch(ranks, layout):
    makespans = []
    for micro_batches in (2 * ranks, 4 * ranks):
        even = Durations(1.0, 1.0, 1.0)
        problem = Problem.from_durations(ranks, micro_batches, layout(ranks), even, (inf,) * ranks)
        makespans.append(
            simulate_orders(
                problem, build_periodic_orders(problem, compute_shortest_period(problem), (0.0,) * 4)
            ).makespan
        )
    assert makespans[1] - makespans[0] == 2 * ranks * compute_shortest_period(problem) == 6 * ranks * problem.chunks


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_periodic_pattern_is_no_worse_than_v_min(ranks):
    even = Durations(0.5, 0.5, 0.5)
    problem = Problem.from_durations(ranks, 2 * ranks, place_in_v_shape(ranks), even, (inf,) * ranks)
    orders = build_periodic_orders(problem, compute_shortest_period(problem), (0.0,) * 4)
    timing = simulate_pipeline(build_program_from_orders("pattern", problem, orders), even)
    v_min = simulate_pipeline(generate("v-min", ranks, 2 * ranks), even)
    assert timing.makespan <= v_min.makespan and max(timing.peak_activations) <= max(v_min.peak_activations)


def test_moves_along_the_critical_path_repair_a_bad_start():
    problem = Problem.from_durations(4, 8, place_cyclically(4), Durations(1.0, 1.0, 1.0), (4.0,) * 4)
    start = extract_orders(generate("1f1b", 4, 8))
    makespan, orders = improve_orders(problem, start, 500)
    assert makespan == simulate_orders(problem, orders).makespan <= 28 < simulate_orders(problem, start).makespan
    problem, _ = uneven_problem("two chunks", 2.0)
    start = schedule_greedily(problem, GreedyParameters(problem.limit))[1]
    makespan, orders = improve_orders(problem, start, 500)
    assert makespan == simulate_orders(problem, orders).makespan < simulate_orders(problem, start).makespan


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_critical_path_adds_up_to_the_makespan(layout):
    problem, _ = uneven_problem(layout)
    _, orders = schedule_greedily(problem, GreedyParameters(problem.limit))
    clock = simulate_orders(problem, orders)
    lasts, lags = 0.0, 0.0
    for rank, first, last in find_critical_blocks(problem, orders, clock):
        lasts += sum(problem.duration[x] for x in orders[rank][first : last + 1])
        lags += problem.lag[orders[rank][first]]
    assert lasts + lags == pytest.approx(clock.makespan)


# Report and errors


def test_search_is_deterministic():
    durations = Durations(1.0, 1.4, 0.2, 0.1)
    one, two = (search_schedule(4, 6, durations, 3, effort=QUICK).program for _ in range(2))
    assert one.steps == two.steps and one.placement == two.placement and one.name == "auto"


def test_the_report_names_candidates_winner_and_bound():
    found = search_schedule(4, 8, Durations(1.0, 1.0, 1.0), 4)
    text = found.explain()
    assert found.makespan == found.lower_bound == 25.5 and found.gap == 0
    assert "zb-v" in text and "25.5" in text and "over the memory limit" in text and "bound" in text
    assert [one.name for one in found.candidates if not one.fits]
    assert text.endswith("equal to the lower bound (25.5)")


def test_the_report_calls_equal_makespans_equal():
    """Sums of durations such as 1.6 are rounded: the makespan may be below its bound by 1e-16."""
    durations = Durations((1.0, 1.0, 1.0, 1.6), 1.0, 1.0)
    last = search_schedule(4, 16, durations, 5).explain().splitlines()[-1]
    assert "-0.00%" not in last and "1.0000" not in last
    assert ", as fast as the best other named schedule, zb-v; equal to the lower bound (59.1)" in last


def test_memory_limit_per_rank_is_respected():
    memory = [4.0, 1.0, 3.0, 2.0]
    found = search_schedule(4, 6, Durations(1.0, 1.0, 1.0), memory, effort=QUICK)
    assert all(peak <= limit for peak, limit in zip(found.winner.peak, memory, strict=True))


def test_two_weight_copies_only_where_allowed():
    durations = Durations(1.0, 1.0, 1.0)
    names = [one.name for one in search_schedule(4, 8, durations, effort=QUICK, weight_copies=2).candidates]
    assert {"chimera", "dualpipe", "gems"} <= set(names)
    assert not {"chimera", "dualpipe", "gems"} & {
        one.name for one in search_schedule(4, 8, durations, effort=QUICK).candidates
    }


def test_lists_by_stage_settle_the_number_of_chunks():
    assert search_schedule(2, 4, Durations([1, 2, 1, 2], 1.0, 1.0), effort=QUICK).program.chunks == 2
    assert search_schedule(2, 4, Durations(1.0, 1.0, 1.0, [0.1, 0.2, 0.3]), effort=QUICK).program.chunks == 2
    assert search_schedule(2, 4, Durations(1.0, 1.0, 1.0), chunks=1, effort=QUICK).program.chunks == 1
    assert search_schedule(2, 4, Durations(1.0, 1.0, 1.0), chunks=3, effort=QUICK).program.chunks == 3


def test_command_and_library_search_with_same_durations():
    report = schedule("auto", 2, 4, 2, Durations([1, 2], weight_gradient=0.5), memory=2)
    best = search_schedule(2, 4, Durations([1, 2], 1.0, 0.5), 2, chunks=2)
    assert report.timing.makespan == pytest.approx(best.makespan)
    assert generate("auto", 2, 4, chunks=1).chunks == 1


def test_zero_and_tiny_durations_are_accepted():
    assert search_schedule(3, 4, Durations(0.0, 0.0, 0.0), effort=QUICK).makespan == 0
    assert search_schedule(3, 4, Durations(1.0, 1.0, 0.0), 2, effort=QUICK).makespan > 0
    small = search_schedule(4, 6, Durations(1e-6, 1.4e-6, 2e-7), 3, effort=QUICK).makespan
    assert small * 1e6 == pytest.approx(
        search_schedule(4, 6, Durations(1.0, 1.4, 0.2), 3, effort=QUICK).makespan, rel=0.02
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": 0.5}, "the minimum is 1"),
        ({"memory": [1, 1, 0.9, 1]}, "rank 2"),
        ({"memory": [1, 2]}, "one per rank"),
        ({"durations": Durations([1, 2, 3], 1.0, 1.0)}, "3 values for 4 ranks"),
        ({"durations": Durations(1.0, -1.0, 1.0)}, "not negative"),
        ({"durations": Durations([1.0] * 8, 1.0, 1.0), "chunks": 1}, "chunks per rank"),
        ({"micro_batches": 0}, "micro-batches"),
        ({"ranks": 0}, "ranks"),
        ({"chunks": 0}, "chunks"),
    ],
)
def test_impossible_problems_are_refused(arguments, message):
    given = {"ranks": 4, "micro_batches": 4, "durations": Durations(1.0, 1.0, 1.0), **arguments}
    with pytest.raises(UserError, match=message):
        search_schedule(**given)
