"""One trial: trains its recipe in a child process, reports validation losses, and stops it when it is pruned. Free of
torch."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from meshwright.checkpoint.files import replace_file
from meshwright.errors import RankLost, UserError
from meshwright.launcher.recipe_checks import check_recipe
from meshwright.launcher.rendezvous import LAUNCHER_VARIABLES, STOPS_ONCE
from meshwright.monitoring.metrics_tail import MetricsTail
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.processes import die_with_parent
from meshwright.recipe import Recipe
from meshwright.tuning.budget import sum_seconds
from meshwright.tuning.study import RunningTrial, Study

POLL_SECONDS = 0.1
LIMIT_SECONDS = 1.0
"""Interval of the comparison with the budget of seconds, which reads the journal."""
STOP_SECONDS = 120.0
"""Time limit for a stopped run to save its checkpoint."""


class TrialRun:
    """Training run of one trial, from the start of its process to its result.

    study: the study. running: the trial, locked by this worker. A run that another worker left unfinished continues
    from its newest checkpoint.
    """

    def __init__(self, study: Study, running: RunningTrial) -> None:
        self.study, self.running = study, running
        self.run_directory = running.directory / "run"
        self._begun = time.monotonic()
        self._seconds_before = float(running.trial.user_attrs.get("seconds", 0.0))
        self._reported = set(study.optuna._storage.get_trial(running.trial._trial_id).intermediate_values)

    def run(self) -> tuple[float | None, str, str]:
        """Train until the end. Return (validation loss after the last step, or None if the trial did not complete;
        state of the trial, "complete", "pruned" or "failed"; reason why it did not complete, "" if it did).

        On an interrupt or SIGTERM the run saves a checkpoint, and the exception is raised again. Raises `UserError` if
        the run could not be started or was stopped from outside; the trial then remains unfinished.
        """
        name = f"{self.study.recipe.run.name}-{self.running.trial.number:04d}"
        try:
            recipe = self.study.make_trial_recipe(self.running.values, name, self.run_directory)
            if recipe.layout != "auto":
                check_recipe(recipe)
        except UserError as error:  # values that do not fit together
            return None, "failed", str(error)
        log = self.running.directory / "train.log"
        begun_at = log.stat().st_size if log.exists() else 0
        process = self._start(recipe, log)
        try:
            stopped = self._watch(process, recipe.train.steps)
        except BaseException:
            _stop(process)
            self._record_usage()
            raise
        self._record_usage()
        if stopped:
            return None, "pruned", stopped
        result = RunDirectory(self.run_directory).read_result() or {}
        value, code = result.get("validation_loss"), process.returncode
        if code in (0, 1, RankLost.exit_code) and (code or result.get("step") != recipe.train.steps):
            return None, "failed", _read_error(log, begun_at, code)
        if code:  # stopped, killed, or a mistake that the values do not explain: another start may succeed
            raise UserError(f"trial {self.running.trial.number}: {_read_error(log, begun_at, code)}")
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None, "failed", "the validation loss after the last step is not finite"
        return float(value), "complete", ""

    def _start(self, recipe: Recipe, log: Path) -> subprocess.Popen[bytes]:
        """Start the training process of `recipe`; return its handle. The process is killed when this worker ends. log:
        file to which its messages are appended."""
        file = self.running.directory / "recipe.toml"
        replace_file(file, recipe.to_toml().encode(), sync=False)
        command = [sys.executable, "-P", "-m", "meshwright", "train", str(file), "--json", "--restarts", "1"]
        command += ["--trust-recipe"] * recipe.trusted
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        with log.open("ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**environment, STOPS_ONCE: "1"},
                start_new_session=True,  # an interrupt from the terminal reaches this worker only, which passes it on
                pass_fds=[self.running.lock],  # the trial stays locked until its ranks have ended, too
                preexec_fn=die_with_parent,
            )  # fmt: skip

    def _watch(self, process: subprocess.Popen[bytes], steps: int) -> str:
        """Report each validation loss of the training process to Optuna until the process ends. If the trial is pruned
        or the study's limit of seconds is reached, kill the process and return the reason; else return "". steps:
        number of steps of the run; the trial is not pruned at the last step."""
        tail, begun, checked = MetricsTail(RunDirectory(self.run_directory).metrics), time.monotonic(), 0.0
        limit = self.study.recipe.tune.seconds
        while True:
            ended = process.poll() is not None
            for step, loss in self._read_losses(tail):
                hopeless = self.study.report_loss(self.running, step, loss)
                self._record_usage()
                if hopeless and step < steps:
                    _kill(process)
                    return f"pruned at step {step}"
            if ended:
                return ""
            if limit is not None and time.monotonic() - begun > checked + LIMIT_SECONDS:
                checked = time.monotonic() - begun
                if self._sum_study_seconds() >= limit:
                    _kill(process)
                    return "stopped: the budget of seconds is used up"
            time.sleep(POLL_SECONDS)

    def _read_losses(self, tail: MetricsTail) -> Iterator[tuple[int, float]]:
        """Yield (step, validation loss) from the lines added to the metrics file since the last call; each step is
        yielded once. tail: reader of the metrics file."""
        for line in tail.read():
            step, loss = line.get("step"), line.get("validation_loss")
            if isinstance(step, int) and isinstance(loss, int | float) and step not in self._reported:
                if not math.isfinite(loss):
                    continue
                self._reported.add(step)
                yield step, float(loss)

    def _sum_study_seconds(self) -> float:
        """Return the seconds of training of all trials of the study, including the seconds of this trial up to now."""
        others = [trial for trial in self.study.list_trials() if trial.number != self.running.trial.number]
        return sum_seconds(others) + self._measure_seconds()

    def _measure_seconds(self) -> float:
        """Return the seconds for which this trial has trained, including those before an interruption."""
        return self._seconds_before + time.monotonic() - self._begun

    def _record_usage(self) -> None:
        """Record in the study the seconds, steps and tokens that the trial has used so far."""
        values, recipe = self.running.values, self.study.recipe
        steps = RunDirectory(self.run_directory).read_last_step() or 0
        tokens = steps * values.get("train.batch", recipe.train.batch) * recipe.data.sequence
        for name, amount in (("seconds", self._measure_seconds()), ("steps", steps), ("tokens", tokens)):
            self.running.trial.set_user_attr(name, amount)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a training process by SIGTERM, on which it saves a checkpoint; kill it after `STOP_SECONDS`."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a training process and its ranks; they save nothing."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_error(log: Path, begun_at: int, code: int | None) -> str:
    """Return the last error message in a run's log, or if there is none a text with the exit code. begun_at: size of
    the log in bytes before this start; earlier text is ignored. code: exit code of the process; negative: number of the
    signal that killed it."""
    with log.open("rb") as file:
        file.seek(max(begun_at, file.seek(0, os.SEEK_END) - 65536))
        lines = file.read().decode(errors="replace").splitlines()
    marker = "meshwright: error: "
    found = next((line.removeprefix(marker) for line in reversed(lines) if line.startswith(marker)), None)
    if found is not None:
        return found
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return f"the training process ended with {how}; see {log}"
