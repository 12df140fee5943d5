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
from pathlib import Path

from meshwright.checkpoint.files import replace_file
from meshwright.errors import UserError
from meshwright.launcher.rendezvous import LAUNCHER_VARIABLES
from meshwright.monitoring.metrics_tail import MetricsTail
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.tuning.budget import used_seconds
from meshwright.tuning.study import RunningTrial, Study

POLL_SECONDS = 0.1
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
        """Train in a child process until the end; return (validation loss after the last step or None, "complete" |
        "pruned" | "failed", reason why it did not complete). On an interrupt or SIGTERM the child saves a checkpoint,
        and the exception is raised again."""
        name = f"{self.study.recipe.run.name}-{self.running.trial.number:04d}"
        try:
            recipe = self.study.trial_recipe(self.running.values, name, self.run_directory)
        except UserError as error:
            return None, "failed", str(error)
        file = self.running.directory / "recipe.toml"
        replace_file(file, recipe.to_toml().encode(), sync=False)
        command = [sys.executable, "-P", "-m", "meshwright", "train", str(file), "--json", "--restarts", "1"]
        command += ["--trust-recipe"] * recipe.trusted
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        with (self.running.directory / "train.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
                start_new_session=True,  # an interrupt from the terminal reaches this worker only, which passes it on
                pass_fds=[self.running.lock],  # the trial stays locked until its ranks have ended, too
            )  # fmt: skip
        try:
            stopped = self._watch(process)
        except BaseException:
            _stop(process)
            self._record()
            raise
        self._record()
        if stopped:
            return None, "pruned", stopped
        result = RunDirectory(self.run_directory).read_result() or {}
        value = result.get("validation_loss")
        if process.returncode or result.get("step") != recipe.train.steps:
            return None, "failed", _read_error(self.running.directory / "train.log", process.returncode)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None, "failed", "the validation loss after the last step is not finite"
        return float(value), "complete", ""

    def _watch(self, process: subprocess.Popen[bytes]) -> str:
        """Report each validation loss to the pruner until the process ends. Return "" if it ended by itself, otherwise
        the reason why this worker stopped it."""
        tail = MetricsTail(RunDirectory(self.run_directory).metrics)
        while True:
            ended = process.poll() is not None
            for step, loss in self._read_losses(tail):
                self.running.trial.report(loss, step)
                self._record()
                if not ended and self.running.trial.should_prune():
                    _stop(process)
                    return f"pruned at step {step}"
            limit = self.study.recipe.tune.seconds
            if not ended and limit is not None and self._used_seconds() >= limit:
                _stop(process)
                return "stopped: the budget of seconds is used up"
            if ended:
                return ""
            time.sleep(POLL_SECONDS)

    def _read_losses(self, tail: MetricsTail) -> Iterator[tuple[int, float]]:
        """Yield (step, validation loss) from the lines added to the metrics file since the last call, each
        step once.
        """
        for line in tail.read():
            step, loss = line.get("step"), line.get("validation_loss")
            if isinstance(step, int) and isinstance(loss, int | float) and step not in self._reported:
                self._reported.add(step)
                yield step, float(loss)

    def _used_seconds(self) -> float:
        """Return the seconds of training of the whole study, this trial's up to now included."""
        others = [trial for trial in self.study.trials() if trial.number != self.running.trial.number]
        return used_seconds(others) + self._seconds()

    def _seconds(self) -> float:
        """Return the seconds for which this trial has trained, including those before an interruption."""
        return self._seconds_before + time.monotonic() - self._begun

    def _record(self) -> None:
        """Record the seconds, steps and tokens that the trial has used so far in the study."""
        values, recipe = self.running.values, self.study.recipe
        steps = RunDirectory(self.run_directory).last_step() or 0
        tokens = steps * values.get("train.batch", recipe.train.batch) * recipe.data.sequence
        for name, amount in (("seconds", self._seconds()), ("steps", steps), ("tokens", tokens)):
            self.running.trial.set_user_attr(name, amount)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a training process by SIGTERM, on which it saves a checkpoint; by SIGKILL after `STOP_SECONDS`."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_error(log: Path, code: int | None) -> str:
    """Return the error line at the end of a run's log, or a text with the exit code. code: exit code of the process."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
        lines = file.read().decode(errors="replace").splitlines()
    marker = "meshwright: error: "
    found = next((line.removeprefix(marker) for line in reversed(lines) if line.startswith(marker)), None)
    if found is not None:
        return found
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    return f"the training process ended with {how}; see {log}"
