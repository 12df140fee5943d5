"""Simulation of pipeline programs against hand calculation and a fixed-point iteration of its rules."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.program.order import ProgramError
from meshwright.program.pipeline import (
    Builder,
    Kind,
    PipelineProgram,
    build_program,
    place_cyclically,
    place_in_v_shape,
)
from meshwright.program.pipeline_text import parse_pipeline
from meshwright.program.simulate_pipeline import Durations, PipelineTiming, simulate_pipeline
from meshwright.schedules.library import generate
from meshwright.schedules.transfers import with_transfers
from tests.program.pipeline_interpreter import random_program

SEEDS = st.integers(0, 2**32)
UNIT = Durations(1, 1, 1)


def program(text: str) -> PipelineProgram:
    """Parse a program with one rank per line, groups separated by commas, below the header lines."""
    header, _, ranks = text.strip().partition("\n\n")
    sections = [f"rank {rank}\n" + "\n".join(line.split(",")) for rank, line in enumerate(ranks.splitlines())]
    return parse_pipeline("pipeline test\n" + header.replace(", ", "\n") + "\n" + "\n".join(sections))


def times(timing: PipelineTiming) -> dict[str, tuple[float, float]]:
    steps = range(len(timing.program.steps))
    return {timing.program.describe(i): (float(timing.start[i]), float(timing.end[i])) for i in steps}


GPIPE = program("""
ranks 2, micro-batches 2, placement 0 1

0F0, 0F1, 0B0, 0B1
1F0, 1F1, 1B0, 1B1
""")


def test_gpipe_on_two_ranks_step_by_step() -> None:
    timing = simulate_pipeline(GPIPE, UNIT)
    assert times(timing) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1, 2),
        "1F1": (2, 3),
        "1B0": (3, 5),
        "1B1": (5, 7),
        "0B0": (5, 7),
        "0B1": (7, 9),
    }
    assert timing.makespan == 9
    assert timing.busy.tolist() == [6, 6]
    assert timing.idle.tolist() == [3, 0]
    assert timing.bubble_fraction == pytest.approx(1 / 3)
    assert timing.bubble_to_ideal == pytest.approx(1 / 2)
    assert timing.peak_activations.tolist() == [2, 2]
    assert timing.weight_copies.tolist() == [1, 1]
    assert timing.messages_sent.tolist() == [2, 2]


def test_uneven_stages_and_boundaries_each_take_their_own_time() -> None:
    three = program("""
ranks 3, micro-batches 1, placement 0 1 2

0F0, 0B0
1F0, 1I0, 1W0
2F0, 2B0
""")
    timing = simulate_pipeline(three, Durations([1, 2, 3], [10, 20, 30], [100, 200, 300], transfer=[0.25, 0.5]))
    assert times(timing) == {
        "0F0": (0, 1),
        "1F0": (1.25, 3.25),
        "2F0": (3.75, 6.75),
        "2B0": (6.75, 336.75),
        "1I0": (337.25, 357.25),
        "1W0": (357.25, 557.25),
        "0B0": (357.5, 467.5),
    }
    assert timing.makespan == 557.25


def test_a_transfer_within_a_rank_takes_no_time() -> None:
    v = program("""
ranks 2, micro-batches 1, placement 0 1 1 0

0F0, 3F0, 3B0, 0B0
1F0, 2F0, 2B0, 1B0
""")
    timing = simulate_pipeline(v, Durations(1, 1, 1, transfer=5))
    assert times(timing)["2F0"] == (7, 8)
    assert timing.makespan == 4 * 1 + 4 * 2 + 4 * 5
    assert timing.messages_sent.tolist() == [2, 2]


def test_an_overlapped_pair_starts_and_ends_together() -> None:
    pair = program("""
ranks 1, micro-batches 2, placement 0

0F0, 0F1 | 0B0, 0B1
""")
    assert times(simulate_pipeline(pair, UNIT))["0F1"] == (1, 4)
    overlapped = times(simulate_pipeline(pair, Durations(1, 1, 1, overlapped=2.5)))
    assert overlapped["0F1"] == overlapped["0B0"] == (1, 3.5)
    assert overlapped["0B1"] == (3.5, 5.5)


def test_pair_of_two_stages_takes_mean_of_both() -> None:
    pair = program("""
ranks 1, micro-batches 2, placement 0 0

0F0, 1F0, 0F1, 1F1 | 1B0, 0B0, 1B1, 0B1
""")
    timing = times(simulate_pipeline(pair, Durations(1, 1, 1, overlapped=[9, 2])))
    assert timing["1B0"] == (3, 5)
    other = program("""
ranks 1, micro-batches 2, placement 0 0

0F0, 1F0, 0F1 | 1B0, 1F1, 0B0, 1B1, 0B1
""")
    assert times(simulate_pipeline(other, Durations(1, 1, 1, overlapped=[9, 2])))["1B0"] == (2, 7.5)


def test_an_update_takes_no_time_by_default() -> None:
    asynchronous = program("""
ranks 1, micro-batches 1, placement 0

0F0, 0B0, 0U0
""")
    assert simulate_pipeline(asynchronous, UNIT).makespan == 3
    assert simulate_pipeline(asynchronous, Durations(1, 1, 1, update=4)).makespan == 7


def test_a_message_leaves_when_its_send_is_posted() -> None:
    late = program("""
ranks 2, micro-batches 2, placement 0 1

0F0, 0F1, 0SEND_F0, 0SEND_F1, 0RECV_B0, 0B0, 0RECV_B1, 0B1
1RECV_F0, 1F0, 1RECV_F1, 1F1, 1B0, 1SEND_B0, 1B1, 1SEND_B1
""")
    timing = simulate_pipeline(late, Durations(1, 1, 1, transfer=0.5))
    when = times(timing)
    assert when["0SEND_F0"] == (2, 2.5)
    assert when["1RECV_F0"] == (0, 2.5)
    assert when["1F0"] == (2.5, 3.5)
    assert when["1RECV_F1"] == (3.5, 3.5)  # its message has arrived before it is posted
    assert timing.messages_sent.tolist() == [2, 2]
    assert timing.makespan == timing.end[timing.program.steps.kind <= Kind.UPDATE].max()


def test_memory_rises_with_forward_and_falls_with_weight_gradient() -> None:
    split = program("""
ranks 1, micro-batches 2, placement 0

0F0, 0I0, 0F1, 0W0, 0B1
""")
    timing = simulate_pipeline(split, UNIT)
    at, held = timing.compute_activations(0)
    assert list(zip(at, held, strict=True)) == [(0, 1), (2, 2), (4, 1), (6, 0)]
    assert timing.peak_activations.tolist() == [2]


def test_activations_are_counted_in_shares_of_rank() -> None:
    v = program("""
ranks 1, micro-batches 2, placement 0 0

0F0, 1F0, 0F1, 1B0, 0B0, 1F1, 1B1, 0B1
""")
    assert simulate_pipeline(v, UNIT).peak_activations.tolist() == [1.5]


def pipedream_like(updates: str) -> PipelineProgram:
    """Return one rank whose forwards run two micro-batches ahead of its backwards, with the given updates."""
    return program(f"""
ranks 1, micro-batches 5, placement 0

{updates}
""")


@pytest.mark.parametrize(
    ("order", "versions"),
    [
        ("0F0, 0B0, 0U0, 0F1, 0B1, 0U1, 0F2, 0B2, 0U2, 0F3, 0B3, 0U3, 0F4, 0B4, 0U4", 1),
        ("0F0, 0F1, 0B0, 0U0, 0F2, 0B1, 0U1, 0F3, 0B2, 0U2, 0F4, 0B3, 0U3, 0B4, 0U4", 2),
        ("0F0, 0F1, 0F2, 0B0, 0U0, 0F3, 0B1, 0U1, 0F4, 0B2, 0U2, 0B3, 0U3, 0B4, 0U4", 3),
        ("0F0, 0F1, 0B0, 0U0, 0B1, 0U1, 0F2, 0B2, 0U2, 0F3, 0B3, 0U3, 0F4, 0B4, 0U4", 2),
        ("0F0, 0F1, 0F2, 0B0, 0B1, 0U1, 0F3, 0B2, 0F4, 0B3, 0B4, 0U4", 2),
    ],
)
def test_weight_version_lives_until_its_last_backward(order: str, versions: int) -> None:
    assert simulate_pipeline(pipedream_like(order), UNIT).weight_copies.tolist() == [versions]


def test_newer_weight_version_is_counted_beside_one_in_use() -> None:
    order = "0F0, 0F1, 0F2, 0B0, 0U0, 0B1, 0B2, 0U1, 0U2"  # 0B2 uses version 0, 1 is in use, and 2 must not mix with it
    timing = simulate_pipeline(program(f"ranks 1, micro-batches 3, placement 0\n\n{order}"), UNIT)
    assert timing.weight_copies.tolist() == [3]


def test_durations_of_two_replicas_follow_stage_or_rank() -> None:
    one_stage = build_program("one", 2, 2, ((0, 1), (1, 0)), [])
    assert Durations.per_rank(one_stage, [1, 10]).tabulate("forward", one_stage).tolist() == [[1, 10], [1, 10]]
    two_stages = build_program("two", 2, 2, ((0, 1, 0, 1), (1, 0, 1, 0)), [])
    by_rank = Durations.per_rank(two_stages, [2, 20]).tabulate("forward", two_stages)
    assert by_rank.tolist() == [[1, 10, 1, 10], [10, 1, 10, 1]]


def test_two_replicas_are_two_copies_of_the_weights() -> None:
    assert simulate_pipeline(generate("gems", 4, 4), UNIT).weight_copies.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 16), (8, 64)])
def test_pipedream_has_no_bubble_in_steady_state(ranks: int, micro_batches: int) -> None:
    asynchronous = generate("pipedream", ranks, micro_batches)
    assert simulate_pipeline(asynchronous, UNIT).steady_bubble_fraction == 0
    # With one slow stage, all others wait for it: busy 3 of every 6.
    slow = Durations([2, *[1] * (ranks - 1)], [2, *[1] * (ranks - 1)], [2, *[1] * (ranks - 1)])
    fraction = simulate_pipeline(asynchronous, slow).steady_bubble_fraction
    assert fraction == pytest.approx((ranks - 1) / ranks / 2)


def test_rank_durations_are_divided_by_chunks() -> None:
    builder = Builder("v", 2, 1, (place_in_v_shape(2),))
    for rank, order in enumerate(((0, 3), (1, 2))):
        for stage in order:
            builder.ranks[rank].forward(0, stage)
        for stage in reversed(order):
            builder.ranks[rank].backward(0, stage)
    v = builder.build()
    by_rank = Durations.per_rank(v, forward=[2, 6], input_gradient=2, weight_gradient=[1, 2, 3, 4])
    assert by_rank.tabulate("forward", v).tolist() == [[1, 3, 3, 1]]
    assert by_rank.tabulate("input_gradient", v).tolist() == [[1, 1, 1, 1]]
    assert by_rank.tabulate("weight_gradient", v).tolist() == [[1, 2, 3, 4]]
    in_turn = Durations.per_rank((2, 2), forward=[2, 6])
    assert np.asarray(in_turn.forward).tolist() == [1, 3, 1, 3]


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ({"forward": [1, 2, 3]}, "forward: 3 values; expected 1 or 2 (one per rank)"),
        ({"transfer": [1, 2]}, "transfer: 2 values; expected 1 or 1 (one per boundary between stages)"),
        ({"update": [[1, 2, 3]]}, "update: 3 values; expected 1 or 2 (one per rank)"),
        ({"forward": -1}, "forward: durations must be finite and not negative"),
        ({"input_gradient": float("nan")}, "input gradient: durations must be finite and not negative"),
        ({"transfer": float("inf")}, "transfer: durations must be finite and not negative"),
    ],
)
def test_durations_that_do_not_fit_are_refused(durations: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        simulate_pipeline(GPIPE, Durations.per_rank(GPIPE, **durations))  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("0B0\n1F0, 1B0", "rank 0, step 0 (0B0): waits for 0F0, which no step produces"),
        ("0F0, 0B0\n1B0, 1F0", "rank 1, step 0 (1B0): needs 1F0, which runs later, in step 1"),
        (
            "0F0, 0B0, 0F1, 0B1\n1F1, 1F0, 1B0, 1B1",
            "rank 0, step 1 (0B0): deadlock: rank 0, step 1 (0B0) waits for rank 1, step 2 (1B0); "
            "rank 1, step 0 (1F1) waits for rank 0, step 2 (0F1)",
        ),
    ],
)
def test_stuck_program_names_missing_input(ranks: str, message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        simulate_pipeline(program(f"ranks 2, micro-batches 2, placement 0 1\n\n{ranks}"), UNIT)
    assert str(caught.value) == message


def test_circular_wait_is_distinguished_from_rank_behind_it() -> None:
    with pytest.raises(ProgramError) as caught:
        simulate_pipeline(
            program("""
ranks 3, micro-batches 2, placement 0 1 2

0F0, 0B0, 0F1, 0B1
1F0, 1B0, 1F1, 1B1
2F1, 2F0, 2B0, 2B1
"""),
            UNIT,
        )
    assert str(caught.value) == (
        "rank 1, step 1 (1B0): deadlock: rank 1, step 1 (1B0) waits for rank 2, step 2 (2B0); "
        "rank 2, step 0 (2F1) waits for rank 1, step 2 (1F1)"
    )


def relaxed(program: PipelineProgram, durations: Durations) -> np.ndarray:
    """Return the start of every step: the rules of the data flow applied until no start changes."""
    s, stages = program.steps, program.stages
    table = {name: durations.tabulate(name, program) for name in ("forward", "input_gradient", "weight_gradient")}
    transfer = durations.tabulate("transfer", program)
    lasts = np.zeros(len(s))
    for i in range(len(s)):
        at = s.replica[i], s.stage[i]
        f, b, w = (table[name][at] for name in table)
        lasts[i] = {Kind.FORWARD: f, Kind.BACKWARD: b + w, Kind.INPUT_GRADIENT: b, Kind.WEIGHT_GRADIENT: w}.get(
            Kind(int(s.kind[i])), 0.0
        )
    group_of = [(int(s.rank[i]), int(s.group[i])) for i in range(len(s))]
    group_lasts = {group: sum(lasts[i] for i in range(len(s)) if group_of[i] == group) for group in set(group_of)}
    index = {
        (int(s.kind[i]), int(s.replica[i]), int(s.stage[i]), int(s.micro_batch[i])): group_of[i] for i in range(len(s))
    }
    start = dict.fromkeys(group_lasts, 0.0)
    moved = True
    while moved:
        moved = False
        for i in range(len(s)):
            kind, replica, stage, m = (int(c[i]) for c in (s.kind, s.replica, s.stage, s.micro_batch))
            rank, number = group_of[i]
            after = [(start[rank, number - 1] + group_lasts[rank, number - 1])] if number else []

            def end_of(
                kinds: tuple[Kind, ...], stage: int, replica: int = replica, m: int = m, rank: int = rank
            ) -> list[float]:
                return [
                    start[g] + group_lasts[g] for k in kinds if (g := index.get((k, replica, stage, m))) is not None
                ]

            backward = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
            here = program.placement[replica]
            if kind == Kind.FORWARD and stage:
                far = here[stage - 1] != rank
                kinds = (Kind.SEND_FORWARD,) if far and program.has_transfers else (Kind.FORWARD,)
                after += [t + far * transfer[replica, stage - 1] for t in end_of(kinds, stage - 1)]
            if kind in backward:
                after += end_of((Kind.FORWARD,), stage)
                if stage < stages - 1:
                    far = here[stage + 1] != rank
                    kinds = (Kind.SEND_BACKWARD,) if far and program.has_transfers else backward
                    after += [t + far * transfer[replica, stage] for t in end_of(kinds, stage + 1)]
            if kind == Kind.WEIGHT_GRADIENT:
                after += end_of(backward, stage)
            latest = max([start[rank, number], *after])
            if latest > start[rank, number]:
                start[rank, number], moved = latest, True
    return np.array([start[group] for group in group_of])


@settings(max_examples=40)
@given(SEEDS, st.booleans())
def test_every_step_starts_at_its_earliest_allowed_time(seed: int, written: bool) -> None:
    rng = random.Random(seed)
    one = random_program(rng)
    if written:
        one = with_transfers(one)
    numbers = np.random.default_rng(seed)
    durations = Durations(*numbers.uniform(0.1, 2, (3, one.stages)), transfer=numbers.uniform(0, 1, one.stages - 1))
    timing = simulate_pipeline(one, durations)
    assert timing.start == pytest.approx(relaxed(one, durations))


@settings(max_examples=40)
@given(SEEDS)
def test_memory_and_time_add_up(seed: int) -> None:
    rng = random.Random(seed)
    one = random_program(rng)
    numbers = np.random.default_rng(seed)
    timing = simulate_pipeline(one, Durations(*numbers.uniform(0.1, 2, (3, one.stages))))
    s = one.steps
    for rank in range(one.ranks):
        held = timing.compute_activations(rank)[1]
        assert held.max(initial=0) == timing.peak_activations[rank]
        assert len(held) == 0 or held[-1] == 0
        mine = s.rank == rank
        if mine.any():
            whole = timing.end[mine].max() - timing.start[mine].min()
            assert timing.busy[rank] + timing.idle[rank] == pytest.approx(whole)
            # Counted independently: activations held in the middle of each step.
            lives = []
            for i in np.flatnonzero(mine & (s.kind == Kind.FORWARD)):
                same = mine & (s.stage == s.stage[i]) & (s.micro_batch == s.micro_batch[i])
                last = same & np.isin(s.kind, (Kind.BACKWARD, Kind.WEIGHT_GRADIENT))
                lives.append((timing.start[i], timing.end[last].max()))
            middles = (timing.start[mine] + timing.end[mine]) / 2
            alive = max(sum(born <= middle < freed for born, freed in lives) for middle in middles)
            assert alive / one.chunks == timing.peak_activations[rank]


def test_the_program_of_one_rank_has_no_bubble() -> None:
    builder = Builder("alone", 1, 3, (place_cyclically(1),))
    for m in range(3):
        builder.ranks[0].forward(m)
        builder.ranks[0].backward(m)
    timing = simulate_pipeline(builder.build(), UNIT)
    assert (timing.makespan, timing.bubble_fraction, timing.bubble_to_ideal, timing.idle[0]) == (9, 0, 0, 0)


def test_a_program_without_steps_takes_no_time() -> None:
    timing = simulate_pipeline(Builder("empty", 2, 1, (place_cyclically(2),)).build(), UNIT)
    assert (timing.makespan, timing.bubble_fraction, timing.bubble_to_ideal) == (0, 0, 0)
    assert timing.idle.tolist() == timing.peak_activations.tolist() == timing.messages_sent.tolist() == [0, 0]
