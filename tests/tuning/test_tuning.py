"""`meshwright tune` with real training runs: pruning, killed workers, results, errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import meshwright as mw
from meshwright.errors import CheckFailed, UserError
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe import Recipe, load_recipe_text, resolve_recipe
from meshwright.tuning.study import Study
from meshwright.tuning.trial_run import TrialRun
from tests.conftest import TINY_RECIPE
from tests.forked_commands import ForkedCommand

TEXT = "".join(f"def answer_{number}():\n    return {number}\n" for number in range(300))


def make_recipe(directory: Path, **changes: Any) -> Recipe:
    """The tiny recipe on a text of its own, which searches the learning rate. changes: recipe keys."""
    (directory / "text.txt").write_text(TEXT)
    recipe = load_recipe_text(TINY_RECIPE + "validate_every = 1\n", "tiny.toml")
    values = {
        "data.source": str(directory / "text.txt"), "data.cache": str(directory / "cache"), "train.steps": 40,
        "checkpoint.every": 8, "run.directory": str(directory / "runs/tiny"), "tune.trials": 1,
        "tune.space": {"train.learning_rate": {"log": [1e-3, 1e-1]}},
    }  # fmt: skip
    return resolve_recipe(recipe, values | changes)


def test_study_with_killed_worker_continues_its_trial_and_equals_plain_training(tmp_path: Path):
    recipe = make_recipe(tmp_path)
    file, study = tmp_path / "recipe.toml", tmp_path / "study"
    file.write_text(recipe.to_toml())
    command = ["-m", "meshwright", "tune", str(file), "--directory", str(study), "--json"]
    trial = study / "trials/0000/run"

    def find_newest() -> str:
        return max((path.name for path in (trial / "checkpoints").glob("step-*")), default="")

    def stop_after_checkpoint(number: signal.Signals) -> int:
        """Start a worker, stop it when the trial has a further checkpoint, as a scheduler does: with its training
        process; return its exit code."""
        before = find_newest()
        worker = ForkedCommand(command, tmp_path)
        while find_newest() == before and worker.poll() is None:
            time.sleep(0.02)
        assert worker.poll() is None, "the worker ended before it was stopped"
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
        os.kill(worker.pid, number)
        if number == signal.SIGTERM:
            os.kill(int(children[0]), number)
        worker.communicate()
        deadline = time.monotonic() + 30
        while Path(f"/proc/{children[0]}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert RunDirectory(trial).read_last_step() < 40, "the training process went on"  # SIGKILL: the kernel ends it
        return worker.returncode

    assert stop_after_checkpoint(signal.SIGTERM) == 143
    state = json.loads((trial / "checkpoints" / find_newest() / "training/state.json").read_text())
    assert state["step"] == RunDirectory(trial).read_last_step()
    assert stop_after_checkpoint(signal.SIGKILL) == -9
    output, errors = (last := ForkedCommand(command, tmp_path)).communicate()
    assert last.returncode == 0, errors
    document = json.loads(output)
    assert {key: document[key] for key in ("schema", "trials", "complete", "pruned", "failed", "running")} == {
        "schema": 1, "trials": 1, "complete": 1, "pruned": 0, "failed": 0, "running": 0,
    }  # fmt: skip
    assert document["best"]["run"] == str(study / f"trials/{document['best']['trial']:04d}/run")
    assert list(document["best"]["parameters"]) == ["train.learning_rate"]
    again = mw.train(document["recipe"], {"run.directory": str(tmp_path / "again")}, probe=False)
    assert again.validation_loss == document["best"]["value"]
    assert Path(document["page"]).read_text().startswith("<!doctype html>")
    assert mw.tune(recipe, directory=study).to_json_dict() == document  # used up: nothing is trained


def test_hopeless_trial_is_pruned_and_failing_ones_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tune = {"tune.trials": 2, "tune.startup": 1, "tune.sampler": "random", "tune.seed": 1}
    recipe = make_recipe(tmp_path, **tune, **{"train.steps": 200})
    losses = iter([1.0])
    real = TrialRun.run

    def run_first_without_training(self: TrialRun) -> tuple[float | None, str, str]:
        """End the first trial with an unreachable loss at every step; train the others."""
        if (loss := next(losses, None)) is None:
            return real(self)
        for step in range(1, 201):
            self.running.trial.report(loss, step)
        return loss, "complete", ""

    monkeypatch.setattr(TrialRun, "run", run_first_without_training)
    found = mw.tune(recipe, directory=tmp_path / "study")
    assert (found.trials, found.pruned, found.best["value"]) == (2, 1, 1.0)
    [step] = {json.loads(line)["step"] for line in (tmp_path / "study/trials/0001/run/metrics.jsonl").read_text()
              .splitlines()[-1:]}  # fmt: skip
    assert step < 200
    assert not (tmp_path / "study/trials/0001/run/checkpoints").exists()

    assert load_recipe_text((tmp_path / "study/best.toml").read_text(), "best.toml").run.name == "run-best"

    def fail(self: TrialRun) -> tuple[float | None, str, str]:
        """Fail as a run does whose loss diverges."""
        return None, "failed", "the loss is nan"

    monkeypatch.setattr(TrialRun, "run", fail)
    with pytest.raises(UserError, match="5 trials in a row failed, the last one: the loss is nan"):
        mw.tune(recipe, {"tune.trials": 50}, directory=tmp_path / "failing")


def test_running_trial_is_stopped_when_no_seconds_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def sleep(self: TrialRun, recipe: Recipe, log: Path) -> subprocess.Popen[bytes]:
        """Start a process that does not end, in place of training."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True)

    monkeypatch.setattr(TrialRun, "_start", sleep)
    recipe = make_recipe(tmp_path, **{"tune.seconds": 1.0, "tune.trials": 9})
    with pytest.raises(CheckFailed, match="no trial .* has completed: 0 failed; the last one: stopped: the budget of"):
        mw.tune(recipe, directory=tmp_path / "study")
    [trial] = Study(recipe, tmp_path / "study").list_trials()
    assert trial.state.name == "PRUNED" and trial.user_attrs["seconds"] >= 1


def test_missing_optuna_is_one_line_that_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r'needs Optuna: pip install "meshwright\[tune\]"'):
        Study(make_recipe(tmp_path), tmp_path / "study")


def test_run_that_cannot_start_here_leaves_its_trial_to_others(tmp_path: Path):
    recipe = make_recipe(tmp_path, **{"run.device": "cuda"})
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    for _ in range(2):  # the second worker takes the same trial
        worker = ForkedCommand(["-m", "meshwright", "tune", "recipe.toml", "--directory", "study"], tmp_path)
        _, errors = worker.communicate()
        assert worker.returncode == 2 and re.search(r"error: trial 0: .*cuda", errors.splitlines()[-1])
        [trial] = Study(recipe, tmp_path / "study").list_trials()
        assert trial.state.name == "RUNNING"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune.space": {}}, "tune.space is missing"),
        ({"tune.space": {"train.warmup": {"uniform": [0, 80]}}},
         r"tune.space: train.warmup = 80: train: warmup = 80 is more than steps = 40"),
        ({"tune.space": {"train.momentum": {"uniform": [0.0, 0.9]}}}, r'momentum belongs to optimizer "sgd"'),
        ({"tune.space": {"train.optimizer": {"choice": ["adamw", "adan"]}}}, r'unknown optimizer "adan"'),
        ({"data.source": "/nowhere"}, "/nowhere"),
        ({"tune.steps": 39}, r"the budget is smaller than one trial \(40 steps or 5,120 tokens\)"),
        ({"tune.space": {"model.heads": {"choice": [4, 3]}}}, "model.heads = 3: .*hidden 16 must be a multiple"),
    ],
)  # fmt: skip
def test_mistake_is_reported_before_a_study_is_made(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        mw.tune(make_recipe(tmp_path, **changes), directory=tmp_path / "study")
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune.trials": None, "tune.space": {"train.learning_rate": {"log": [1, 2]}}}, "has a space and no budget"),
        ({"train.validate_every": 0}, "tune compares validation losses: set train.validate_every"),
        ({"tune.space": {"train.lerning_rate": {"log": [1, 2]}}}, r"did you mean train.learning_rate\?"),
        ({"tune.space": {"train.learning_rate": {"lg": [1, 2]}}}, r"did you mean log\?"),
        ({"tune.space": {"layout": {"choice": ["dp1", "dp2"]}}}, "every layout computes the same loss"),
        ({"tune.space": {"data.sequence": {"choice": [16, 32]}}}, "all trials have to be validated on the same text"),
        ({"tune.space": {"train.learning_rate": {"log": [0, 1]}}}, "above 0"),
        ({"tune.space": {"train.learning_rate": {"uniform": [1, 1]}}}, "the first bound has to be below the second"),
        ({"tune.space": {"train.warmup": {"uniform": [0.0, 5.0]}}}, "train.warmup takes whole numbers"),
        ({"tune.space": {"train.warmup": {"uniform": [0, 3], "step": 2}}}, "step 2 does not lead from 0 to 3"),
        ({"tune.space": {"train.lr": {"log": [1, 2]}}}, r"did you mean train.learning_rate\?"),
        ({"tune.space": {"train.preference_beta": {"log": [1, 2]}}}, "the loss itself depends on it"),
        ({"tune.space": {"train.learning_rate": 5}}, "should be a table such as"),
        ({"tune.sampler": "tpee"}, r'unknown sampler "tpee"; did you mean "tpe"\?'),
    ],
)
def test_wrong_search_space_is_one_line_with_the_key(tmp_path: Path, changes: dict[str, Any], message: str):
    tables = make_recipe(tmp_path).to_tables()
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables[table] = {key: old for key, old in tables[table].items() if key != name}
        if value is not None:
            tables[table][name] = value
    with pytest.raises(UserError, match=message) as raised:
        Recipe.from_tables(tables)
    assert "\n" not in str(raised.value)
