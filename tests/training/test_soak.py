"""A few trials of bench/soak.py: its faults occur, and runs end where undisturbed ones end."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.exhaustive
def test_short_soak_ends_bitwise_equal_in_every_trial(repository: Path, tmp_path: Path) -> None:
    result = tmp_path / "soak.json"
    command = [sys.executable, "bench/soak.py", "--count", "4", "--seed", "1", "--work", str(tmp_path / "work")]
    subprocess.run([*command, "--result", str(result)], cwd=repository, env=os.environ, check=True, timeout=600)
    found = json.loads(result.read_text())
    assert [record["failure"] for record in found["records"]] == [None] * 4
    assert found["faults_struck"] >= 3


def test_records_of_another_version_are_dropped_on_request_alone(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(repository / "bench"))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    soak = importlib.import_module("soak")
    trials = soak.Soak(0, 4, tmp_path, tmp_path / "soak.json", False, {"source_tree": "new", "commit": "c2"})
    record = {"layout": "dp1", "forks": True, "faults": [], "failure": None}
    old = [{"trial": 0} | record, {"trial": 1, "source_tree": "old", "commit": "c1"} | record]
    trials.records([*old, {"trial": 2} | record | trials.source])
    assert [each["trial"] for each in trials.records([])] == [0, 1, 2]
    assert json.loads(trials.result.read_text())["by_commit"] == {"c1": 1, "c2": 1, "not recorded": 1}
    assert [each["trial"] for each in trials.records([], drop_other_sources=True)] == [0, 2]
    assert json.loads(trials.result.read_text())["by_commit"] == {"c2": 1, "not recorded": 1}
