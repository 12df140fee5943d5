"""Every collective algorithm computes its operation, for every number of ranks that it accepts."""

from __future__ import annotations

import pytest

from meshwright.collectives.library import ALGORITHMS, ROOTED, generate, list_options
from meshwright.errors import UserError
from meshwright.names import ALGORITHM_ALIASES, COLLECTIVE_ALGORITHMS, OPERATIONS
from meshwright.program.collective import Builder, CollectiveProgram, Kind, Steps
from tests.collectives.execution import assert_right
from tests.conftest import exhaustive

EVERY = [(operation, name) for operation, algorithms in ALGORITHMS.items() for name in algorithms]
COUNTS = [*range(1, 10), 12, 16]
"""Powers of two, odd numbers, primes, squares and products of three factors."""
MORE_COUNTS = [*range(1, 18), 24, 32]


@pytest.mark.parametrize("counts", [COUNTS, *exhaustive(MORE_COUNTS)], ids=["some", "more"])
@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_every_rank_ends_with_result_of_operation(operation: str, name: str, counts: list[int]):
    taken = 0
    for ranks in counts:
        try:
            program = generate(operation, name, ranks)
        except UserError:
            continue
        taken += 1
        assert (program.operation, program.algorithm, program.ranks) == (operation, name, ranks)
        assert_right(program)
    assert taken > 3


@pytest.mark.parametrize(("operation", "name"), [pair for pair in EVERY if pair[0] in ROOTED])
def test_any_rank_can_be_the_root(operation: str, name: str):
    for ranks in (2, 3, 5, 8):
        for root in range(ranks):
            assert_right(generate(operation, name, ranks, root=root))


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
def test_nodes_can_have_any_size_that_divides_the_ranks(groups: int):
    for operation, algorithms in ALGORITHMS.items():
        if "hierarchical" in algorithms:
            root = {"root": 7} if operation in ROOTED else {}
            assert_right(generate(operation, "hierarchical", 12, groups=groups, **root))
    assert_right(generate("all-reduce", "hierarchical-scatter", 12, groups=groups))


@pytest.mark.parametrize("dims", [(12,), (3, 4), (4, 3), (2, 6), (1, 12), (2, 3, 2), (2, 2, 3), (2, 1, 3, 2)])
def test_grids_can_have_any_sides_that_multiply_to_ranks(dims: tuple[int, ...]):
    for operation in ("all-reduce", "reduce-scatter", "all-gather"):
        for name in ("torus", "mesh"):
            assert_right(generate(operation, name, 12, dims=dims))


@pytest.mark.parametrize("segments", [1, 2, 3, 9])
def test_a_pipelined_vector_can_have_any_number_of_segments(segments: int):
    for operation, name in EVERY:
        if "segments" in list_options(operation, name):
            for ranks in (1, 2, 5, 8):
                assert_right(generate(operation, name, ranks, segments=segments))


def test_published_names_and_generators_match_one_to_one():
    assert {op: {*names, "auto"} for op, names in ALGORITHMS.items()} == {
        op: set(names) for op, names in COLLECTIVE_ALGORITHMS.items()
    }
    assert tuple(ALGORITHMS) == OPERATIONS


def test_algorithm_aliases_give_same_program():
    for operation, aliases in ALGORITHM_ALIASES.items():
        for alias, name in aliases.items():
            assert generate(operation, alias, 6) == generate(operation, name, 6)


def test_oracle_detects_missing_reduction_race_and_deadlock():
    vector = Builder("all-reduce", "broken", 2, chunks=1)
    with vector.round():
        vector.transfer(0, 1, 0, reduce=True)
    with pytest.raises(AssertionError):
        assert_right(vector.build())

    race = Builder("all-gather", "broken", 2, chunks=2)
    with race.round():
        race.transfer([0, 1], [1, 0], [0, 1], into=[1, 0])
    with pytest.raises(AssertionError):
        assert_right(race.build())

    both = Steps.from_unsorted(
        rank=[0, 0, 1, 1],
        group=[0, 1, 0, 1],
        kind=[Kind.SEND, Kind.RECEIVE] * 2,
        slot=[0] * 4,
        count=[1] * 4,
        peer=[1, 1, 0, 0],
        source=[-1] * 4,
    )
    with pytest.raises(AssertionError, match="wait for each other"):
        assert_right(CollectiveProgram("all-reduce", "broken", 2, 1, both))
