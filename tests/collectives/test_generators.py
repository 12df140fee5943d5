"""Every collective algorithm leaves the right values, for every number of ranks that it takes."""

from __future__ import annotations

import pytest

from meshwright.collectives.library import ALGORITHMS, ROOTED, generate
from meshwright.errors import UserError
from tests.collectives.execution import assert_right

EVERY = [(operation, name) for operation, algorithms in ALGORITHMS.items() for name in algorithms]
COUNTS = [*range(1, 18), 24, 32]


@pytest.mark.parametrize(("operation", "name"), EVERY)
def test_every_rank_ends_with_what_the_operation_promises(operation: str, name: str):
    taken = 0
    for ranks in COUNTS:
        try:
            program = generate(operation, name, ranks)
        except UserError:
            continue
        taken += 1
        assert (program.operation, program.algorithm, program.ranks) == (operation, name, ranks)
        assert_right(program)
    assert taken > 5


@pytest.mark.parametrize(("operation", "name"), [pair for pair in EVERY if pair[0] in ROOTED])
def test_any_rank_can_be_the_root(operation: str, name: str):
    for ranks in (2, 3, 5, 8, 12):
        for root in range(ranks):
            assert_right(generate(operation, name, ranks, root=root))
