"""Pre- and postconditions of operations, against an independent definition rank by rank."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.program.collective import Builder, CollectiveProgram
from meshwright.program.contract import (
    ALL,
    build_initial_memory,
    build_required_slots,
    list_ranks,
    make_full_set,
    make_single_rank_sets,
)

Places = dict[tuple[int, int], tuple[int, object]]  # (rank, slot): (chunk, contributing ranks)


def program(operation: str, ranks: int, chunks: int, root: int = 0) -> CollectiveProgram:
    return Builder(operation, "none", ranks, chunks, root=root, scratch=1).build()


def starts(p: CollectiveProgram) -> Places:
    memory = build_initial_memory(p)
    return {
        (rank, slot): (int(memory.chunk[rank, slot]), memory.list_contributors(rank, slot))
        for rank in range(p.ranks)
        for slot in range(p.slots)
        if memory.chunk[rank, slot] >= 0
    }


def ends(p: CollectiveProgram) -> Places:
    need = build_required_slots(p)
    rows = zip(*(column.tolist() for column in (need.rank, need.slot, need.chunk, need.origin)), strict=True)
    return {(rank, slot): (chunk, origin) for rank, slot, chunk, origin in rows}


def own(chunks: range = range(4), ranks: range = range(2)) -> Places:
    return {(rank, chunk): (chunk, [rank]) for rank in ranks for chunk in chunks}


SHARES: Places = {(0, 0): (0, [0]), (0, 1): (1, [0]), (1, 2): (2, [1]), (1, 3): (3, [1])}


@pytest.mark.parametrize("root", [0, 1])
def test_contract_of_two_ranks_with_two_chunks_is_explicit(root: int) -> None:
    def to(*ranks: int, origin: dict[int, int] | int) -> Places:
        whose = (lambda chunk: origin) if isinstance(origin, int) else origin.__getitem__
        return {(rank, chunk): (chunk, whose(chunk)) for rank in ranks for chunk in range(4)}

    owner = {0: 0, 1: 0, 2: 1, 3: 1}
    at_root = own(ranks=range(root, root + 1))
    shares_of: dict[str, Places] = {
        "reduce-scatter": {key: (chunk, ALL) for key, (chunk, _) in SHARES.items()},
        "scatter": {key: (chunk, root) for key, (chunk, _) in SHARES.items()},
    }
    table: dict[str, tuple[Places, Places]] = {
        "all-reduce": (own(), to(0, 1, origin=ALL)),
        "reduce": (own(), to(root, origin=ALL)),
        "reduce-scatter": (own(), shares_of["reduce-scatter"]),
        "all-gather": (SHARES, to(0, 1, origin=owner)),
        "gather": (SHARES, to(root, origin=owner)),
        "broadcast": (at_root, to(0, 1, origin=root)),
        "scatter": (at_root, shares_of["scatter"]),
        "send-receive": (at_root, to(1 - root, origin=root)),
        "all-to-all": (
            own(),
            # Output 4 and 5 come from rank 0, 6 and 7 from rank 1; rank 0 gets chunks 0 and 1, rank 1 gets 2 and 3.
            {
                (0, 4): (0, 0), (0, 5): (1, 0), (0, 6): (0, 1), (0, 7): (1, 1),
                (1, 4): (2, 0), (1, 5): (3, 0), (1, 6): (2, 1), (1, 7): (3, 1),
            },
        ),
    }  # fmt: skip
    for operation, (first, last) in table.items():
        p = program(operation, 2, 4, root)
        assert starts(p) == first, operation
        assert ends(p) == last, operation


def test_receiver_of_vector_is_last_other_rank() -> None:
    assert {rank for rank, _ in ends(program("send-receive", 4, 1, root=1))} == {3}
    assert {rank for rank, _ in ends(program("send-receive", 4, 1, root=3))} == {0}


def test_a_barrier_ends_when_all_have_heard_from_all() -> None:
    p = program("barrier", 3, 1)
    assert starts(p) == {(rank, 0): (0, [rank]) for rank in range(3)}
    assert ends(p) == {(rank, 0): (0, ALL) for rank in range(3)}


@pytest.mark.parametrize("ranks", [1, 63, 64, 65, 200])
def test_rank_sets_round_trip(ranks: int) -> None:
    assert list_ranks(make_full_set(ranks)) == list(range(ranks))
    sets = make_single_rank_sets(np.arange(ranks), ranks)
    assert [list_ranks(words) for words in sets] == [[rank] for rank in range(ranks)]
