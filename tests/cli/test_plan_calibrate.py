"""`meshwright plan --calibrate`: writes the calibration into the cluster file atomically, and plans report it."""

from __future__ import annotations

import json

import pytest

from tests.planner.calibration_cases import cluster_file, made_up_run


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return cluster_file(tmp_path / "config")


def test_calibration_factor_is_stored_and_reported_by_plans(machine, tmp_path, command_line):
    runs = [made_up_run(tmp_path / "a", 1.0, 1.2), made_up_run(tmp_path / "b", 2.0, 3.2)]
    outcome = command_line("plan", "--calibrate", *runs, f"{runs[0]}/", "--json")
    assert (outcome.code, outcome.errors) == (0, "")
    answer = json.loads(outcome.output)
    assert answer["calibration"]["time_factor"] == pytest.approx(1.4) and answer["calibration"]["runs"] == 2
    assert [each["ratio"] for each in answer["runs"]] == [pytest.approx(1.2), pytest.approx(1.6)]
    assert answer["cluster_file"] == str(machine)
    text = machine.read_text()
    outcome = command_line("plan", "--calibrate", *runs, "--cluster", "this")
    assert outcome.code == 0 and machine.read_text() == text
    assert "calibrated by 2 runs: times x 1.4 (1.2 to 1.6), +12.5% of memory unexplained" in outcome.output

    arguments = ("--cluster", machine, "--sequence", 128, "--batch", 8, "--layout", "dp2 fp32")
    outcome = command_line("plan", "qwen3-0.6b", *arguments)
    assert "calibrated by 2 runs: times x 1.4" in outcome.output.splitlines()[0], outcome.errors
    answer = json.loads(command_line("plan", "qwen3-0.6b", *arguments, "--json").output)
    assert answer["layouts"][0]["calibration"]["runs"] == 2


def test_calibration_mistake_is_one_line_and_keeps_file(machine, tmp_path, command_line):
    good, text = made_up_run(tmp_path / "good", 1.0, 1.2), machine.read_text()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "result.json").write_text("{")
    for arguments, line in (
        ((), "--calibrate: give the directories of finished runs"),
        ((tmp_path / "none",), "there is no such directory"),
        ((good, tmp_path / "bad"), "bad: result.json is damaged: not JSON"),
        ((good, "--explain"), "--calibrate: takes the directories of runs"),
        ((good, "--layout", "dp2"), "--calibrate: takes the directories of runs"),
        (
            (good, "--cluster", "8xh100-sxm"),
            "the calibration is written to a cluster file; --cluster 8xh100-sxm is not one",
        ),
        ((good, "--cluster", tmp_path / "none.toml"), "there is no cluster file"),
        ((made_up_run(tmp_path / "other", 1.0, 1.0, device="h100-sxm"),), "the run was predicted for h100-sxm"),
    ):
        outcome = command_line("plan", "--calibrate", *arguments)
        assert (outcome.code, outcome.output, outcome.errors.count("\n")) == (2, "", 1), outcome.errors
        assert line in outcome.errors
        assert machine.read_text() == text and [path.name for path in machine.parent.iterdir()] == ["cluster.toml"]
    outcome = command_line("plan", "qwen3-0.6b", "llama-3-8b", "--cluster", "this")
    assert outcome.code == 2 and 'unexpected argument "llama-3-8b": give one name' in outcome.errors
