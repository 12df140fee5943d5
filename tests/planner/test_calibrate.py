"""Calibration: the factor on predicted times in the cluster file; repeated calibration changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.monitoring import run_directory
from meshwright.planner.api import plan
from meshwright.planner.calibrate import METRICS, RESULT, calibration_of, cluster_file_with, read_run
from meshwright.planner.cost.rates import constants
from meshwright.planner.hardware.calibration import Calibration
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.search.estimate import problem_of
from meshwright.planner.search.search import search
from meshwright.toml import format_toml, parse_toml
from tests.planner.calibration_cases import DEVICE, MIB, cluster_file, made_up_run


def fold(path: Path, *runs: Path) -> Calibration:
    text, found = cluster_file_with(path, [read_run(run) for run in runs])
    path.write_text(text)
    return found


def test_made_up_runs_have_the_files_of_training():
    assert (RESULT, METRICS) == (run_directory.RESULT, run_directory.METRICS)


def test_factor_is_median_ratio_and_share_is_of_total_bytes(tmp_path):
    runs = [
        made_up_run(tmp_path / "a", 1.0, 1.5, peak=512 * MIB, unexplained=64 * MIB),
        made_up_run(tmp_path / "b", 2.0, 2.4, peak=1536 * MIB, unexplained=-16 * MIB),
        made_up_run(tmp_path / "c", 4.0, 5.2, peak=8 * MIB, unexplained=400 * MIB),  # too small to count
        made_up_run(tmp_path / "d", 1.0, 1.1, unexplained=32 * MIB, compile=True),
    ]
    found = calibration_of([read_run(run) for run in runs])
    assert found.time_factor == pytest.approx((1.2 + 1.3) / 2)
    assert (found.time_low, found.time_high, found.runs) == (pytest.approx(1.1), pytest.approx(1.5), 4)
    assert (found.unexplained_share, found.unexplained_runs) == (pytest.approx(80 / 2560), 3)
    assert calibration_of([read_run(runs[2])]).unexplained_share is None


def test_calibration_round_trips_and_keeps_rest_of_file(tmp_path):
    path = cluster_file(tmp_path)
    before = path.read_text()
    found = fold(path, made_up_run(tmp_path / "a", 1.0, 1.25))
    assert cluster(str(path)).calibration == found
    assert path.read_text().startswith(before)
    assert replace(cluster(str(path)), calibration=None) == cluster(parse_toml(before, ""), str(path))
    anew = fold(path, made_up_run(tmp_path / "b", 1.0, 2.0))  # replaces the existing table
    assert anew.time_factor == 2 and path.read_text().count("[calibration]") == 1
    assert path.read_text().startswith(before)


def test_calibration_table_in_the_middle_of_a_file_is_replaced(tmp_path):
    path = cluster_file(tmp_path)
    tables = parse_toml(path.read_text(), "") | {"calibration": Calibration(3.0, 3.0, 3.0, 1).table()}
    texts = [
        format_toml({"calibration": tables["calibration"], **{k: v for k, v in tables.items() if k != "calibration"}}),
        "calibration = { time_factor = 3.0, time_low = 3.0, time_high = 3.0, runs = 1 }\n" + path.read_text(),
        f"# mine\n{path.read_text()}\n [calibration] # old\n time_factor = 3\n time_low = 3\n time_high = 3\n runs = 1",
    ]
    for text in texts:
        path.write_text(text)
        assert cluster(str(path)).calibration == Calibration(3.0, 3.0, 3.0, 1)
        fold(path, made_up_run(tmp_path / "a", 1.0, 1.25))
        found = parse_toml(path.read_text(), "")
        assert found.pop("calibration")["time_factor"] == 1.25
        assert found == {key: value for key, value in tables.items() if key != "calibration"}


def test_repeated_calibration_changes_nothing(tmp_path):
    path = cluster_file(tmp_path)
    runs = [made_up_run(tmp_path / "a", 1.0, 1.5), made_up_run(tmp_path / "b", 1.0, 1.7)]
    fold(path, *runs)
    text = path.read_text()
    fold(path, *runs)
    assert path.read_text() == text


def test_run_predicted_with_a_factor_gives_the_same_factor(tmp_path):
    path = cluster_file(tmp_path)
    found = fold(path, made_up_run(tmp_path / "a", 1.0, 1.5))
    later = made_up_run(tmp_path / "b", 1.5, 1.5, calibration=found.table())  # predicted with the factor, and correct
    assert fold(path, later).time_factor == pytest.approx(1.5)


def test_calibration_multiplies_times_and_memory(tmp_path):
    path = cluster_file(tmp_path)
    plain = cluster(str(path))
    found = Calibration(1.5, 1.2, 2.5, 3, 0.1, 2)
    wanted = {"sequence": 128, "batch": 8}
    model = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
        "max_position_embeddings": 128,
    }  # fmt: skip
    layout = "pp2 mb4 fp32"
    before = plan(model, plain, layout, **wanted).best
    after = plan(model, replace(plain, calibration=found), layout, **wanted).best
    assert after.time.seconds == pytest.approx(1.5 * before.time.seconds)
    assert sum(after.time.breakdown.values()) == pytest.approx(after.time.seconds)
    band = constants()["band"]
    assert after.time.low == pytest.approx(before.time.seconds * min(1.2, 1.5 * band["low"]))
    assert after.time.high == pytest.approx(before.time.seconds * max(2.5, 1.5 * band["high"]))
    assert before.memory.slack_bytes == 0 and after.memory.slack_bytes == round(0.1 * after.memory.peak_bytes)
    assert after.document()["calibration"] == found.table() and "calibration" not in before.document()
    best = [
        search(problem_of(model, where, **wanted), top=3).best for where in (plain, replace(plain, calibration=found))
    ]
    assert [str(one.layout) for one in best[0]] == [str(one.layout) for one in best[1]]


def damaged(place: Path, text: str) -> Path:
    (place / "run").mkdir()
    (place / "run" / "result.json").write_text(text)
    return place / "run"


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda place: place / "none", "there is no such directory"),
        (lambda place: place, "is not a run: it has no result.json"),
        (lambda place: damaged(place, '{"step": 1'), "result.json is damaged: not JSON"),
        (lambda place: damaged(place, "[1]"), "result.json is damaged: not a JSON object"),
        (lambda place: damaged(place, "{}"), "predicted or measured is missing"),
        (lambda place: made_up_run(place / "r", 1.0, None), "no step was timed"),
        (lambda place: made_up_run(place / "r", 1.0, -1.0), "measured.step_seconds takes a number above 0, not -1.0"),
        (lambda place: made_up_run(place / "r", "1", 1.0), "predicted.step_seconds takes a number above 0, not '1'"),  # type: ignore
        (
            lambda place: made_up_run(place / "r", 1.0, 1.0, step_seconds=None),
            "did not predict the time of its steps; run `meshwright probe`, then train again",
        ),
        (
            lambda place: made_up_run(place / "r", 1.0, 1.0, calibration={"time_factor": 0}),
            "predicted: calibration: time_low is missing",
        ),
        (lambda place: made_up_run(place / "r", 1.0, 1.0, device=None), "predicted.device is missing"),
    ],
)
def test_invalid_run_is_one_line_error_with_its_name(tmp_path, make: Any, line: str):
    run = make(tmp_path)
    with pytest.raises(UserError) as caught:
        read_run(run)
    assert line in str(caught.value) and str(run) in str(caught.value) and "\n" not in str(caught.value)


def test_unfinished_run_and_run_of_another_device_are_refused(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / METRICS).write_text(json.dumps({"step": 1}))
    with pytest.raises(UserError, match=r"the run has not ended: it has no result\.json yet"):
        read_run(tmp_path / "a")
    path, run = cluster_file(tmp_path), made_up_run(tmp_path / "b", 1.0, 1.0, device="h100-sxm")
    with pytest.raises(UserError, match=f"the run was predicted for h100-sxm, .* is for {DEVICE}"):
        cluster_file_with(path, [read_run(run)])


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (3, "calibration should be a table, not 3"),
        ({"time_facto": 1.0}, 'unknown field "time_facto"; did you mean "time_factor"?'),
        ({"time_factor": 1.0}, "time_low is missing"),
        ({"time_factor": 1.0, "time_low": 1.0, "time_high": 1.0, "runs": 1.5}, "runs takes a whole number, at least 1"),
        ({"time_factor": -1.0, "time_low": 1.0, "time_high": 1.0, "runs": 1}, "time_factor takes a number above 0"),
        ({"time_factor": 3.0, "time_low": 1.0, "time_high": 2.0, "runs": 1}, "is not between time_low and time_high"),
    ],
)
def test_damaged_calibration_is_one_line_error(table: Any, line: str):
    with pytest.raises(UserError) as caught:
        cluster({"device": "h100-sxm", "devices": 8, "calibration": table})
    assert line in str(caught.value) and "\n" not in str(caught.value)
