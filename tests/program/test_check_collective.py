"""What the check of collective programs promises: right programs pass, and each way of being wrong is named."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.program.check_collective import check_collective
from meshwright.program.collective import Builder, CollectiveProgram, Kind, Steps
from meshwright.program.order import ProgramError


def ring(ranks: int) -> CollectiveProgram:
    program = Builder("all-reduce", "ring", ranks, chunks=ranks)
    rank = np.arange(ranks)
    for step in range(ranks - 1):
        with program.round():
            program.transfer(rank, (rank + 1) % ranks, chunk=(rank - step) % ranks, reduce=True)
    for step in range(ranks - 1):
        with program.round():
            program.transfer(rank, (rank + 1) % ranks, chunk=(rank + 1 - step) % ranks)
    return program.build()


def program_of(operation: str, ranks: int, chunks: int, *rows: tuple[int, ...], **more: int) -> CollectiveProgram:
    """rows: rank, group, kind, slot, count, peer, source."""
    names = ("rank", "group", "kind", "slot", "count", "peer", "source")
    columns = np.array(rows, np.int64).reshape(-1, 7).T
    return CollectiveProgram(
        operation, "hand", ranks, chunks, Steps.arranged(**dict(zip(names, columns, strict=True))), **more
    )


def without(program: CollectiveProgram, step: int) -> CollectiveProgram:
    s = program.steps
    kept = Steps.arranged(
        **{name: np.delete(column, step) for name, column in vars(s).items() if name in s.__annotations__}
    )
    return CollectiveProgram(program.operation, program.algorithm, program.ranks, program.chunks, kept)


def refused(program: CollectiveProgram) -> ProgramError:
    with pytest.raises(ProgramError) as caught:
        check_collective(program)
    return caught.value


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 64, 65, 130])
def test_a_ring_all_reduce_holds_and_takes_two_times_ranks_less_one_rounds(ranks: int) -> None:
    checked = check_collective(ring(ranks))
    assert checked.rounds == 2 * (ranks - 1)
    np.testing.assert_allclose(checked.bytes_sent(1000.0), 2 * 1000.0 * (ranks - 1) / ranks)


def send(rank: int, group: int, peer: int, slot: int = 0, count: int = 1) -> tuple[int, ...]:
    return rank, group, Kind.SEND, slot, count, peer, -1


def receive(rank: int, group: int, peer: int, slot: int = 0, count: int = 1) -> tuple[int, ...]:
    return rank, group, Kind.RECEIVE, slot, count, peer, -1


def reduce(rank: int, group: int, peer: int, slot: int = 0, count: int = 1) -> tuple[int, ...]:
    return rank, group, Kind.REDUCE, slot, count, peer, -1


def copy(rank: int, group: int, source: int, slot: int, count: int = 1, kind: Kind = Kind.COPY) -> tuple[int, ...]:
    return rank, group, kind, slot, count, -1, source


def test_a_missing_receive_is_named_with_the_send_that_waits_for_it() -> None:
    error = refused(without(ring(2), 1))
    assert str(error) == (
        "rank 1, step 1 (send data[0] to 0): rank 0 has no receive for it (sends from rank 1 to 0: 2, receives: 1)"
    )


def test_a_missing_send_is_named_with_the_receive_that_waits_for_it() -> None:
    error = refused(without(ring(2), 0))
    assert str(error) == (
        "rank 1, step 1 (receive data[1] from 0): rank 0 has no send for it (receives on rank 1 from 0: 2, sends: 1)"
    )


def test_sends_that_block_in_a_circle_are_a_deadlock_that_names_the_circle() -> None:
    ranks = 3
    rows = [row for r in range(ranks) for row in (send(r, 0, (r + 1) % ranks), receive(r, 1, (r - 1) % ranks))]
    error = refused(program_of("all-reduce", ranks, 1, *rows))
    assert str(error) == (
        "rank 0, step 0 (send data[0] to 1): deadlock when sends block: "
        "rank 0, step 0 (send data[0] to 1) waits for rank 1 to reach step 1 (receive data[0] from 0); "
        "rank 1, step 0 (send data[0] to 2) waits for rank 2 to reach step 1 (receive data[0] from 1); "
        "rank 2, step 0 (send data[0] to 0) waits for rank 0 to reach step 1 (receive data[0] from 2)"
    )


def test_a_rank_that_does_not_exist_is_named() -> None:
    error = refused(program_of("all-reduce", 2, 1, send(0, 0, 7)))
    assert str(error) == "rank 0, step 0 (send data[0] to 7): there is no rank 7; ranks are 0 to 1"
