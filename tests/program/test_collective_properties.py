"""The check against an interpreter that owes nothing to it: what passes runs to the right end in every interleaving
tried, whatever a hand or a mutation did to the program; what is refused as a deadlock, or for its end, does fail."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from meshwright.collectives.library import ALGORITHMS, generate
from meshwright.errors import UserError
from meshwright.program.check_collective import check_collective
from meshwright.program.collective import CollectiveProgram, Kind, Steps
from meshwright.program.collective_text import format_collective, parse_collective
from meshwright.program.order import ProgramError
from tests.program.example_collectives import programs
from tests.program.interpreter import failure

COLUMNS = ("rank", "group", "kind", "slot", "count", "peer", "source")


def rebuilt(program: CollectiveProgram, columns: dict[str, np.ndarray]) -> CollectiveProgram:
    return dataclasses.replace(program, steps=Steps.from_unsorted(**columns))


@st.composite
def mutants(draw: st.DrawFn) -> CollectiveProgram:
    """Return a correct program with one to three mutations."""
    program = draw(st.sampled_from(programs()))
    for _ in range(draw(st.integers(1, 3))):
        columns = {name: getattr(program.steps, name).copy() for name in COLUMNS}
        # Twice the number of a group, so that there is room for a new group between two.
        columns["group"] *= 2
        size = len(program.steps)
        if size == 0:
            return program
        step = draw(st.integers(0, size - 1))
        what = draw(st.sampled_from(("delete", "double", "group", "position", "swap", "value", "trade")))
        match what:
            case "delete":
                columns = {name: np.delete(column, step) for name, column in columns.items()}
            case "double":
                columns = {name: np.insert(column, step, column[step]) for name, column in columns.items()}
                columns["group"][step] -= draw(st.integers(0, 1))
            case "group":
                columns["group"][step] = draw(st.integers(-1, int(columns["group"].max()) + 1))
            case "position":  # to another position among the steps of its group
                order = np.insert(np.delete(np.arange(size), step), draw(st.integers(0, size - 1)), step)
                columns = {name: column[order] for name, column in columns.items()}
            case "swap":  # swap two steps of a rank
                same = np.flatnonzero(columns["rank"] == columns["rank"][step])
                other = int(draw(st.sampled_from(same.tolist())))
                for name in ("kind", "slot", "count", "peer", "source"):
                    columns[name][[step, other]] = columns[name][[other, step]]
            case "trade":  # swap the slots of two transfers of one pair
                same = np.flatnonzero(
                    (columns["rank"] == columns["rank"][step]) & (columns["kind"] == columns["kind"][step])
                )
                other = int(draw(st.sampled_from(same.tolist())))
                columns["slot"][[step, other]] = columns["slot"][[other, step]]
            case "value":
                name = draw(st.sampled_from(("rank", "kind", "slot", "count", "peer", "source")))
                largest = {"rank": program.ranks - 1, "kind": 6}.get(name, max(program.slots, program.ranks))
                columns[name][step] = draw(st.integers(0 if name in ("rank", "kind") else -1, largest))
        program = rebuilt(program, columns)
    return program


@given(mutants(), st.integers(0, 2**32))
@settings(max_examples=300)
def test_a_mutant_is_caught_or_still_right(program: CollectiveProgram, seed: int) -> None:
    try:
        check_collective(program)
    except ProgramError as error:
        reason = str(error)
    else:
        assert [failure(program, seed + i) for i in range(3)] == [""] * 3
        assert parse_collective(format_collective(program)) == program
        return
    # Conversely, for kinds of errors that always fail: no false alarms.
    if any(words in reason for words in ("deadlock", "has no receive", "has no send", "(end)")):
        assert failure(program, seed) != ""


@given(st.sampled_from(range(1000)), st.integers(0, 2**32))
@settings(max_examples=100)
def test_right_programs_pass_and_run_in_any_interleaving(number: int, seed: int) -> None:
    program = programs()[number % len(programs())]
    check_collective(program)
    assert failure(program, seed) == ""


@pytest.mark.parametrize("operation", ALGORITHMS)
def test_algorithm_results_are_independent_of_step_order_in_group(operation: str) -> None:
    for name in ALGORITHMS[operation]:
        for ranks in (2, 3, 4, 5, 6, 8):
            try:
                program = generate(operation, name, ranks)
            except UserError:  # does not accept this number of ranks
                continue
            check_collective(program)
            assert failure(program, seed=ranks) == "", (name, ranks)


@pytest.mark.parametrize("turned", [False, True])
def test_group_with_order_dependent_copies_is_refused(turned: bool) -> None:
    """Ring all-to-all that copies its own block from scratch in the group that writes it there."""
    program = generate("all-to-all", "ring", 4)
    columns = {name: getattr(program.steps, name).copy() for name in COLUMNS}
    into_output = (columns["kind"] == Kind.COPY) & (columns["slot"] < program.first_scratch)
    assert into_output.sum() == 4
    columns["source"][into_output] = program.first_scratch
    if turned:
        columns = {name: column[::-1] for name, column in columns.items()}
    planted = rebuilt(program, columns)
    assert failure(planted, seed=1) != ""  # wrong if the copies run in the other order
    for each in (planted, parse_collective(format_collective(planted))):
        with pytest.raises(ProgramError) as caught:
            check_collective(each)
        assert str(caught.value) == (
            "rank 0, step 0 (copy data[0] into scratch[0]): writes scratch[0], which copy scratch[0] into output[0] of "
            "the same group reads; the steps of a group run concurrently: move one of them to an earlier or later group"
        )


@st.composite
def scrambles(draw: st.DrawFn) -> CollectiveProgram:
    """Transfers between random ranks in rounds, their ends put off to later groups at random."""
    ranks = draw(st.integers(2, 4))
    columns: list[tuple[int, ...]] = []
    for turn in range(draw(st.integers(1, 6))):
        sender, receiver = draw(st.permutations(range(ranks)))[:2]
        slot, into = draw(st.integers(0, 1)), draw(st.integers(0, 1))
        kind = draw(st.sampled_from((Kind.RECEIVE, Kind.REDUCE)))
        first, second = (turn + draw(st.integers(0, 2)) for _ in range(2))
        columns.append((sender, first, Kind.SEND, slot, 1, receiver, -1))
        columns.append((receiver, second, kind, into, 1, sender, -1))
    table = dict(zip(COLUMNS, np.array(columns).T, strict=True))
    return CollectiveProgram("reduce-scatter", "scramble", ranks, ranks, Steps.from_unsorted(**table))


@given(scrambles(), st.integers(0, 2**32))
@settings(max_examples=100)
def test_deadlock_is_reported_exactly_when_ranks_block(program: CollectiveProgram, seed: int) -> None:
    try:
        check_collective(program)
        reason = ""
    except ProgramError as error:
        reason = str(error)
    assume("has no receive" not in reason and "has no send" not in reason)
    assert ("deadlock" in reason) == (failure(program, seed) == "stuck")
