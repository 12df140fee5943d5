"""`meshwright.tune`: search a recipe's hyper-parameters from Python, like the command `meshwright tune`. Free of
torch."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.documents import to_json_dict
from meshwright.errors import CheckFailed, Terminated, UserError, error_reason
from meshwright.launcher.recipe_checks import check_recipe, check_vocabulary
from meshwright.recipe import Recipe, resolve_recipe
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.terminal import print_message
from meshwright.toml import format_toml_value
from meshwright.tuning.budget import Budget, count_states, sum_seconds
from meshwright.tuning.page import write_page
from meshwright.tuning.study import RunningTrial, Study
from meshwright.tuning.trial_run import TrialRun

if TYPE_CHECKING:
    from meshwright.tuning.coordinates import CoordinateCheck

WAIT_SECONDS = 0.5
MAX_FAILURES = 5
"""A worker ends with an error after so many failed trials in a row."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Outcome of a hyper-parameter search, over all workers of the study.

    Attributes:
        best: {"value": validation loss in nats per token, "parameters": {recipe key: value}, "run": run directory,
            "trial": number} of the best trial.
        trials: Number of trials, those still running on other workers included.
        pruned: Number of trials that were stopped early.
        failed: Number of trials that ended with an error, such as a loss that is not finite.
        seconds: Seconds of training, summed over all trials.
        directory: Directory of the study, with the trials, the page `index.html` and the recipe `best.toml`.
        document: The values above as JSON, the document of `meshwright tune --json`.
    """

    best: Mapping[str, Any]
    trials: int
    pruned: int
    failed: int
    seconds: float
    directory: Path
    document: Mapping[str, Any]

    def to_json_dict(self) -> dict[str, Any]:
        """Return `document`, which `meshwright tune --json` prints, as a JSON dict."""
        return to_json_dict(self.document)


def tune(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    directory: str | Path | None = None,
    trust: bool = False,
) -> Tuning:
    """Search the recipe keys of `[tune.space]` for the lowest validation loss, until the budget of `[tune]` is used up.

    Each trial is a training run in a separate process. Several workers, on one host or several, share a study by
    calling this function with the same directory; each may set its own layout and device. An interrupted study resumes,
    its unfinished trials from their checkpoints.

    Args:
        recipe: Path of a recipe, its tables as nested dictionaries, or a `Recipe`.
        overrides: Values of recipe keys by dotted name, `{"tune.trials": 40}`, or strings as on the command line.
        directory: Directory of the study; None: the run directory's name followed by "-tune".
        trust: Allow the recipe to run code that it names, such as a tracker's class.

    Returns:
        The best trial so far and the counts of the study.

    Raises:
        UserError: A key, value or file is wrong, the study belongs to another recipe, Optuna is not installed, or five
            trials in a row failed.
        CheckFailed: No trial completed.
        Terminated: SIGTERM arrived; the running trial was saved. `KeyboardInterrupt` after an interrupt.

    Examples:
        >>> import meshwright as mw
        >>> space = {"train.learning_rate": {"log": [1e-3, 1e-1]}}
        >>> found = mw.tune(
        ...     "tiny.toml",
        ...     {
        ...         "train.steps": 2,
        ...         "train.validate_every": 1,
        ...         "tune.space": space,
        ...         "tune.trials": 2,
        ...         "run.directory": "runs/tiny",
        ...     },
        ... )
        >>> found.trials, found.failed, sorted(found.best)
        (2, 0, ['parameters', 'run', 'trial', 'value'])
    """
    resolved = resolve_recipe(recipe, overrides, trust=trust)
    if not resolved.tune.space:
        raise UserError(
            f"{resolved.source_path or 'recipe'}: tune.space is missing: it lists the keys to search, such as "
            '"train.learning_rate" = { log = [1e-4, 1e-2] }'
        )
    if not Budget.from_recipe(resolved).allows_another([]):
        largest = " or ".join(f"{amount:,} {name}" for name, amount in Budget.compute_largest_trial(resolved).items())
        raise UserError(f"{resolved.where('tune')}: tune: the budget is smaller than one trial ({largest})")
    _check_space(resolved, _prepare_data(resolved))
    study = Study(resolved, _find_directory(resolved, directory))
    with _raise_on_sigterm():
        _run_trials(study)
    return _summarize(study)


def check_widths(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    factors: Sequence[int],
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    directory: str | Path | None = None,
    trust: bool = False,
) -> tuple[CoordinateCheck, Path]:
    """Train the recipe's model at several widths for a few steps, to check that µP (maximal update parametrization)
    keeps the size of its activations independent of the width: the coordinate check. Return the measured sizes, and the
    path of their chart, `coordinates.svg` in the study's directory.

    recipe: path of a recipe, its tables as nested dictionaries, or a `Recipe`. factors: widths as integer multiples of
    the recipe's hidden size. overrides: values of recipe keys by dotted name, or strings as on the command line.
    directory: directory of the study; None: the run directory's name followed by "-tune". trust: allow the recipe to
    run code that it names. Raises `UserError` for an invalid recipe, factor or data source.
    """
    from meshwright.data import prepare
    from meshwright.tuning.coordinates import check_coordinates

    resolved = resolve_recipe(recipe, overrides, trust=trust)
    check_recipe(resolve_recipe(resolved, {"layout": "dp1"}))
    checked = check_coordinates(resolved, prepare(resolved.data, resolved.run.seed, log=print_message), factors)
    path = _find_directory(resolved, directory)
    path.mkdir(parents=True, exist_ok=True)
    checked.write(path / "coordinates.svg")
    return checked, path / "coordinates.svg"


def _find_directory(recipe: Recipe, directory: str | Path | None) -> Path:
    """Return the directory of a recipe's study: `directory`, or the run directory's name followed by "-tune"."""
    return Path(directory) if directory else recipe.run_directory.with_name(f"{recipe.run_directory.name}-tune")


def _check_space(recipe: Recipe, vocabulary: int) -> None:
    """Check that the recipe and its model accept the smallest and largest value of each searched key. vocabulary:
    number of token IDs. Raises `UserError` that names the key and the reason."""
    conditions = {dimension.key: dict(dimension.when) for dimension in recipe.tune.dimensions}
    tables = recipe.to_tables()
    tables.pop("tune")
    for dimension in recipe.tune.dimensions:
        for value in dimension.list_extreme_values():
            values, needed = {dimension.key: value}, [dimension.key]
            while needed:
                for key, allowed in conditions[needed.pop()].items():
                    values[key] = allowed[0]
                    needed.append(key)
            try:
                found = resolve_recipe(tables, values, trust=recipe.trusted)
                config_from_recipe(found.model, found.data.sequence, vocabulary, found.adapter)
            except UserError as error:
                where, text = recipe.where(f"tune.space.{dimension.key}"), format_toml_value(value)
                reason = str(error).rpartition(f"{dimension.key}: ")[2].rpartition('": ')[2]
                raise UserError(f"{where}: tune.space: {dimension.key} = {text}: {reason}") from None


def _prepare_data(recipe: Recipe) -> int:
    """Check the recipe and prepare its data once, before the first trial; return the vocabulary size of the data.
    Raises `UserError` for a recipe or data that cannot be used."""
    from meshwright.data import prepare

    if recipe.layout != "auto":
        check_recipe(recipe)
    vocabulary = prepare(recipe.data, recipe.run.seed, log=print_message).vocabulary
    check_vocabulary(recipe, vocabulary)
    return vocabulary


def _run_trials(study: Study) -> None:
    """Run trials one after another until the budget of the study is used up and no other worker runs a trial. Raises
    `UserError` if five trials in a row failed."""
    failures, waits = 0, False
    while True:
        if (running := study.take_trial()) is None:
            if not count_states(study.list_trials())["running"]:
                return
            if not waits:  # a worker that is killed meanwhile leaves its trial to this one
                print_message("the budget is used up; waiting for the trials of other workers")
            waits = True
            time.sleep(WAIT_SECONDS)
            continue
        number, values = running.trial.number, _format_values(running.values)
        print_message(f"trial {number}: {values}")
        try:
            value, state, reason = TrialRun(study, running).run()
            study.finish(running, value, state, reason)
            study.write_best_recipe()
        except OSError as error:
            raise UserError(f"study directory {study.directory}: {error_reason(error)}") from None
        finally:
            running.release()
        print_message(f"trial {number}: {_format_outcome(study, running, value, state, reason)}")
        _write_page(study)
        failures = failures + 1 if state == "failed" else 0
        if failures >= MAX_FAILURES:
            raise UserError(f"{failures} trials in a row failed, the last one: {reason}")


def _write_page(study: Study) -> None:
    """Write the HTML page of the study. If that fails, only print a warning, since the search does not need it."""
    try:
        write_page(study)
    except UserError as error:
        print_message(f"meshwright: warning: {error}")


def _format_values(values: Mapping[str, Any]) -> str:
    """Format the values of a trial as text, such as "train.learning_rate=0.0031 train.warmup=20". values: {recipe key:
    value}."""
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={format_toml_value(value)}"
        for key, value in values.items()
    )


def _format_outcome(study: Study, running: RunningTrial, value: float | None, state: str, reason: str) -> str:
    """Format the result of a trial that has ended, with the best loss of `study` so far, as one line of text. running:
    the trial. value: its validation loss; None if it has none. state: "complete", "pruned" or "failed". reason: why the
    trial did not complete."""
    if state != "complete":
        return reason if state == "pruned" else f"failed: {reason}"
    best = study.optuna.best_trial
    place = "the best so far" if best.number == running.trial.number else f"best {best.value:.4f} (trial {best.number})"
    return f"validation loss {value:.4f}, {place}"


def _summarize(study: Study) -> Tuning:
    """Return the outcome of the study, after writing its page and `best.toml` once more. Raises `CheckFailed` if no
    trial has completed."""
    trials = study.list_trials()
    counts = count_states(trials)
    if not counts["complete"]:
        reasons = [trial.user_attrs["reason"] for trial in trials if "reason" in trial.user_attrs]
        last = f"; the last one: {reasons[-1]}" if reasons else ""
        raise CheckFailed(f"no trial of {study.directory} has completed: {counts['failed']} failed{last}")
    study.write_best_recipe()  # a worker may have been killed before it did
    _write_page(study)
    best = study.optuna.best_trial
    found = {
        "value": best.value, "parameters": study.read_values(best), "trial": best.number,
        "run": str(study.get_trial_directory(best.number) / "run"),
    }  # fmt: skip
    seconds = sum_seconds(trials)
    document = {
        "schema": 1, "best": found, **counts, "seconds": seconds, "directory": str(study.directory),
        "recipe": str(study.directory / "best.toml"), "page": str(study.directory / "index.html"),
    }  # fmt: skip
    return Tuning(found, counts["trials"], counts["pruned"], counts["failed"], seconds, study.directory, document)


@contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Context manager in which SIGTERM raises the exception `Terminated` in the main thread. No effect in other
    threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        """Handle SIGTERM: raise `Terminated`, and let a second SIGTERM end the process immediately. number, frame: as
        Python passes them to signal handlers."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated("stopped by SIGTERM; the same command continues the study")

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
