"""Trials of a study: what the sampler may choose, how workers share them, when the budget ends them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.recipe import Recipe, load_recipe_text, resolve_recipe
from meshwright.tuning.page import write_page
from meshwright.tuning.study import JOURNAL, RunningTrial, Study
from tests.conftest import TINY_RECIPE

SPACE = """
[tune]
trials = 12
startup = 3
[tune.space]
train.learning_rate = { log = [1e-4, 1e-1] }
train.warmup = { uniform = [0, 4], step = 2 }
train.betas = { choice = [[0.9, 0.95], [0.9, 0.99]] }
train.optimizer = { choice = ["adamw", "sgd"] }
train.momentum = { uniform = [0, 1], step = 0.25, when = { "train.optimizer" = "sgd" } }
"""


def make_recipe(**tune: Any) -> Recipe:
    """The tiny recipe with a search space. tune: keys of [tune]."""
    recipe = load_recipe_text(TINY_RECIPE + "validate_every = 2\n" + SPACE, "tiny.toml")
    return resolve_recipe(recipe, {f"tune.{key}": value for key, value in tune.items()})


def finish(study: Study, running: RunningTrial, loss: float | None, **attributes: float) -> None:
    """End a trial that was not trained with this loss, None for a failure."""
    for name, value in attributes.items():
        running.trial.set_user_attr(name, value)
    study.finish(running, loss, "failed" if loss is None else "complete")
    running.release()


def compute_loss(values: Mapping[str, Any]) -> float:
    """A loss with its minimum at a learning rate of 1e-2, no warm-up, and AdamW."""
    return abs(values["train.learning_rate"] - 1e-2) + values["train.warmup"] + (values["train.optimizer"] == "sgd")


def search(study: Study) -> list[dict[str, Any]]:
    """The values of all trials of a search with `compute_loss`."""
    found = []
    while (running := study.take_trial()) is not None:
        found.append(running.values)
        finish(study, running, compute_loss(running.values))
    return found


def test_values_lie_in_the_space_and_conditions_hold(tmp_path: Path):
    trials = search(Study(make_recipe(), tmp_path))
    assert len(trials) == 12
    for values in trials:
        assert 1e-4 <= values["train.learning_rate"] <= 1e-1 and values["train.warmup"] in (0, 2, 4)
        assert isinstance(values["train.warmup"], int) and values["train.betas"] in ([0.9, 0.95], [0.9, 0.99])
        assert ("train.momentum" in values) == (values["train.optimizer"] == "sgd")
        assert values.get("train.momentum", 0.5) in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert {values["train.optimizer"] for values in trials} == {"adamw", "sgd"}


def test_values_depend_on_the_seed_alone_and_not_on_interruptions(tmp_path: Path):
    undisturbed = search(Study(make_recipe(), tmp_path / "a"))
    first, interrupted = Study(make_recipe(), tmp_path / "b"), []
    for _ in range(6):
        running = first.take_trial()
        assert running is not None
        interrupted.append(running.values)
        finish(first, running, compute_loss(running.values))
    assert interrupted + search(Study(make_recipe(), tmp_path / "b")) == undisturbed
    assert search(Study(make_recipe(seed=1), tmp_path / "c")) != undisturbed


def test_unfinished_trial_is_taken_over_only_when_its_lock_is_released(tmp_path: Path):
    worker, other = Study(make_recipe(), tmp_path), Study(make_recipe(), tmp_path)
    mine = worker.take_trial()
    theirs = other.take_trial()
    assert mine is not None and theirs is not None and (mine.trial.number, theirs.trial.number) == (0, 1)
    os.close(mine.lock)  # the kernel does this for a killed worker
    again = other.take_trial()
    assert again is not None and again.trial.number == 0 and again.values == mine.values
    assert len(other.list_trials()) == 2


def test_trials_of_two_workers_stay_within_the_budget(tmp_path: Path):
    recipe = make_recipe(trials=3)
    workers = [Study(recipe, tmp_path), Study(recipe, tmp_path)]
    running = [workers[at % 2].take_trial() for at in range(5)]
    assert [trial is not None for trial in running] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("budget", "used", "trials"),
    [
        ({"steps": 11}, {"steps": 4}, 2),  # four steps a trial: a third could end after step 12
        ({"steps": 11}, {"steps": 2}, 4),  # pruned after two
        ({"tokens": 4 * 4 * 32 * 3}, {"tokens": 4 * 4 * 32}, 3),
        ({"seconds": 10.0}, {"seconds": 4.0}, 3),  # the third begins after 8 s
    ],
)
def test_budget_counts_what_trials_used(tmp_path: Path, budget: dict[str, Any], used: dict[str, Any], trials: int):
    study = Study(make_recipe(**{"trials": 100, **budget}), tmp_path)
    for _ in range(trials):
        running = study.take_trial()
        assert running is not None
        finish(study, running, 1.0, **used)
    assert study.take_trial() is None


def test_checkpoints_of_the_best_trials_only_are_kept_and_best_recipe_trains(tmp_path: Path):
    study = Study(make_recipe(keep=2, trials=4), tmp_path)
    for loss in (3.0, 1.0, None, 2.0):
        running = study.take_trial()
        assert running is not None
        (running.directory / "run" / "checkpoints" / "step-000004").mkdir(parents=True)
        finish(study, running, loss)
    kept = [
        trial.number
        for trial in study.list_trials()
        if (study.get_trial_directory(trial.number) / "run/checkpoints").exists()
    ]
    assert kept == [1, 3]
    study.write_best_recipe()
    best = load_recipe_text((tmp_path / "best.toml").read_text(), "best.toml")
    assert not best.tune.space
    assert best.train.learning_rate == study.list_trials()[1].params["train.learning_rate"]


def test_halving_continues_the_best_third_of_all_trials_at_each_rung(tmp_path: Path):
    study = Study(make_recipe(pruner="halving", trials=9, startup=3), tmp_path)
    stopped = []
    for loss in (3.0, 1.0, 2.0, 1.5, 0.9, 1.2, 0.5):
        running = study.take_trial()
        assert running is not None
        for step, change in ((2, 0.0), (4, 9.0)):  # compared after 1 and 3 times train.validate_every = 2 steps
            if study.report_loss(running, step, loss + change):
                stopped.append((loss, step))
                break
        finish(study, running, loss)
    assert stopped == [(1.5, 2), (1.2, 2)]  # none of the first three; at rank 2 of 4 and 3 of 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train.learning_rate": 2e-2}, "train.learning_rate is 0.02, and in the study in .* it is 0.01"),
        ({"tune.seed": 4}, "tune.seed is 4"),
        ({"tune.space.train.warmup": {"uniform": [0, 2]}}, "tune.space is "),
    ],
)
def test_study_of_another_recipe_is_refused(tmp_path: Path, change: dict[str, Any], message: str):
    Study(make_recipe(), tmp_path)
    with pytest.raises(UserError, match=message):
        Study(resolve_recipe(make_recipe(), change), tmp_path)


def test_workers_may_differ_in_layout_and_budget_but_not_in_precision(tmp_path: Path):
    Study(make_recipe(), tmp_path)
    with pytest.raises(UserError, match="layout dp2 bf16 has another precision than dp1"):
        Study(resolve_recipe(make_recipe(), {"layout": "dp2 bf16"}), tmp_path)
    Study(resolve_recipe(make_recipe(), {"layout": "dp2 zero1", "tune.trials": 50, "run.threads": 1}), tmp_path)


def test_journal_with_a_torn_line_is_repaired_and_a_foreign_file_refused(tmp_path: Path):
    study = Study(make_recipe(), tmp_path)
    running = study.take_trial()
    assert running is not None
    finish(study, running, 1.0)
    with (tmp_path / JOURNAL).open("ab") as file:
        file.write(b'{"op_code":6,"worker_id":"x')
    assert study.take_trial() is not None  # a worker that had opened it before
    again = Study(make_recipe(), tmp_path)
    assert [trial.value for trial in again.list_trials()] == [1.0, None]
    assert all(json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines())
    other = tmp_path / "other"
    other.mkdir()
    for before in ("", (tmp_path / JOURNAL).read_text()):
        for line in ("not a journal\n", "[]\n"):
            (other / JOURNAL).write_text(before + line)
            with pytest.raises(UserError, match=r"journal.jsonl is not the journal of a study"):
                Study(make_recipe(), other).take_trial()
            assert (other / JOURNAL).read_text() == before + line


def test_page_shows_every_trial_and_orders_keys_by_importance(tmp_path: Path):
    study = Study(make_recipe(trials=20, pruner="none"), tmp_path)
    while (running := study.take_trial()) is not None:
        running.trial.report(5.0, 2)
        loss = 1.0 + abs(running.values["train.warmup"] - 2)  # depends on the warm-up alone
        finish(study, running, None if running.trial.number == 4 else loss)
    write_page(study)
    text = (tmp_path / "index.html").read_text()
    assert all(f"trial {number}: " in text for number in range(20))
    for heading in ("History", "Learning curves", "Importance", "Parallel coordinates", "Slices"):
        assert f"<h2>{heading}</h2>" in text
    curves = text[text.index("<h2>Learning curves") : text.index("<h2>Importance")]
    assert all(words in curves for words in ("best trial", "other complete trials", "trials that did not complete"))
    history = text[text.index("<h2>History") : text.index("<h2>Learning curves")]
    assert re.findall(r'class="picture" width="(\d+)"', history) == ["760", "380"]
    importance = text[text.index("<h2>Importance") : text.index("<h2>Parallel")]
    assert importance.index("train.warmup") == min(
        importance.index(key) for key in ("train.warmup", "train.learning_rate", "train.betas", "train.optimizer")
    )
    assert "Keys that some trials do not have are not rated." in importance
