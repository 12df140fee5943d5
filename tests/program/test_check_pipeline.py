"""Check of pipeline programs: each kind of error is named, and correct programs pass."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.order import ProgramError
from meshwright.program.pipeline import Builder, Component, Kind, PipelineProgram, build_program, place_cyclically
from meshwright.program.pipeline_text import parse_pipeline
from meshwright.schedules.library import generate
from meshwright.schedules.named import SCHEDULES
from meshwright.schedules.transfers import with_transfers
from tests.program.pipeline_interpreter import failure, random_program, rows_of, with_rows

TWO_RANKS = """
pipeline two
ranks 2
micro-batches 1
placement 0 1
"""
SEEDS = st.integers(0, 2**32)


def program(*ranks: str, header: str = TWO_RANKS) -> PipelineProgram:
    """Return the program with these groups of each rank, separated by commas."""
    sections = [f"rank {rank}\n" + "\n".join(groups.split(",")) for rank, groups in enumerate(ranks)]
    return parse_pipeline(header + "\n".join(sections))


def refused(*ranks: str, header: str = TWO_RANKS) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        check_pipeline(program(*ranks, header=header))
    return caught.value


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (("0F0, 0B0", "1F0"), "rank 1, step 0 (1B0): missing: the rank never computes it, on stage 1 that it holds"),
        (("0B0", "1F0, 1B0"), "rank 0, step 0 (0F0): missing: the rank never computes it, on stage 0 that it holds"),
        (("0F0, 0I0", "1F0, 1B0"), "rank 0, step 0 (0W0): missing"),
        (("0F0, 0F0, 0B0", "1F0, 1B0"), "rank 0, step 1 (0F0): computed twice, first in step 0"),
        (("0F0, 0B0, 0I0", "1F0, 1B0"), "rank 0, step 2 (0I0): computed twice: a full backward computes it too"),
        (("0F0, 0B0, 0W0", "1F0, 1B0"), "rank 0, step 2 (0W0): computed twice: the full backward computes it too"),
        (("0F0, 0W0, 0I0", "1F0, 1B0"), "rank 0, step 1 (0W0): needs 0I0, which runs later, in step 2"),
        (("0B0, 0F0", "1F0, 1B0"), "rank 0, step 0 (0B0): needs 0F0, which runs later, in step 1"),
        (("0F0 | 0B0", "1F0, 1B0"), "rank 0, step 0 (0B0): needs 0F0, which is in the same group"),
        (("0F0, 1F0, 0B0", "1B0"), "rank 0, step 1 (1F0): rank 0 does not hold the stage; rank 1 does"),
        (
            ("0F0, 0SEND_F0, 0RECV_B0, 0B0", "1F0, 1B0, 1SEND_B0"),
            "rank 1, step 0 (1F0): waits for 0F0, which rank 1 never receives",
        ),
        (
            ("0F0, 0RECV_B0, 0B0", "1RECV_F0, 1F0, 1B0, 1SEND_B0"),
            "rank 1, step 1 (1F0): waits for 0F0, which rank 0 never sends",
        ),
        (
            ("0SEND_F0, 0F0, 0RECV_B0, 0B0", "1RECV_F0, 1F0, 1B0, 1SEND_B0"),
            "rank 0, step 0 (0SEND_F0): needs 0F0, which runs later, in step 1",
        ),
        (
            ("0F0, 0SEND_F0, 0B0, 0RECV_B0", "1RECV_F0, 1F0, 1B0, 1SEND_B0"),
            "rank 0, step 2 (0B0): needs 0RECV_B0, which runs later, in step 3",
        ),
        (
            ("0F0, 0SEND_F0, 0SEND_F0, 0RECV_B0, 0B0", "1RECV_F0, 1F0, 1B0, 1SEND_B0"),
            "rank 0, step 2 (0SEND_F0): sent twice, first in step 1",
        ),
        (
            ("0F0 | 0SEND_F0, 0RECV_B0, 0B0", "1RECV_F0, 1F0, 1B0, 1SEND_B0"),
            "rank 0, step 0 (0F0): its group mixes computation, updates and transfers",
        ),
        (
            ("0F0, 0SEND_F0, 0RECV_B0, 0B0", "1RECV_F0, 1F0, 1SEND_F0, 1B0, 1SEND_B0"),
            "rank 1, step 2 (1SEND_F0): there is no stage after the last one",
        ),
        (("0F0, 0SEND_B0, 0B0", "1F0, 1B0"), "rank 0, step 1 (0SEND_B0): there is no stage before the first one"),
        (
            ("0F0, 0B0, 0U0, 0U0", "1F0, 1B0, 1U0"),
            "rank 0, step 3 (0U0): its gradients were applied by an earlier update",
        ),
        (
            ("0F0, 0U0, 0B0", "1F0, 1B0, 1U0"),
            "rank 0, step 1 (0U0): applies gradients too early: 0B0 runs in step 2",
        ),
        (("0F0, 0B0", "1F0, 1B0, 1U0"), "rank 0, step 1 (0B0): no update of rank 0 applies this gradient"),
    ],
)
def test_a_mistake_is_named_with_rank_step_and_reason(ranks: tuple[str, ...], message: str) -> None:
    assert str(refused(*ranks)).startswith(message)


def test_a_program_without_mistakes_passes_with_its_peaks() -> None:
    checked = check_pipeline(program("0F0, 0B0", "1F0, 1I0, 1W0"))
    assert checked.peak_activations.tolist() == [1, 1]
    assert check_pipeline(program("0F0, 0SEND_F0, 0RECV_B0, 0B0", "1RECV_F0, 1F0, 1B0, 1SEND_B0")).sends.tolist() == [
        1,
        7,
    ]


def test_mutually_waiting_ranks_are_all_named() -> None:
    header = TWO_RANKS.replace("micro-batches 1", "micro-batches 2")
    error = refused("0F0, 0B0, 0F1, 0B1", "1F1, 1F0, 1B0, 1B1", header=header)
    assert str(error) == (
        "rank 0, step 1 (0B0): deadlock: rank 0, step 1 (0B0) waits for rank 1, step 2 (1B0); "
        "rank 1, step 0 (1F1) waits for rank 0, step 2 (0F1)"
    )


def test_deadlocks_of_blocking_sends_are_named() -> None:
    header = TWO_RANKS.replace("micro-batches 1", "micro-batches 2")
    first = "0F0, 0SEND_F0, 0F1, 0SEND_F1, 0RECV_B0, 0B0, 0RECV_B1, 0B1"
    error = refused(first, "1RECV_F0, 1F0, 1B0, 1SEND_B0, 1RECV_F1, 1F1, 1B1, 1SEND_B1", header=header)
    assert str(error) == (
        "rank 0, step 3 (0SEND_F1): deadlock with blocking sends: "
        "rank 0, step 3 (0SEND_F1) waits for rank 1, step 4 (1RECV_F1); "
        "rank 1, step 3 (1SEND_B0) waits for rank 0, step 4 (0RECV_B0)"
    )
    check_pipeline(
        program(
            first.replace("0SEND_F1, 0RECV_B0", "0SEND_F1 | 0RECV_B0"),
            "1RECV_F0, 1F0, 1B0, 1SEND_B0 | 1RECV_F1, 1F1, 1B1, 1SEND_B1",
            header=header,
        )
    )


def test_messages_received_in_another_order_than_sent_are_refused() -> None:
    header = TWO_RANKS.replace("micro-batches 1", "micro-batches 2")
    first = "0F0, 0F1, 0SEND_F0, 0SEND_F1, 0RECV_B0, 0B0, 0RECV_B1, 0B1"
    error = refused(first, "1RECV_F1, 1RECV_F0, 1F0, 1F1, 1B0, 1SEND_B0, 1B1, 1SEND_B1", header=header)
    assert (error.rank, error.step) == (1, "1RECV_F1")
    assert "is matched with rank 0, step 2 (0SEND_F0)" in error.reason


def test_transfers_within_rank_are_refused() -> None:
    header = "pipeline v\nranks 1\nmicro-batches 1\nplacement 0 0\n"
    error = refused("0F0, 0SEND_F0, 1RECV_F0, 1F0, 1B0, 0B0", header=header)
    assert str(error) == "rank 0, step 1 (0SEND_F0): stage 1 is on the same rank; values are not sent within a rank"


def test_a_micro_batch_runs_through_one_replica() -> None:
    header = "pipeline both\nranks 2\nmicro-batches 1\nplacement 0 1\nplacement 1 0\n"
    error = refused("0F0, 1'F0, 1'B0, 0B0", "1F0, 1B0, 0'F0, 0'B0", header=header)
    assert "micro-batch 0 also runs through another replica" in str(error)
    assert "runs through no stage" in str(refused("", "", header=header))


def test_transfers_outside_replica_are_refused() -> None:
    header = "pipeline both\nranks 2\nmicro-batches 1\nplacement 0 1\nplacement 1 0\n"
    first, second = "0F0, 0SEND_F0, 0RECV_B0, 0B0", "1RECV_F0, 1F0, 1B0, 1SEND_B0"
    check_pipeline(program(first, second, header=header))
    error = refused(first + ", 1'RECV_F0", second + ", 0'SEND_F0", header=header)
    assert str(error) == "rank 1, step 4 (0'SEND_F0): micro-batch 0 does not run through replica 1"
    error = refused(first + ", 1'RECV_F0", second, header=header)
    assert str(error) == "rank 0, step 4 (1'RECV_F0): micro-batch 0 does not run through replica 1"


@pytest.mark.parametrize(
    ("first", "step"),
    [
        ("0F0 | 0F1, 0B0, 0B1", "step 0 (0F0)"),
        ("0F0, 0F1, 0B0 | 0I1, 0W1", "step 2 (0B0)"),
        ("0F0, 0F1, 0I0, 0I1, 0W0 | 0W1", "step 4 (0W0)"),
    ],
)
def test_a_group_holds_no_two_steps_of_a_kind(first: str, step: str) -> None:
    header = TWO_RANKS.replace("micro-batches 1", "micro-batches 2")
    error = refused(first, "1F0, 1F1, 1B0, 1B1", header=header)
    assert str(error).startswith(f"rank 0, {step}: its group computes two forwards, two backwards or two weight gradi")


def test_update_after_other_micro_batches_is_refused() -> None:
    header = TWO_RANKS.replace("micro-batches 1", "micro-batches 2")
    error = refused("0F0, 0B0, 0F1, 0B1, 0U1", "1F0, 1B0, 1U0, 1F1, 1B1, 1U1", header=header)
    assert str(error) == "rank 1, step 2 (1U0): stage 0 is not updated after micro-batch 0"


BOTH_WAYS = TWO_RANKS.replace("micro-batches 1", "micro-batches 2") + "placement 1 0\n"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (", 0U0", ", 1U0", "rank 1, step 3 (0'B1): no update of rank 1 applies this gradient"),
        (", 0U0, 1'U0", ", 1U0, 0'U0", "rank 1, step 5 (0'U0): no micro-batch up to 0 runs through its stage"),
        (", 0U0, 0U1, 1'U1", ", 1U0, 0'U1", "rank 0, step 5 (0U1): its gradients were applied by an earlier update"),
    ],
)
def test_every_replica_is_updated_with_its_own_micro_batches(first: str, second: str, message: str) -> None:
    down_and_up = ("0F0, 1'F1, 1'B1, 0B0", "0'F1, 1F0, 1B0, 0'B1")
    check_pipeline(program(down_and_up[0] + ", 0U0, 1'U1", down_and_up[1] + ", 1U0, 0'U1", header=BOTH_WAYS))
    assert str(refused(down_and_up[0] + first, down_and_up[1] + second, header=BOTH_WAYS)) == message


def test_idle_replica_is_not_updated() -> None:
    error = refused("0F0, 0F1, 0B0, 0B1, 0U1, 1'U1", "1F0, 1F1, 1B0, 1B1, 1U1, 0'U1", header=BOTH_WAYS)
    assert str(error) == "rank 0, step 5 (1'U1): no micro-batch runs through replica 1"


def test_excessive_rank_count_is_refused_without_allocation() -> None:
    with pytest.raises(ProgramError, match="rank 0 holds 0 of the 1 stages of replica 0; all 2147483647 ranks"):
        check_pipeline(build_program("huge", 2**31 - 1, 1, ((2**31 - 2,),), []))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (((0, 2),), "rank 2, step 0 (placement): stage 1 of replica 0 is on rank 2; ranks are 0 to 1"),
        (
            ((0, 0),),
            "rank 1, step 0 (placement): rank 1 holds 0 of the 2 stages of replica 0; all 2 ranks must hold equally "
            "many",
        ),
        (((0, 1), (0,)), "rank 0, step 0 (placement): replica 1 has 1 stages, replica 0 has 2"),
        ((), "rank 0, step 0 (placement): 2 ranks, 1 micro-batches, 0 stages; a program has at least one of each"),
    ],
)
def test_a_placement_that_no_program_has_is_refused(placement: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ProgramError) as caught:
        check_pipeline(build_program("bad", 2, 1, placement, []))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, 7, "rank 7, step 0 (0F0): there is no rank 7; ranks are 0 to 1"),
        (2, 9, "rank 0, step 0 (kind 9, component 0): there is no step of kind 9"),
        (2, -1, "rank 0, step 0 (kind -1, component 0): there is no step of kind -1"),
        (3, 2, "rank 0, step 0 (2F0): there is no stage 2; stages are 0 to 1"),
        (3, -1, "rank 0, step 0 (-1F0): there is no stage -1; stages are 0 to 1"),
        (4, 1, "rank 0, step 0 (0'F0): there is no replica 1; replicas are 0 to 0"),
        (5, 4, "rank 0, step 0 (0F4): there is no micro-batch 4; micro-batches are 0 to 0"),
        (6, 5, "rank 0, step 0 (kind 0, component 5): there is no such component of a layer"),
    ],
)
def test_a_number_out_of_range_is_refused(column: int, value: int, message: str) -> None:
    good = program("0F0, 0B0", "1F0, 1B0")
    rows = rows_of(good)
    rows[0][column] = value
    with pytest.raises(ProgramError) as caught:
        check_pipeline(with_rows(good, rows))
    assert str(caught.value) == message


def test_components_of_layer_run_completely_and_in_order() -> None:
    def cut(forward: list[Component], backward: list[Component], weights: list[Component]) -> PipelineProgram:
        builder = Builder("cut", 1, 1, (place_cyclically(1),))
        for kind, parts in (
            (Kind.FORWARD, forward),
            (Kind.INPUT_GRADIENT, backward),
            (Kind.WEIGHT_GRADIENT, weights),
        ):
            for part in parts:
                builder.ranks[0].add(kind, 0, component=part)
        return builder.build()

    attention, dispatch, mlp, combine = (part for part in Component if part)
    parts = [attention, dispatch, mlp, combine]
    check_pipeline(cut(parts, parts[::-1], [mlp, attention]))
    check_pipeline(cut(parts, parts[::-1], [attention, mlp]))
    check_pipeline(cut(parts, parts[::-1], [Component.WHOLE]))
    for wrong, message in (
        (cut(parts[1:], parts[::-1], [mlp, attention]), "its components must be attention, dispatch, MLP and combine"),
        (cut(parts[::-1], parts[::-1], [mlp, attention]), "0F0.combine): needs 0F0.mlp, which runs later"),
        (cut(parts, parts, [mlp, attention]), "needs 0I0.dispatch, which runs later"),
        (cut(parts, parts[:0:-1], [mlp]), "its components must be attention, dispatch, MLP and combine"),
        (cut(parts, parts[::-1], [mlp]), "its components must be those of the input gradient that have weights"),
        (cut([*parts, mlp], parts[::-1], [mlp, attention]), "0F0.mlp): computed twice"),
    ):
        with pytest.raises(ProgramError, match="rank 0, step") as caught:
            check_pipeline(wrong)
        assert message in str(caught.value)


def test_weight_gradient_of_component_needs_only_its_input_gradient() -> None:
    header = "pipeline cut\nranks 1\nmicro-batches 1\nplacement 0\n"
    first = "0F0, 0I0.combine, 0I0.mlp, 0W0.mlp, 0I0.dispatch"
    check_pipeline(program(f"{first}, 0I0.attention, 0W0.attention", header=header))
    error = refused(f"{first}, 0W0.attention, 0I0.attention", header=header)
    assert str(error).startswith("rank 0, step 5 (0W0.attention): needs 0I0.attention, which runs later")


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_passes_with_and_without_transfers_and_runs(name: str) -> None:
    schedule = generate(name, 4, 8)
    check_pipeline(schedule)
    rng = random.Random(0)
    assert failure(schedule, rng) is None
    written = with_transfers(schedule)
    check_pipeline(written)
    assert failure(written, rng) is None


@settings(max_examples=50)
@given(SEEDS)
def test_random_programs_pass_and_run_in_any_interleaving(seed: int) -> None:
    rng = random.Random(seed)
    random_one = random_program(rng)
    check_pipeline(random_one)
    written = with_transfers(random_one)
    check_pipeline(written)
    for each in (random_one, written):
        assert failure(each, rng) is None


def mutated(good: PipelineProgram, rng: random.Random) -> PipelineProgram:
    """Return the program with one step deleted, doubled, moved, or changed in one number."""
    rows = rows_of(good)
    chosen = rng.randrange(len(rows))
    what = rng.choice(["delete", "double", "move", "move", "move", "merge", "change"])
    if what == "change":
        column = rng.choice([2, 3, 4, 5])
        limit = (0, 0, len(Kind), good.stages, good.replicas, good.micro_batches)[column]
        rows[chosen][column] = rng.randrange(limit)
        return with_rows(good, rows)
    if what == "merge":
        mine = [row for row in rows if row[0] == rows[chosen][0]]
        rows[chosen][1] = rng.choice(mine)[1]
        return with_rows(good, sorted(rows, key=lambda row: row[:2]))
    row = list(rows[chosen])
    if what != "double":
        del rows[chosen]
    if what != "delete":
        row[1] = -1  # a separate group
        mine = [at for at, other in enumerate(rows) if other[0] == row[0]]
        at = rng.choice(mine) if mine else 0
        while 0 < at < len(rows) and rows[at - 1][:2] == rows[at][:2]:
            at += 1  # do not split groups
        rows.insert(at, row)
    return with_rows(good, rows)


@settings(max_examples=150)
@given(SEEDS)
def test_a_mutated_program_is_refused_or_still_right(seed: int) -> None:
    rng = random.Random(seed)
    good = random_program(rng)
    if rng.random() < 0.7:
        good = with_transfers(good)
    spoiled = mutated(good, rng)
    try:
        check_pipeline(spoiled)
    except ProgramError:
        return
    for _ in range(3):
        assert failure(spoiled, rng) is None


@settings(max_examples=100)
@given(SEEDS)
def test_a_computation_deleted_or_doubled_is_always_refused(seed: int) -> None:
    rng = random.Random(seed)
    good = random_program(rng)
    if rng.random() < 0.5:
        good = with_transfers(good)
    rows = rows_of(good)
    chosen = rng.randrange(len(rows))
    if rng.random() < 0.5:
        del rows[chosen]
    else:
        rows.insert(chosen, [rows[chosen][0], -1, *rows[chosen][2:]])
    with pytest.raises(ProgramError):
        check_pipeline(with_rows(good, rows))


@settings(max_examples=100)
@given(SEEDS)
def test_moved_step_is_refused_exactly_when_execution_fails(seed: int) -> None:
    """No false alarms: a refused program fails in execution."""
    rng = random.Random(seed)
    good = random_program(rng)
    if rng.random() < 0.7:
        good = with_transfers(good)
    rows = rows_of(good)
    row = rows.pop(rng.randrange(len(rows)))
    mine = [at for at, other in enumerate(rows) if other[0] == row[0]]
    at = rng.choice(mine) if mine else 0
    while 0 < at < len(rows) and rows[at - 1][:2] == rows[at][:2]:
        at += 1
    rows.insert(at, [row[0], -1, *row[2:]])
    moved = with_rows(good, rows)
    try:
        check_pipeline(moved)
    except ProgramError as error:
        assert failure(moved, rng) is not None, error


def test_execution_order_respects_all_dependencies() -> None:
    checked = check_pipeline(with_transfers(generate("zb-v", 4, 8)))
    turn = np.empty(len(checked.order))
    turn[checked.order] = np.arange(len(checked.order))
    s = checked.program.steps
    assert (np.diff(turn)[np.diff(s.group_rank) == 0] > 0).all()
    both = np.concatenate([checked.sends, checked.receives])
    assert len(np.unique(both)) == len(both) == int((s.kind >= Kind.SEND_FORWARD).sum())
