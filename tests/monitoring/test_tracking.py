"""Trackers receive every figure of `metrics.jsonl` once, even if the run is interrupted; a failing tracker does not
affect the run. Values are read back with the libraries' own readers."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_recipe
from meshwright.monitoring import tracking
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.monitoring.trackers import TrackedRun
from meshwright.monitoring.tracking import Tracking, flatten_line
from meshwright.recipe import Recipe, load_recipe
from tests.forked_commands import ForkedCommand
from tests.rank_processes import read_ranks
from tests.training import training_cases as cases

Figures = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tracking")


@pytest.fixture(scope="module")
def uri(home) -> str:
    uri = f"sqlite:///{home}/mlflow.db"
    pytest.importorskip("mlflow.tracking").MlflowClient(tracking_uri=uri).search_experiments()  # makes the database
    return uri


def track(uri: str) -> dict:
    return {"to": ["tensorboard", "mlflow"], "options": {"mlflow": {"uri": uri, "experiment": "tests"}}}


def run(two, place: Path, uri: str, crash_after: int = 0, fault: str = "", **changes):
    changes = {"checkpoint_every": 2, "train_validate_every": 3, "track": track(uri)} | changes
    return cases.run(two, place, "dp2 zero1 fp32", crash_after, fault, **changes)


def written(place: Path) -> Figures:
    """Return every figure of `metrics.jsonl` by its key, as (step, value)."""
    found: Figures = defaultdict(list)
    for line in cases.metrics(place):
        step, values = flatten_line(line)
        for key, value in values.items():
            assert isinstance(value, float), key
            found[key].append((step, value))
    return found


def in_tensorboard(place: Path) -> tuple[Figures, dict[str, list[str]]]:
    """Return scalars and texts as TensorBoard shows them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen = accumulator.EventAccumulator(str(place / "run/tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    seen.Reload()
    scalars = {tag: [(event.step, event.value) for event in seen.Scalars(tag)] for tag in seen.Tags()["scalars"]}
    texts = {
        tag: [event.tensor_proto.string_val[0].decode() for event in seen.Tensors(tag)]
        for tag in seen.Tags()["tensors"]
    }
    return scalars, texts


def in_mlflow(uri: str, directory: Path):
    """Return the only run of `directory` and its figures."""
    tracking_module = pytest.importorskip("mlflow.tracking")
    client = tracking_module.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tests")
    [found] = client.search_runs([experiment.experiment_id], f"tags.directory = '{directory.resolve()}'")
    figures = {
        key: [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, key)]
        for key in found.data.metrics
    }
    return found, figures


def same_figures(seen: Figures, expected: Figures) -> None:
    """Check that the figures are exactly those of the metrics, each step once and in order; TensorBoard keeps
    float32."""
    assert {key for key in seen if not key.startswith(("predicted/", "measured/"))} == set(expected)
    for key, values in expected.items():
        assert [step for step, _ in seen[key]] == [step for step, _ in values], key
        assert [value for _, value in seen[key]] == pytest.approx([value for _, value in values], rel=1e-6), key


def test_trackers_receive_all_metrics_and_the_recipe(two, home, uri):
    pytest.importorskip("tensorboard"), pytest.importorskip("mlflow")
    place = home / "whole"
    outcome = run(two, place, uri)[0]
    assert outcome["error"] == "" and not any("tracker" in line for line in outcome["said"]), outcome["said"]
    expected = written(place)
    assert {"loss", "seconds_by_part/backward", "validation_loss", "save/stall_seconds"} <= set(expected)
    assert len(expected["loss"]) == 6
    scalars, texts = in_tensorboard(place)
    same_figures(scalars, expected)
    found, figures = in_mlflow(uri, place / "run")
    same_figures(figures, expected)
    result = outcome["result"]
    for seen in (scalars, figures):  # predictions with the first step, both with the last
        assert seen["predicted/flops_per_token"] == [(6, pytest.approx(result["predicted"]["flops_per_token"]))]
        assert [step for step, _ in seen["predicted/memory_bytes/peak"]] == [1, 6]
        peak = result["measured"]["state_bytes"]["parameters"]
        assert seen["measured/state_bytes/parameters"] == [(6, pytest.approx(peak))]
    assert texts["checkpoint/text_summary"] == [result["checkpoint"]] == [found.data.tags["checkpoint"]]
    assert "| train.learning_rate | `0.003` |" in texts["recipe/text_summary"][0]
    assert found.data.params["train.learning_rate"] == "0.003" and found.data.params["layout"] == "dp2 zero1 fp32"
    assert found.info.status == "FINISHED" and found.info.run_name == "run"


@pytest.mark.parametrize("slow", [False, True], ids=["killed with all sent", "killed before it was sent"])
def test_crashed_and_resumed_run_is_tracked_once_per_step(two, home, uri, slow):
    """It crashes after step 5 and resumes from the checkpoint of step 4."""
    pytest.importorskip("tensorboard"), pytest.importorskip("mlflow")
    place = home / f"crashed {slow}"
    assert run(two, place, uri, crash_after=5, fault="trackers_hang_after_step_3" if slow else "")[0]["result"] == {}
    outcomes = run(two, place, uri, train_steps=8)
    assert outcomes[0]["error"] == "" and outcomes[0]["result"]["step"] == 8
    expected = written(place)
    assert [step for step, _ in expected["loss"]] == [1, 2, 3, 4, 5, 6, 7, 8]
    scalars, _ = in_tensorboard(place)
    found, figures = in_mlflow(uri, place / "run")
    for seen in (scalars, figures):
        same_figures({key: values for key, values in seen.items() if key == "loss"}, {"loss": expected["loss"]})
        assert set(expected) <= set(seen)
        for key, values in expected.items():
            assert [step for step, _ in seen[key]] == [step for step, _ in values], key
    assert found.info.status == "FINISHED"
    assert found.data.params["train.steps"] == "6" and found.data.tags["resumed.train.steps"] == "8"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_killed_rank_0_leaves_tracking_without_gap_or_duplicate(home, uri):
    """Two processes, SIGKILL, restarted by the launcher."""
    pytest.importorskip("tensorboard"), pytest.importorskip("mlflow")
    place = home / "killed"
    (place / "run").mkdir(parents=True)
    recipe = cases.recipe(place, "dp2 zero1 fp32", checkpoint_every=2, train_steps=16, track=track(uri))
    (place / "tiny.toml").write_text(recipe.to_toml())
    running = ForkedCommand(("-m", "meshwright", "train", str(place / "tiny.toml"), "--restarts", "1"), place)
    try:
        deadline = time.monotonic() + 120
        while (RunDirectory(place / "run").read_last_step() or 0) < 5:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(read_ranks(place / "run")[0], signal.SIGKILL)
        _, errors = running.communicate(timeout=150)
    finally:
        running.kill()
    assert running.returncode == 0 and "restarting (1 of 1)" in errors, errors
    assert "resumed from step-" in errors and "tracker" not in errors, errors
    expected = written(place)
    found, figures = in_mlflow(uri, place / "run")
    for seen in (in_tensorboard(place)[0], figures):
        assert [step for step, _ in seen["loss"]] == list(range(1, 17))
        same_figures({"loss": seen["loss"]}, {"loss": expected["loss"]})
    assert found.info.status == "FINISHED"


def test_stopped_run_is_tracked_as_stopped_with_checkpoint(two, home, uri):
    pytest.importorskip("tensorboard"), pytest.importorskip("mlflow")
    place = home / "stopped"
    outcomes = run(two, place, uri, fault="stop_in_step_4")
    assert outcomes[0]["error"].startswith("Terminated")
    found, figures = in_mlflow(uri, place / "run")
    assert found.info.status == "KILLED" and found.data.tags["checkpoint"].endswith("step-000004")
    assert [step for step, _ in figures["loss"]] == [1, 2, 3, 4]
    run(two, place, uri)
    found, figures = in_mlflow(uri, place / "run")
    assert found.info.status == "FINISHED" and [step for step, _ in figures["loss"]] == [1, 2, 3, 4, 5, 6]


def test_unreachable_tracking_server_does_not_stop_run(two, home):
    pytest.importorskip("mlflow")
    changes = {"track": {"to": ["mlflow"], "options": {"mlflow": {"uri": "http://127.0.0.1:9"}}}}
    outcome = cases.run(two, home / "no server", "dp2 zero1 fp32", **changes)[0]
    assert outcome["error"] == "" and outcome["result"]["step"] == 6
    said = [line for line in outcome["said"] if line.startswith("tracker")]
    assert len(said) == 2 and said[0].startswith("tracker mlflow failed: MlflowException: ")
    assert said[0].endswith("; training continues, and sending is retried")
    assert " lines were lost (MlflowException: " in said[1]
    expected = cases.run(two, home / "without", "dp2 zero1 fp32")
    assert cases.trace(home / "no server") == cases.trace(home / "without") and expected[0]["error"] == ""


# --- custom trackers


class Recorder:
    """Tracker for tests that records its calls and can fail or block."""

    calls: list = []
    fails: dict = {}  # method -> number of failures; -1: always
    gate = threading.Event()

    def __init__(self, colour: str = "red") -> None:
        self.colour = colour

    def start(self, run: TrackedRun, recipe) -> None:
        self._do("start", (run.name, run.fresh, run.step, dict(run.kept), recipe["train.steps"]))
        run.kept["name"] = "kept"

    def log(self, step: int, values) -> None:
        self._do("log", (step, dict(values)))

    def finish(self, status: str) -> None:
        self._do("finish", status)

    def _do(self, method: str, arguments) -> None:
        self.gate.wait()
        left = self.fails.get(method, 0)
        if left:
            self.fails[method] = left - 1
            raise ConnectionError(f"no {method}")
        self.calls.append((method, arguments))


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr(Recorder, "calls", [])
    monkeypatch.setattr(Recorder, "fails", {})
    monkeypatch.setattr(Recorder, "gate", threading.Event())
    Recorder.gate.set()
    monkeypatch.setattr(tracking, "PAUSE", 0.001)
    yield Recorder
    Recorder.gate.set()
    for thread in threading.enumerate():  # a hanging thread would call the recorder of the next test
        if thread.name.startswith("tracker "):
            thread.join(60)


def own(place: Path, options: dict | None = None, steps: int = 6) -> Recipe:
    name = f"{__name__}:Recorder"
    sys.modules.setdefault(__name__, sys.modules[__name__])
    return cases.recipe(place, "dp1 fp32", train_steps=steps, track={"to": [name], "options": {name: options or {}}})


def begun(place: Path, step: int = 0) -> tuple[Tracking, list[str]]:
    recipe = own(place)
    directory = RunDirectory(recipe.run_directory)
    directory.create()
    directory.metrics.touch()
    said: list[str] = []
    return Tracking(recipe, "dp1 fp32", directory, step, said.append), said


def line(step: int, **more) -> dict:
    return {"step": step, "loss": 1 / step, **more}


def logged(recorder) -> list:
    return [arguments for method, arguments in recorder.calls if method == "log"]


def test_custom_tracker_class_receives_same_values(tmp_path, recorder):
    sender, said = begun(tmp_path)
    sender.queue_line(line(1, gradient_norm=math.nan, seconds_by_part={"data": 0.5}, skipped=True, note=None))
    sender.queue_line({"event": "save", "step": 1, "stall_seconds": 2})
    sender.queue_values(2, {"measured": {"peak": 7}, "checkpoint": "there"})
    sender.finish("finished")
    assert recorder.calls == [
        ("start", ("run", True, 0, {}, 6)),
        ("log", (1, {"loss": 1.0, "seconds_by_part/data": 0.5, "skipped": 1.0})),
        ("log", (1, {"save/stall_seconds": 2.0})),
        ("log", (2, {"measured/peak": 7.0, "checkpoint": "there"})),
        ("finish", "finished"),
    ]
    assert said == []


def test_intermittently_failing_tracker_loses_no_lines(tmp_path, recorder):
    recorder.fails |= {"start": 2, "log": 2}
    sender, said = begun(tmp_path)
    for step in (1, 2, 3):
        sender.queue_line(line(step))
    deadline = time.monotonic() + 20
    while len(logged(recorder)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    sender.finish("failed")
    assert [step for step, _ in logged(recorder)] == [1, 2, 3] and recorder.calls[-1] == ("finish", "failed")
    assert [words.partition(":")[0] for words in said] == [f"tracker {__name__}"]  # one warning
    assert "ConnectionError: no start; training continues" in said[0]


def test_failing_tracker_warns_once_and_counts_lost_lines(tmp_path, recorder):
    recorder.fails["log"] = -1
    sender, said = begun(tmp_path)
    for step in range(1, 6):
        sender.queue_line(line(step))
    sender.finish("finished")
    assert len(said) == 2 and said[1].endswith("5 of 5 lines were lost (ConnectionError: no log)")


def test_hanging_tracker_blocks_no_step_and_queue_is_bounded(tmp_path, recorder, monkeypatch):
    for name, value in (("START_SECONDS", 0.05), ("PATIENCE_SECONDS", 0.05), ("WAITING", 10)):
        monkeypatch.setattr(tracking, name, value)
    recorder.gate.clear()
    sender, said = begun(tmp_path)
    for step in range(1, 101):
        sender.queue_line(line(step))
    sender.finish("finished")
    recorder.gate.set()
    assert len(said) == 1 and said[0].endswith("100 of 100 lines were lost (timed out)")


def test_resumed_run_sends_untracked_lines(tmp_path, recorder):
    directory = RunDirectory(own(tmp_path).run_directory)
    directory.create()
    text = "".join(f'{{"step": {step}, "loss": {step}}}\n' for step in range(1, 7))
    directory.metrics.write_text(text)
    directory.write_trackers({f"{__name__}:Recorder": {"sent": "2", "name": "kept"}})
    sender = Tracking(own(tmp_path), "dp1", directory, 5, lambda words: None)
    sender.queue_line(line(6))
    sender.finish("finished")
    assert recorder.calls[0] == ("start", ("run", False, 2, {"sent": "2", "name": "kept"}, 6))
    assert [step for step, _ in logged(recorder)] == [3, 4, 5, 6]
    assert directory.read_trackers() == {f"{__name__}:Recorder": {"sent": "6", "name": "kept"}}


# --- mistakes before the start


def refused(tiny_recipe: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check_recipe(load_recipe(tiny_recipe, overrides, trust=True))
    return str(caught.value)


def test_tracking_mistakes_are_one_line_before_ranks_start(tiny_recipe, monkeypatch):
    said = refused(tiny_recipe, "track.to=['tensorbord']")
    assert 'track.to: unknown tracker "tensorbord"; did you mean "tensorboard"?' in said
    said = refused(tiny_recipe, "track.to=['nowhere:Tracker']")
    assert "cannot be loaded: No module named 'nowhere'; install it, or add its directory to PYTHONPATH" in said
    assert 'names "mlflow" twice' in refused(tiny_recipe, "track.to=['mlflow', 'mlflow']")
    said = refused(tiny_recipe, "track.to=['mlflow']", "track.options.mlflow.urii=http://there")
    assert 'track.options.mlflow: unknown option "urii"; did you mean uri?' in said
    said = refused(tiny_recipe, "track.options.mlfow.uri=http://there")
    assert 'track.options: unknown tracker "mlfow"; did you mean "mlflow"?' in said
    monkeypatch.setattr("meshwright.monitoring.trackers.find_spec", lambda name: None)
    said = refused(tiny_recipe, "track.to=['tensorboard']")
    assert said.endswith(
        "tracker tensorboard needs tensorboard: run `pip install 'meshwright[tensorboard]'` or leave it out"
    )
