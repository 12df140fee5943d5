"""A few trials of bench/soak.py: whether its faults strike, and whether runs end where undisturbed ones end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_soak_of_a_few_trials_finds_every_end_equal(repository: Path, tmp_path: Path) -> None:
    result = tmp_path / "soak.json"
    command = [sys.executable, "bench/soak.py", "--count", "4", "--seed", "1", "--work", str(tmp_path / "work")]
    subprocess.run([*command, "--result", str(result)], cwd=repository, env=os.environ, check=True, timeout=600)
    found = json.loads(result.read_text())
    assert [record["failure"] for record in found["records"]] == [None] * 4
    assert found["faults_struck"] >= 3
