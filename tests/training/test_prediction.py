"""A run reports predicted and measured figures, item by item; a failed prediction does not stop it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.machine import PROBE_VARIABLE, profile_directory
from meshwright.monitoring.comparison import Prediction, StepTimes, collect_measured_memory, format_comparison
from meshwright.monitoring.metrics import read_peak_memory_bytes
from meshwright.monitoring.step_memory import StepMemory
from meshwright.planner.api import plan
from meshwright.planner.cost.bounds import Bounds
from meshwright.planner.cost.step_time import StepTime
from meshwright.planner.hardware.measured import ReferenceStep
from meshwright.spec.presets import preset
from meshwright.training import prediction
from meshwright.training.objective import NextToken
from meshwright.training.start import launch_recipe
from tests.planner.calibration_cases import DEVICE, cluster_file
from tests.planner.cost.test_measured_rates import here, measured
from tests.training import training_cases as cases
from tests.training.test_process_memory import keep_constants

CALIBRATED = {
    "time_factor": 2.0,
    "time_low": 1.5,
    "time_high": 3.0,
    "runs": 2,
    "unexplained_share": 0.5,
    "unexplained_runs": 1,
}
STATES = ("parameters", "gradients", "optimizer")


@pytest.fixture(scope="module")
def measured_machine(tmp_path_factory) -> Iterator[Path]:
    """This machine has a cluster file with a calibration."""
    place = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(place))
        path = cluster_file(place, calibration=CALIBRATED)
        keep_constants()
        yield path


@pytest.fixture(scope="module")
def ran(measured_machine, tmp_path_factory) -> dict[str, Any]:
    """Outcome of one process that trained there for five steps."""
    place = tmp_path_factory.mktemp("ran")
    return cases.run_without_error(None, place, "dp1 bf16 mb2", train_steps=5, train_compile=False)[0]


def test_step_time_is_predicted_and_measured_on_known_machine(ran):
    predicted, measured = ran["result"]["predicted"], ran["result"]["measured"]
    assert predicted["step_seconds_low"] < predicted["step_seconds"] < predicted["step_seconds_high"]
    assert sum(predicted["seconds_by_part"].values()) == pytest.approx(predicted["step_seconds"])
    assert (predicted["device"], predicted["calibration"]) == (DEVICE, CALIBRATED)
    assert measured["step_seconds"] > 0 and measured["waiting_seconds"] == 0
    assert {"data", "forward", "backward", "update"} <= measured["seconds_by_part"].keys()
    assert sum(measured["seconds_by_part"].values()) == pytest.approx(measured["step_seconds"], rel=0.05, abs=2e-3)
    for side in (predicted, measured):  # a single rank never waits
        assert side["seconds_by_kind"]["working"] == pytest.approx(side["step_seconds"], rel=0.05)
        assert side["seconds_by_kind"]["waiting"] == 0


def test_step_prediction_includes_measured_reference_step_factor():
    layout = Layout.parse("dp2 fp32")
    steps = measured(steps=(ReferenceStep("dp2 fp32", 5.0),))
    slow, plain = here(steps), here()
    train = SimpleNamespace(batch=8, compile=False, cuda_graphs=False, tensor_overlap="off", planned_optimizer="adamw")
    trainer = SimpleNamespace(
        recipe=SimpleNamespace(train=train, data=SimpleNamespace(sequence=512)), layout=layout,
        device=SimpleNamespace(type="cpu"),
        task=SimpleNamespace(
            config=preset("gpt2"), tokens=SimpleNamespace(document_mask=False), objective=NextToken()
        ),
    )  # fmt: skip
    calibrated, without = (prediction._predict_step_time(trainer, each).seconds for each in (slow, plain))  # type: ignore[arg-type]
    assert calibrated == pytest.approx(plan("gpt2", slow, layout, sequence=512, batch=8).best.time.seconds)
    assert abs(calibrated / without - 1) > 0.1


def test_itemised_memory_matches_states_of_trainer(ran):
    predicted, measured = (ran["result"][which]["memory_bytes"] for which in ("predicted", "measured"))
    sums = "peak", "allocator_peak", "process_peak", "framework", "unexplained"
    parts = {name: size for name, size in predicted.items() if name not in sums}
    assert sum(parts.values()) == predicted["peak"] and parts["activations"] > 0
    assert {name: measured[name] for name in STATES} == {name: predicted[name] for name in STATES}
    assert sum(measured[name] for name in STATES) == sum(ran["result"]["measured"]["state_bytes"].values())
    assert predicted["allocator_peak"] == predicted["peak"] and measured["allocator_peak"] is None
    assert predicted["unexplained"] == round(predicted["peak"] * CALIBRATED["unexplained_share"])


def test_process_peak_is_itemised_and_predicted_as_measured(ran):
    predicted, measured = ran["result"]["predicted"], ran["result"]["measured"]["memory_bytes"]
    items = predicted["process_memory_bytes"]
    assert sum(items.values()) == predicted["memory_bytes"]["process_peak"]
    # The calibration of this machine adds half of the prediction.
    uncalibrated = predicted["memory_bytes"]["process_peak"] - items["unexplained"]
    assert items["unexplained"] == round(uncalibrated * CALIBRATED["unexplained_share"])
    assert measured["unexplained"] == measured["process_peak"] - uncalibrated
    assert uncalibrated == pytest.approx(measured["process_peak"], rel=0.10)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_process_peak_is_predicted_by_constants_measured_here(tmp_path, monkeypatch):
    """By the real launcher: the start measures, and its rank reads the stored constants."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(PROBE_VARIABLE)
    result = launch_recipe(cases.recipe(tmp_path / "run", "dp1 bf16", train_steps=5), show_progress=False)
    predicted, measured = (result[which]["memory_bytes"]["process_peak"] for which in ("predicted", "measured"))
    kept = [json.loads(file.read_text())["tables"] for file in profile_directory().glob("memory-*.json")]
    items = result["predicted"]["process_memory_bytes"]
    assert [each["first_use_bytes"] for each in kept] == [items["library workspaces"]]
    assert predicted == pytest.approx(measured, rel=0.10)


def test_predicted_memory_uses_sequences_of_first_steps(tmp_path):
    """Their document starts are those of the micro-batches."""
    predicted, found = cases.documents_of_steps(cases.recipe(tmp_path, "dp1 bf16 mb2").to_toml(), steps=200)
    assert predicted == found and any(len(row) > 1 for row in predicted)


def test_result_keeps_documented_prediction_keys(ran):
    result = ran["result"]
    assert result["predicted"]["state_bytes"] == result["measured"]["state_bytes"]
    assert result["predicted"]["sent_bytes_per_step"] == result["measured"]["sent_bytes_per_step"]
    assert result["predicted"]["flops_per_token"] > 0
    assert result["measured"]["peak_memory_bytes"] >= result["measured"]["memory_bytes"]["peak"]


def test_prediction_and_measurement_are_one_log_line_each(ran):
    lines = {line.partition(":")[0]: line for line in ran["said"]}
    assert " a step (" in lines["predicted"] and "; calibrated by 2 runs)" in lines["predicted"]
    assert "process peak of rank 0" in lines["predicted"] and "sent a step" in lines["measured"]
    assert "process peak of rank 0" in lines["measured"] and "; process" in lines["measured"]
    assert re.search(r" a step \(predicted .*s, error [-+][\d.]+%\)", lines["measured"])


def test_sent_bytes_on_every_axis_match_prediction(two: LocalRanks, tmp_path):
    result = cases.run_without_error(two, tmp_path, "dp2 zero1 fp32", train_steps=2, train_compile=False)[0]["result"]
    predicted, measured = result["predicted"], result["measured"]
    assert predicted["sent_bytes_by_axis"] == measured["sent_bytes_by_axis"]
    assert {"data", "shard", "world"} == predicted["sent_bytes_by_axis"].keys()
    assert sum(predicted["sent_bytes_by_axis"].values()) == sum(predicted["sent_bytes_per_step"].values())
    assert measured["step_seconds"] is None  # the first two steps are warm-up
    assert measured["memory_bytes"]["optimizer"] == predicted["memory_bytes"]["optimizer"]


def test_unknown_machine_and_failing_planner_are_one_line_each(tmp_path, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a fault")

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing"))
    monkeypatch.setattr(prediction, "ledger", broken)
    outcome = cases.run_without_error(None, tmp_path, "dp1 fp32", train_steps=2, train_compile=False)[0]
    predicted, measured = outcome["result"]["predicted"], outcome["result"]["measured"]
    assert predicted["memory_bytes"] is None and measured["memory_bytes"]["unexplained"] is None
    assert predicted["step_seconds"] is predicted["seconds_by_part"] is predicted["device"] is None
    said = [line for line in outcome["said"] if "not predicted" in line]
    assert said == [
        'step time is not predicted: no hardware profile for 1 rank x 1 thread; run "meshwright probe", or '
        "start once without MESHWRIGHT_PROBE=0",
        "memory is not predicted: error in the planner: KeyError: 'a fault'",
    ]


def test_damaged_cluster_file_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    cluster_file(tmp_path).write_text("device = [")
    outcome = cases.run_without_error(None, tmp_path, "dp1 fp32", train_steps=2, train_compile=False)[0]
    assert any("cluster.toml:1: not valid TOML" in line for line in outcome["said"])


def test_time_of_step_is_median_without_first_two():
    times = StepTimes()
    for seconds in (90.0, 80.0, 3.0, 1.0, 2.0, 7.0):
        times.add(seconds, {"forward": seconds / 4, "backward": seconds * 3 / 4}, seconds / 8)
    found = times.to_json_dict(torch.device("cpu"))
    assert found["step_seconds"] == 2.5
    assert found["seconds_by_part"] == {"forward": 0.5, "backward": 1.5} and found["waiting_seconds"] == 0.25
    assert found["seconds_by_kind"] == {"working": 1.75, "waiting": 0.25}
    assert times.to_json_dict(torch.device("cuda"))["seconds_by_kind"] is None


def test_predicted_wait_is_step_minus_own_work():
    parts = {"compute": 0.5, "data": 0.25, "bubble": 0.15, "optimizer": 0.1}
    time = StepTime(1.0, 0.9, 1.2, parts, Bounds(0.9, 1.2))
    said = Prediction(None, time, None, None, compiled=False).to_json_dict()
    assert said["seconds_by_kind"] == pytest.approx({"working": 0.6, "waiting": 0.4})


def test_measured_states_are_itemised_by_category():
    states = {"parameters": 2, "masters": 4, "gradients": 8, "gradient_buffers": 16, "optimizer": 32}
    memory = StepMemory(torch.device("cpu"))
    memory.growth_in_first_steps = 100
    found = collect_measured_memory(states, memory, {"memory_bytes": None})
    assert {name: found[name] for name in (*STATES, "peak", "unexplained")} == {
        "parameters": 2, "gradients": 24, "optimizer": 36, "peak": 100, "unexplained": None,
    }  # fmt: skip
    assert format_comparison({}, {}) is None


def test_step_memory_counts_allocations_since_trainer_creation():
    memory, size = StepMemory(torch.device("cpu")), 64 * 2**20
    before = read_peak_memory_bytes(torch.device("cpu"))
    memory.start()
    with memory.exclude_allocations():
        kept = torch.ones(size // 4)
    memory.begin()
    if memory._left == 0:
        pytest.skip("the kernel does not count peaks anew")
    held = torch.ones(size // 4)
    memory.step_done()
    assert memory.growth_in_first_steps is not None and size <= memory.growth_in_first_steps < 1.5 * size
    memory.stop()
    more = torch.ones(2 * size // 4)
    memory.step_done()
    assert memory.growth_in_first_steps < 1.5 * size
    assert memory.read_peak() >= before and memory.read_process_peak() >= before
    del kept, held, more


def test_headline_peak_is_of_fullest_rank(measured_machine, tmp_path):
    """The second stage computes the logits of a large vocabulary, and needs most."""
    change = {"data_sequence": 128, "model_vocabulary": 60_000, "model_hidden": 32, "model_tied": False}
    with LocalRanks(2) as ranks:  # shared ranks keep the peaks of earlier tests
        outcomes = cases.run_without_error(
            ranks, tmp_path, "pp2 mb1 fp32", train_steps=2, train_compile=False, checkpoint_every=0, **change
        )
    result = outcomes[0]["result"]
    predicted, measured = result["predicted"], result["measured"]
    for side in (predicted, measured):
        fullest = side["fullest_rank"]
        assert fullest["rank"] == 1
        assert fullest["memory_bytes"]["process_peak"] > side["memory_bytes"]["process_peak"] + 50 * 2**20
    fullest = predicted["fullest_rank"]
    assert sum(fullest["process_memory_bytes"].values()) == fullest["memory_bytes"]["process_peak"]
    assert measured["fullest_rank"] == outcomes[1]["result"]["measured"]["fullest_rank"]
    lines = [line for line in outcomes[0]["said"] if line.startswith(("predicted: ", "measured: "))]
    assert len(lines) == 2 and all("process peak of rank 1 " in line for line in lines)
