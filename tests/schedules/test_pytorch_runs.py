"""PyTorch's runtime trains with our CSVs, also with schedules that PyTorch does not provide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.schedules.library import generate
from meshwright.schedules.pytorch_csv import to_csv
from meshwright.schedules.transfers import with_transfers

CASES = {"1f1b": 5, "zb-h2": 5, "interleaved": 7, "v-half": 4, "dualpipe-v": 6}


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(3) as started:
        yield started


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_match_one_device(ranks: LocalRanks, name: str, form: str, tmp_path: Path):
    program = generate(name, 3, CASES[name])
    path = tmp_path / "schedule.csv"
    path.write_text(to_csv(program if form == "compute_only" else with_transfers(program)))
    errors = ranks.run("tests.schedules.pytorch_runtime_cases:gradient_error", program, str(path), form)
    assert max(errors) < 1e-12
