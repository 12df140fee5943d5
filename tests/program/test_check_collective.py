"""Check of collective programs: correct programs pass, and each kind of error is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from meshwright.collectives.library import generate
from meshwright.errors import UserError
from meshwright.program.check_collective import check_collective
from meshwright.program.collective import ARRIVING, SENDING, CollectiveProgram, Kind, Steps
from meshwright.program.order import ProgramError
from tests.program.example_collectives import ring


def program_of(operation: str, ranks: int, chunks: int, *rows: tuple[int, ...], **more: Any) -> CollectiveProgram:
    """rows: rank, group, kind, slot, count, peer, source."""
    names = ("rank", "group", "kind", "slot", "count", "peer", "source")
    columns = np.array(rows, np.int64).reshape(-1, 7).T
    return CollectiveProgram(
        operation, "hand", ranks, chunks, Steps.from_unsorted(**dict(zip(names, columns, strict=True))), **more
    )


def without(program: CollectiveProgram, step: int) -> CollectiveProgram:
    s = program.steps
    kept = Steps.from_unsorted(
        **{name: np.delete(column, step) for name, column in vars(s).items() if name in s.__dataclass_fields__}
    )
    return CollectiveProgram(program.operation, program.algorithm, program.ranks, program.chunks, kept)


def refused(program: CollectiveProgram) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        check_collective(program)
    return caught.value


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 64, 65, 130])
def test_ring_all_reduce_takes_minimum_number_of_rounds(ranks: int) -> None:
    checked = check_collective(ring(ranks))
    assert checked.rounds == 2 * (ranks - 1)
    np.testing.assert_allclose(checked.bytes_sent(1000.0), 2 * 1000.0 * (ranks - 1) / ranks)


def send(rank: int, group: int, peer: int, slot: int = 0, count: int = 1) -> tuple[int, ...]:
    return rank, group, Kind.SEND, slot, count, peer, -1


def receive(rank: int, group: int, peer: int, slot: int = 0, count: int = 1) -> tuple[int, ...]:
    return rank, group, Kind.RECEIVE, slot, count, peer, -1


def reduce(rank: int, group: int, peer: int, slot: int = 0, count: int = 1) -> tuple[int, ...]:
    return rank, group, Kind.REDUCE, slot, count, peer, -1


def test_missing_receive_is_named_with_waiting_send() -> None:
    error = refused(without(ring(2), 1))
    assert str(error) == (
        "rank 1, step 1 (send data[0] to 0): rank 0 has no receive for it (from rank 1 to 0: 2 sends, 1 receives)"
    )


def test_missing_send_is_named_with_waiting_receive() -> None:
    error = refused(without(ring(2), 0))
    assert str(error) == (
        "rank 1, step 1 (receive data[1] from 0): rank 0 has no send for it (from rank 0 to 1: 1 sends, 2 receives)"
    )


def test_blocking_sends_in_circle_are_a_named_deadlock() -> None:
    ranks = 3
    rows = [row for r in range(ranks) for row in (send(r, 0, (r + 1) % ranks), receive(r, 1, (r - 1) % ranks))]
    error = refused(program_of("all-reduce", ranks, 1, *rows))
    assert str(error) == (
        "rank 0, step 0 (send data[0] to 1): deadlock with blocking sends: "
        "rank 0, step 0 (send data[0] to 1) waits for rank 1, step 1 (receive data[0] from 0); "
        "rank 1, step 0 (send data[0] to 2) waits for rank 2, step 1 (receive data[0] from 1); "
        "rank 2, step 0 (send data[0] to 0) waits for rank 0, step 1 (receive data[0] from 2)"
    )


def local(rank: int, group: int, source: int, slot: int, count: int = 1, kind: Kind = Kind.COPY) -> tuple[int, ...]:
    return rank, group, kind, slot, count, -1, source


def signal(rank: int, group: int, peer: int) -> tuple[int, ...]:
    return rank, group, Kind.SIGNAL, 0, 0, peer, -1


def wait(rank: int, group: int, peer: int) -> tuple[int, ...]:
    return rank, group, Kind.WAIT, 0, 0, peer, -1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (send(0, 0, 7), "(send data[0] to 7): there is no rank 7; ranks are 0 to 1"),
        (send(0, 0, -1), "(send data[0] to -1): there is no rank -1; ranks are 0 to 1"),
        (send(0, 0, 0), "(send data[0] to 0): a rank cannot send to or receive from itself; use copy"),
        ((0, 0, 9, 0, 1, 1, -1), "(kind 9): there is no step of kind 9"),
        (send(0, 0, 1, slot=-1), "(send slot[-1] to 1): reaches beyond a rank's slots; a rank has data[0:2] and"),
        (send(0, 0, 1, slot=3), "(send scratch[1] to 1): reaches beyond a rank's slots"),
        (send(0, 0, 1, slot=1, count=2), "(send data[1:3] to 1): reaches beyond a rank's slots"),
        (send(0, 0, 1, count=0), "(send data[0:0] to 1): 0 slots; a step needs at least one"),
        ((0, 0, Kind.SEND, 0, 1, 1, 0), "(send data[0] to 1): only a local step (copy, combine) has a source slot"),
        ((0, 0, Kind.COPY, 0, 1, 1, 1), "(copy data[1] into data[0]): a local step has no peer"),
        ((0, 0, Kind.SIGNAL, 0, 1, 1, -1), "(signal 1): a signal carries no slots"),
        (local(0, 0, 5, 0), "(copy scratch[3] into data[0]): reaches beyond a rank's slots"),
        (local(0, 0, 0, 0), "(copy data[0] into data[0]): the slots read and the slots written overlap"),
        (local(0, 0, 0, 1, 2), "(copy data[0:2] into data[1:3]): the slots read and the slots written overlap"),
    ],
)  # fmt: skip
def test_step_invalid_on_its_own_is_named(row: tuple[int, ...], message: str) -> None:
    error = refused(program_of("all-reduce", 2, 3 if row[4] == 2 and row[2] == Kind.COPY else 2, row, scratch=1))
    assert str(error).startswith("rank 0, step 0 " + message)


def test_nonexistent_rank_is_named() -> None:
    assert str(refused(program_of("all-reduce", 2, 1, send(2, 0, 1)))).startswith("rank 2, step 0")


def test_slots_of_data_and_output_make_no_range() -> None:
    error = refused(program_of("all-to-all", 2, 2, send(0, 0, 1, slot=1, count=2)))
    assert "a rank has data[0:2], output[0:2]" in str(error)


def test_a_local_step_beside_a_transfer_is_refused() -> None:
    error = refused(program_of("all-reduce", 2, 2, send(0, 0, 1), local(0, 0, 0, 1), receive(1, 0, 0)))
    assert str(error) == (
        "rank 0, step 0 (copy data[0] into data[1]): a local step must be in a group without transfers"
    )


def test_transfer_ends_must_agree_in_kind_and_slot_count() -> None:
    error = refused(program_of("all-reduce", 2, 2, send(0, 0, 1, count=2), receive(1, 0, 0)))
    assert str(error) == (
        "rank 0, step 0 (send data[0:2] to 1): "
        "is matched with rank 1, step 0 (receive data[0] from 0), which has another number of slots"
    )
    error = refused(program_of("all-reduce", 2, 2, signal(0, 0, 1), receive(1, 0, 0)))
    assert str(error) == (
        "rank 0, step 0 (signal 1): is matched with rank 1, step 0 (receive data[0] from 0), which is of another kind"
    )


def test_a_deadlock_between_two_of_many_names_those_two() -> None:
    rows = [send(0, 0, 1), receive(1, 0, 0)]  # correct
    rows += [send(2, 0, 3), receive(2, 1, 3), send(3, 0, 2), receive(3, 1, 2)]
    rows += [receive(4, 0, 2), send(2, 2, 4)]  # waits for ranks 2 and 3 without being in the cycle
    error = refused(program_of("all-gather", 5, 5, *rows))
    assert error.reason == (
        "deadlock with blocking sends: "
        "rank 2, step 0 (send data[0] to 3) waits for rank 3, step 1 (receive data[0] from 2); "
        "rank 3, step 0 (send data[0] to 2) waits for rank 2, step 1 (receive data[0] from 3)"
    )


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (send(1, 0, 0), "writes data[0], which send data[0] to 0 of the same group reads"),
        (reduce(1, 0, 0), "writes data[0], which reduce data[0] from 0 of the same group writes"),
        (receive(1, 0, 0), "writes data[0], which receive data[0] from 0 of the same group writes"),
    ],
)
def test_received_slots_are_untouched_by_other_steps_of_group(step: tuple[int, ...], message: str) -> None:
    answer = receive(0, 0, 1, slot=1) if step[2] == Kind.SEND else send(0, 0, 1)
    error = refused(program_of("all-reduce", 2, 2, send(0, 0, 1), answer, receive(1, 0, 0), step))
    assert (error.rank, error.group) == (1, 0)
    assert (
        error.reason
        == f"{message}; the steps of a group run concurrently: move one of them to an earlier or later group"
    )


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        # one step reads what the other writes, in either order
        (
            local(0, 0, 0, 2),
            local(0, 0, 2, 3),
            "(copy data[0] into scratch[0]): writes scratch[0], which copy scratch[0]",
        ),
        (
            local(0, 0, 2, 3),
            local(0, 0, 0, 2),
            "(copy data[0] into scratch[0]): writes scratch[0], which copy scratch[0]",
        ),
        # two steps write one slot
        (local(0, 0, 0, 2), local(0, 0, 1, 2), "(copy data[0] into scratch[0]): writes scratch[0], which copy data[1]"),
        (
            local(0, 0, 0, 2),
            local(0, 0, 1, 2, kind=Kind.COMBINE),
            "(copy data[0] into scratch[0]): writes scratch[0], which combine data[1]",
        ),
        (
            local(0, 0, 0, 2, count=2),
            local(0, 0, 3, 1, kind=Kind.COMBINE),
            "(copy data[0:2] into scratch[0:2]): writes scratch[1], which combine scratch[1] into data[1]",
        ),
        # one step reads what the other accumulates
        (
            local(0, 0, 2, 0, kind=Kind.COMBINE),
            local(0, 0, 0, 3),
            "(combine scratch[0] into data[0]): writes data[0], which copy data[0] into scratch[1]",
        ),
    ],
)
def test_order_dependent_local_steps_in_group_are_refused(
    one: tuple[int, ...], other: tuple[int, ...], message: str
) -> None:
    filled = [local(0, 0, 0, 2, count=2)]
    later = [(rank, 1, *rest) for rank, _, *rest in (one, other)]
    error = refused(program_of("all-reduce", 2, 2, *filled, *later, scratch=2))
    assert (
        str(error).startswith(f"rank 0, step 1 {message}") and "the steps of a group run concurrently" in error.reason
    )
    # In separate groups these two steps do not race, although the program has other errors.
    apart = [(rank, 1 + number, *rest) for number, (rank, _, *rest) in enumerate((one, other))]
    assert "concurrently" not in refused(program_of("all-reduce", 2, 2, *filled, *apart, scratch=2)).reason


@pytest.mark.parametrize(
    ("operation", "algorithm", "ranks"),
    [("all-reduce", "double-binary-tree", 3), ("all-gather", "bruck", 4), ("all-to-all", "ring", 4)],
)
def test_order_of_messages_in_a_group_is_part_of_the_program(operation: str, algorithm: str, ranks: int) -> None:
    """Two messages of a group from one rank to another: their order at one end decides which slot each reaches."""
    program = generate(operation, algorithm, ranks)
    s = program.steps
    ends = [
        [int(step) for step in np.flatnonzero(s.has_kind(kinds) & (s.group_index == group) & (s.peer == peer))]
        for kinds in (SENDING, ARRIVING)
        for group, peer in {(int(s.group_index[step]), int(s.peer[step])) for step in range(len(s))}
    ]
    first, second, *_ = next(steps for steps in ends if len(steps) > 1)
    swapped = np.arange(len(s))
    swapped[[first, second]] = second, first
    refused(reordered(program, swapped))
    # The order of steps that are not messages of one direction between the same ranks means nothing.
    turned = np.lexsort((-s.peer, s.has_kind(SENDING), s.group_index))
    check_collective(reordered(program, turned))
    assert not np.array_equal(turned, np.arange(len(s)))


def reordered(program: CollectiveProgram, order: NDArray[np.int64]) -> CollectiveProgram:
    columns = {column.name: getattr(program.steps, column.name)[order] for column in dataclasses.fields(Steps)}
    return dataclasses.replace(program, steps=Steps.from_unsorted(**columns))


def test_local_steps_in_group_may_share_a_slot() -> None:
    check_collective(
        program_of(
            "reduce", 3, 1, send(1, 0, 0), receive(0, 0, 1, slot=1), send(2, 0, 0), receive(0, 0, 2, slot=2),
            local(0, 1, 1, 0, kind=Kind.COMBINE), local(0, 1, 2, 0, kind=Kind.COMBINE), scratch=2,
        )
    )  # fmt: skip


def test_in_place_exchange_in_group_is_no_race() -> None:
    check_collective(program_of("all-reduce", 2, 1, send(0, 0, 1), reduce(0, 0, 1), reduce(1, 0, 0), send(1, 0, 0)))


def test_delayed_send_carries_slot_before_reductions_of_its_group() -> None:
    # Rank 0 receives rank 2's contribution immediately, but rank 1 receives rank 0's value only in its second step.
    rows = [send(0, 0, 1), reduce(0, 0, 2), reduce(1, 0, 2), reduce(1, 1, 0), send(2, 0, 0), send(2, 0, 1)]
    check_collective(program_of("reduce", 3, 1, *rows, root=1))


def test_empty_slot_is_not_sent_copied_or_reduced() -> None:
    error = refused(program_of("broadcast", 2, 1, send(1, 0, 0), receive(0, 0, 1)))
    assert str(error) == "rank 1, step 0 (send data[0] to 0): data[0] is still empty"
    error = refused(program_of("all-reduce", 2, 1, local(1, 0, 1, 0), scratch=1))
    assert str(error) == "rank 1, step 0 (copy scratch[0] into data[0]): scratch[0] is still empty"
    error = refused(program_of("all-reduce", 2, 1, send(0, 0, 1), reduce(1, 0, 0, slot=1), scratch=1))
    assert str(error) == ("rank 1, step 0 (reduce scratch[0] from 0): reduces into scratch[0], which is still empty")


def test_contribution_added_twice_is_named() -> None:
    error = refused(program_of("reduce", 2, 1, reduce(0, 0, 1), reduce(0, 1, 1), send(1, 0, 0), send(1, 1, 0)))
    assert str(error) == (
        "rank 0, step 1 (reduce data[0] from 1): adds rank 1's part of chunk 0 to data[0] a second time"
    )
    error = refused(program_of("all-reduce", 2, 1, local(0, 0, 0, 1), local(0, 1, 1, 0, kind=Kind.COMBINE), scratch=1))
    assert "(combine scratch[0] into data[0]): adds rank 0's part of chunk 0 to data[0] a second time" in str(error)


def test_contribution_reduced_twice_is_detected_among_many_ranks() -> None:
    error = refused(program_of("reduce", 130, 1, reduce(0, 0, 99), reduce(0, 1, 99), send(99, 0, 0), send(99, 1, 0)))
    assert error.reason == "adds rank 99's part of chunk 0 to data[0] a second time"


def test_different_chunks_are_not_added_together() -> None:
    error = refused(program_of("all-reduce", 2, 2, send(0, 0, 1), reduce(1, 0, 0, slot=1)))
    assert str(error) == "rank 1, step 0 (reduce data[1] from 0): reduces chunk 0 into chunk 1 in data[1]"


def test_incomplete_result_names_contribution_and_last_writing_step() -> None:
    error = refused(program_of("all-reduce", 4, 1, send(1, 0, 0), reduce(0, 0, 1)))
    assert str(error) == (
        "rank 0, step 1 (end): data[0] lacks rank 2's and 3's part of chunk 0; "
        "last written in step 0 (reduce data[0] from 1)"
    )
    error = refused(program_of("all-reduce", 6, 1))
    assert str(error) == (
        "rank 0, step 0 (end): data[0] lacks rank 1's, 2's, 3's and 2 others' part of chunk 0; no step writes it"
    )


def test_misplaced_result_is_named() -> None:
    error = refused(program_of("all-gather", 2, 2, send(0, 0, 1), receive(1, 0, 0)))
    assert str(error) == (
        "rank 0, step 1 (end): data[1] is empty at the end; required is chunk 1 of rank 1; no step writes it"
    )
    exchanged = [send(0, 0, 1), receive(0, 0, 1, slot=1), send(1, 0, 0, slot=1), receive(1, 0, 0)]
    check_collective(program_of("all-gather", 2, 2, *exchanged))
    error = refused(program_of("all-gather", 2, 2, *exchanged, local(1, 1, 1, 0)))
    assert str(error) == (
        "rank 1, step 2 (end): data[0] holds rank 1's part of chunk 1 at the end; required is chunk 0 of rank 0; "
        "last written in step 1 (copy data[1] into data[0])"
    )


def test_over_reduced_reduce_scatter_is_no_all_to_all() -> None:
    rows = [send(0, 0, 1, slot=1), send(1, 0, 0), local(0, 1, 0, 2), local(1, 1, 1, 3)]
    rows += [receive(0, 0, 1, slot=3), receive(1, 0, 0, slot=2)]
    check_collective(program_of("all-to-all", 2, 2, *rows))
    error = refused(program_of("all-to-all", 2, 2, *rows, send(0, 2, 1, slot=3), reduce(1, 2, 0, slot=3)))
    assert error.reason == "reduces chunk 0 into chunk 1 in output[1]"


def test_barrier_that_releases_one_rank_early_is_refused() -> None:
    both = [signal(0, 0, 1), wait(0, 0, 1), signal(1, 0, 0), wait(1, 0, 0)]
    assert check_collective(program_of("barrier", 2, 1, *both)).rounds == 1
    error = refused(program_of("barrier", 3, 1, *both))
    assert str(error) == "rank 0, step 1 (end): has received no signal, direct or indirect, from rank 2"
    error = refused(program_of("barrier", 2, 1, send(0, 0, 1), receive(1, 0, 0)))
    assert error.reason == "a barrier moves no data, only signals"


def test_signals_order_steps_of_any_operation_without_bytes() -> None:
    rows = [send(0, 0, 1), signal(0, 1, 1), receive(1, 0, 0), wait(1, 1, 0)]
    checked = check_collective(program_of("broadcast", 2, 1, *rows))
    assert checked.rounds == 2
    assert checked.bytes_sent(100).tolist() == [100, 0]


def test_ranks_times_rounds_counts_only_dependent_transfers() -> None:
    # A chain of three transfers; local steps in between are not rounds.
    rows = [send(0, 0, 1), receive(1, 0, 0), local(1, 1, 0, 1), send(1, 2, 2), receive(2, 0, 1), send(2, 1, 3)]
    rows += [receive(3, 0, 2)]
    assert check_collective(program_of("broadcast", 4, 1, *rows, scratch=1)).rounds == 3


def test_steps_beyond_count_are_refused_and_not_begun() -> None:
    chunks = 10**6
    rows = [row for i in range(60) for row in (send(0, i, 1, count=chunks), receive(1, i, 0, count=chunks))]
    with pytest.raises(UserError, match="its steps use 120000000 slots, and a check is limited to 100000000"):
        check_collective(program_of("broadcast", 2, chunks, *rows))


@pytest.mark.parametrize(
    ("operation", "more", "message"),
    [
        ("all-reduce", {"ranks": 0}, "program: ranks is 0; it must be at least 1"),
        ("all-reduce", {"chunks": 0}, "program: chunks is 0; it must be at least 1"),
        ("broadcast", {"root": 2}, "program: root is 2; ranks are 0 to 1"),
        ("all-to-all", {"chunks": 3}, "program: all-to-all gives every rank an equal share of the chunks"),
        ("all-reduce", {"ranks": 100_000, "chunks": 100_000}, "program: 100000 ranks of 100000 slots are too many"),
    ],
)
def test_impossible_program_raises_user_error(operation: str, more: dict[str, int], message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_collective(program_of(operation, **{"ranks": 2, "chunks": 2, **more}))  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)
