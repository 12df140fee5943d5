"""A study: the directory in which all workers of a hyper-parameter search record trials. Free of torch.

The trials are in `journal.jsonl`, Optuna's append-only journal, whose locks hold on network file systems too. A worker
locks the directory while it takes a trial, and the trial's own directory while it runs it. Both locks (flock) end with
the processes that hold them, so a trial that is not finished and not locked is one whose worker was killed: the next
worker continues it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint.files import replace_file
from meshwright.errors import UserError, error_reason
from meshwright.layout import Layout
from meshwright.monitoring.resuming import list_values_by_key
from meshwright.monitoring.run_directory import CHECKPOINTS
from meshwright.recipe import SCHEMA, Recipe, load_recipe_text, resolve_recipe
from meshwright.toml import format_toml_value
from meshwright.tuning.budget import Budget
from meshwright.tuning.journal import lock_file, open_journal

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.study import Study as OptunaStudy
    from optuna.trial import FrozenTrial, Trial

JOURNAL = "journal.jsonl"
_MAY_DIFFER = (  # keys that workers of one study may set differently: where a trial runs, what it reports, the budget
    "layout", "run.name", "run.directory", "run.rendezvous", "run.device", "run.threads", "run.collective_timeout",
    "data.cache", "train.compile", "train.cuda_graphs", "train.tensor_overlap", "train.log_every",
    "train.slow_rank_factor", "train.profile", "train.profile_ranks", "collectives",
    "checkpoint", "track", "tune.trials", "tune.steps", "tune.tokens",
    "tune.seconds", "tune.keep",
)  # fmt: skip


@dataclass
class RunningTrial:
    """Trial that this worker runs. trial: Optuna's handle. values: {recipe key: value} that the sampler chose.
    directory: files of the trial. lock: file descriptor that locks `directory` until it is closed."""

    trial: Trial
    values: dict[str, Any]
    directory: Path
    lock: int

    def release(self) -> None:
        """Unlock the trial's directory."""
        os.close(self.lock)


class Study:
    """Hyper-parameter study: a directory in which all workers record their trials, opened by one worker.

    recipe: the recipe whose keys are searched. directory: created if missing; a study in it is continued. Raises
    `UserError` if the directory holds a study of another recipe, cannot be used, or Optuna is not installed.
    """

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        optuna = import_optuna()
        self.recipe, self.directory = recipe, directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"study directory {directory} cannot be made: {error_reason(error)}") from None
        with self._hold_lock():
            try:
                self.optuna: OptunaStudy = optuna.create_study(
                    study_name="tune", storage=open_journal(directory / JOURNAL), direction="minimize",
                    load_if_exists=True, sampler=_make_sampler(recipe), pruner=_make_pruner(recipe),
                )  # fmt: skip
                stored = self.optuna.user_attrs.get("recipe")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{directory / JOURNAL} is not the journal of a study: {error}") from None
            if stored is None:
                self.optuna.set_user_attr("recipe", recipe.to_toml())
            else:
                _check_same_study(load_recipe_text(str(stored), f"the study in {directory}"), recipe)

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Context manager that waits for the study's lock and holds it. Workers hold this lock for milliseconds."""
        descriptor = lock_file(self.directory / ".lock", wait=True)
        assert descriptor is not None
        try:
            yield
        finally:
            os.close(descriptor)

    def take_trial(self) -> RunningTrial | None:
        """Return the next trial for this worker, and lock its directory: a trial that a killed worker left unfinished,
        if there is one, else a new trial. Return None if the budget allows no new trial.
        """
        optuna = import_optuna()
        with self._hold_lock():
            trials = self.optuna.get_trials(deepcopy=False)
            for trial in trials:
                if (
                    trial.state == optuna.trial.TrialState.RUNNING
                    and (lock := self._try_lock(trial.number)) is not None
                ):
                    return self._begin(optuna.trial.Trial(self.optuna, trial._trial_id), lock)
            if not Budget.from_recipe(self.recipe).allows_another(trials):
                return None
            created = self.optuna.ask()
            lock = self._try_lock(created.number)
            assert lock is not None, "a new trial's directory is locked"
            return self._begin(created, lock)

    def _try_lock(self, number: int) -> int | None:
        """Lock the directory of the trial `number`. Return the file descriptor that holds the lock; None if another
        worker, or a training process that it started, holds it."""
        directory = self.get_trial_directory(number)
        directory.mkdir(parents=True, exist_ok=True)
        return lock_file(directory / ".lock", wait=False)

    def _begin(self, trial: Trial, lock: int) -> RunningTrial:
        """Start the trial `trial`: let the sampler choose its values (a resumed trial keeps them), and reserve its
        steps and tokens in the study's budget. lock: file descriptor that locks the trial's directory.
        """
        values = suggest_values(self.recipe, trial)
        running = RunningTrial(trial, values, self.get_trial_directory(trial.number), lock)
        for name, amount in Budget.compute_largest_trial(self.recipe).items():
            trial.set_user_attr(f"reserved_{name}", amount)
        return running

    def get_trial_directory(self, number: int) -> Path:
        """Return the directory of the trial `number`, which holds its recipe, log and run directory."""
        return self.directory / "trials" / f"{number:04d}"

    def make_trial_recipe(self, values: Mapping[str, Any], name: str, directory: Path | None) -> Recipe:
        """Return the recipe of one trial: the study's recipe with `values`, {recipe key: value}. name: value of
        `run.name` in this recipe. directory: run directory of the trial; None: runs/NAME. Raises `UserError` if the
        values contradict each other."""
        tables = self.recipe.to_tables()
        tables.pop("tune", None)
        tables["run"]["name"] = name
        tables["run"].pop("directory", None)
        if directory is not None:
            tables["run"]["directory"] = str(directory)
        return resolve_recipe(tables, values, trust=self.recipe.trusted)

    def report_loss(self, running: RunningTrial, step: int, loss: float) -> bool:
        """Record the validation loss of the trial `running` after the training step `step`, in nats per token; return
        True if the pruner stops the trial, which it does only once `tune.startup` trials are complete."""
        running.trial.report(loss, step)
        pruned = running.trial.should_prune()  # always asked: halving compares later trials with the losses seen here
        complete = sum(trial.state.name == "COMPLETE" for trial in self.list_trials())
        return pruned and complete >= self.recipe.tune.startup

    def finish(self, running: RunningTrial, value: float | None, state: str, reason: str = "") -> None:
        """Record the end of the trial `running`, and delete the checkpoints of all finished trials except the best.

        value: validation loss after the last step; None unless `state` is "complete". state: "complete", "pruned" or
        "failed". reason: why the trial did not complete.
        """
        from optuna.trial import TrialState

        states = {"complete": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        if reason:
            running.trial.set_user_attr("reason", reason)
        with self._hold_lock():
            self.optuna.tell(running.trial, value, states[state], skip_if_finished=True)
            self._delete_checkpoints()

    def write_best_recipe(self) -> None:
        """Write `best.toml`, the study's recipe with the values of the best trial, ready to train. Do nothing before a
        trial has completed."""
        with self._hold_lock():
            if any(trial.state.name == "COMPLETE" for trial in self.list_trials()):
                values = self.read_values(self.optuna.best_trial)
                best = self.make_trial_recipe(values, f"{self.recipe.run.name}-best", None)
                replace_file(self.directory / "best.toml", best.to_toml().encode(), sync=False)

    def _delete_checkpoints(self) -> None:
        """Delete the checkpoints of finished trials, except those of the best trials. The recipe key `tune.keep` is the
        number of trials whose checkpoints are kept."""
        complete = sorted((trial for trial in self.optuna.get_trials(deepcopy=False) if trial.value is not None),
                          key=lambda trial: (trial.state.name != "COMPLETE", trial.value))  # fmt: skip
        kept = {trial.number for trial in complete[: self.recipe.tune.keep] if trial.state.name == "COMPLETE"}
        for trial in self.optuna.get_trials(deepcopy=False):
            if trial.state.is_finished() and trial.number not in kept:
                shutil.rmtree(self.get_trial_directory(trial.number) / "run" / CHECKPOINTS, ignore_errors=True)

    def read_values(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return {recipe key: value} of a recorded trial."""
        values: dict[str, Any] = {}
        for dimension in self.recipe.tune.dimensions:
            if dimension.key in trial.params:
                found = trial.params[dimension.key]
                by_text = {format_toml_value(value): value for value in dimension.choices}
                values[dimension.key] = by_text[found] if dimension.choices else found
        return values

    def list_trials(self) -> list[FrozenTrial]:
        """Return all trials of the study as Optuna's records, in the order of their numbers."""
        return self.optuna.get_trials(deepcopy=False)


def import_optuna() -> Any:
    """Import and return Optuna, with its progress lines and warnings of experimental features switched off. Raises
    `UserError` if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise UserError('meshwright tune needs Optuna: pip install "meshwright[tune]"') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    return optuna


def suggest_values(recipe: Recipe, trial: Trial) -> dict[str, Any]:
    """Return {recipe key: value}, which the study's sampler chooses for `trial`. A trial that continues after an
    interruption gets its earlier values again."""
    values: dict[str, Any] = {}
    for dimension in recipe.tune.dimensions:
        if not dimension.is_active(values):
            continue
        key = dimension.key
        if dimension.choices:
            by_text = {format_toml_value(value): value for value in dimension.choices}  # Optuna takes no lists
            values[key] = by_text[trial.suggest_categorical(key, list(by_text))]
        else:
            log, low, high = dimension.kind == "log", dimension.low, dimension.high
            if SCHEMA.accepts(key, int) and not SCHEMA.accepts(key, float):
                values[key] = trial.suggest_int(key, int(low), int(high), step=int(dimension.step or 1), log=log)
            else:
                values[key] = trial.suggest_float(key, low, high, step=dimension.step, log=log)
    return values


def _make_sampler(recipe: Recipe) -> BaseSampler:
    """Return the sampler of the study: random search or TPE, as the recipe key `tune.sampler` says. A trial's values
    depend on the study's seed, the trial's number and the earlier results, but not on which worker runs it."""
    from optuna.samplers import BaseSampler, RandomSampler, TPESampler

    tune = recipe.tune

    def make(number: int) -> BaseSampler:
        """Make an Optuna sampler whose random generator is seeded by the study's seed and `number`."""
        seed = int.from_bytes(hashlib.sha256(f"{tune.seed}:{number}".encode()).digest()[:4], "little")
        if tune.sampler == "random":
            return RandomSampler(seed)
        return TPESampler(seed=seed, n_startup_trials=tune.startup, multivariate=True, group=True, constant_liar=True)

    class SeededSampler(BaseSampler):
        """Optuna sampler that creates a fresh sampler for each trial, seeded by the study's seed and the trial's
        number, so that a resumed study, or another worker, draws the same values. Methods: as in `BaseSampler`."""

        def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
            """Return the keys whose values the trial's sampler chooses jointly."""
            return make(trial.number).infer_relative_search_space(study, trial)

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
            """Return the jointly chosen values, {key: value}. search_space: from `infer_relative_search_space`."""
            sampler = make(trial.number)
            sampler.infer_relative_search_space(study, trial)  # TPE keeps the groups of keys that it finds here
            return sampler.sample_relative(study, trial, search_space)

        def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
            # A generator for each key: with one seed, all keys would get the same quantile.
            """Return the value of the single key `param_name`, drawn from `param_distribution`."""
            name = int.from_bytes(hashlib.sha256(param_name.encode()).digest()[:4], "little")
            return make(trial.number * 2**32 + name).sample_independent(study, trial, param_name, param_distribution)

        def before_trial(self, study: Any, trial: Any) -> None:
            """Call the trial's sampler before the trial starts."""
            make(trial.number).before_trial(study, trial)

        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            """Call the trial's sampler after the trial has ended. state, values: its final state and its losses."""
            make(trial.number).after_trial(study, trial, state, values)

    return SeededSampler()


def _make_pruner(recipe: Recipe) -> Any:
    """Return the Optuna pruner that the recipe key `tune.pruner` names. It stops a trial whose validation loss is worse
    than the losses of other trials at the same step."""
    from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner

    if recipe.tune.pruner == "median":
        return MedianPruner(n_startup_trials=recipe.tune.startup)
    if recipe.tune.pruner == "halving":
        return SuccessiveHalvingPruner(min_resource=recipe.train.validate_every, reduction_factor=3)
    return NopPruner()


def _check_same_study(old: Recipe, new: Recipe) -> None:
    """Check that a worker's recipe equals that of the study in all keys that affect the results of trials. Raises
    `UserError` that names the first key that differs. old: recipe of the study. new: recipe of this worker."""
    before, after = list_values_by_key(old), list_values_by_key(new)
    precisions = {Layout.parse(each.layout).precision for each in (old, new) if each.layout != "auto"}
    if len(precisions) > 1:
        raise UserError(
            f"{new.where('layout')}: layout {new.layout} has another precision than {old.layout}, with which the study "
            "was begun: losses could not be compared"
        )
    for key in SCHEMA.keys:
        if before.get(key) == after.get(key) or any(key == free or key.startswith(f"{free}.") for free in _MAY_DIFFER):
            continue
        was, now = (format_toml_value(values[key]) if key in values else "unset" for values in (before, after))
        raise UserError(
            f"{new.where(key)}: {key} is {now}, and in {old.source_path} it is {was}: results could not be "
            "compared; restore it, or give another --directory"
        )
