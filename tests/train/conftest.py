"""Local ranks that stay from test to test of this folder: each number of them is started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright.comm.local import LocalRanks


@pytest.fixture(scope="session")
def two() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four() -> Iterator[LocalRanks]:
    with LocalRanks(4) as ranks:
        yield ranks
