"""MLflow tracker: a run on a tracking server or in a database; a resumed run continues the same MLflow run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from meshwright.monitoring.trackers import FAILED, FINISHED, STOPPED, TrackedRun

STATUS = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
LONGEST_PARAMETER = 6000  # maximum characters of a parameter
PARAMETERS_AT_ONCE = 100

_RUN_ID = "run_id"


class MLflowTracker:
    """Tracker that logs a run to MLflow.

    uri: tracking server or database; None: MLFLOW_TRACKING_URI or MLflow's default. experiment: name of the MLflow
    experiment, which is created if missing. run_name: name of the MLflow run; None: the recipe's `run.name`.
    """

    packages = ("mlflow", "sqlalchemy", "alembic")

    def __init__(self, uri: str | None = None, experiment: str = "meshwright", run_name: str | None = None) -> None:
        """Store the options; MLflow is contacted in `start`. Arguments: see the class."""
        # Failed requests are retried by the caller; MLflow itself would retry for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.tracking import MlflowClient  # here, so that the import does not slow down the first steps

        self._make, self._uri, self._experiment, self._name = MlflowClient, uri, experiment, run_name
        self._client: Any = None
        self._run = ""
        self._has: dict[str, int] = {}  # metric -> last step that a resumed MLflow run has

    def start(self, run: TrackedRun, recipe: Mapping[str, Any]) -> None:
        """Create the MLflow run, or resume it. run: description of the run. recipe: {dotted key: value}. The values are
        logged as parameters; a value that has changed since the first start is logged as a tag, because MLflow's
        parameters are immutable."""
        self._client = client = self._make(tracking_uri=self._uri)
        if not self._run:
            before = run.kept.get(_RUN_ID)
            if before and not run.fresh:
                self._run = before
                client.update_run(before, status="RUNNING")
            else:
                if before:  # killed before its first checkpoint: not resumed
                    client.set_terminated(before, "KILLED")
                made = client.create_run(self._get_experiment_id(), run_name=self._name or run.name)
                self._run = run.kept[_RUN_ID] = made.info.run_id
        data = client.get_run(self._run).data
        self._has = {key: self._get_last_step(key) for key in data.metrics}
        values = {key: str(value)[:LONGEST_PARAMETER] for key, value in recipe.items()}
        self._send(parameters={key: value for key, value in values.items() if key not in data.params})
        for key, value in values.items():
            if data.params.get(key, value) != value:
                client.set_tag(self._run, f"resumed.{key}", value)
        client.set_tag(self._run, "directory", str(run.directory.resolve()))

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Send the values of a step, {name: value}, in one request, except values that the MLflow run already has."""
        figures = {key: value for key, value in values.items() if step > self._has.get(key, -1)}
        self._send(step, figures)

    def finish(self, status: str) -> None:
        """Set the final status of the MLflow run. status: "finished", "stopped" or "failed"."""
        self._client.set_terminated(self._run, STATUS[status])

    def _send(
        self,
        step: int = 0,
        figures: Mapping[str, float | str] | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        """Send values to the MLflow server. figures: {name: value} of step `step`, sent as metrics (numbers) or tags
        (texts). parameters: {key: text} of the run, sent as parameters. None: nothing is sent."""
        from mlflow.entities import Metric, Param, RunTag

        now = int(1000 * time.time())
        figures = figures or {}
        self._client.log_batch(
            self._run,
            metrics=[Metric(key, value, now, step) for key, value in figures.items() if not isinstance(value, str)],
            tags=[RunTag(key, value) for key, value in figures.items() if isinstance(value, str)],
        )
        left = [Param(key, value) for key, value in (parameters or {}).items()]
        for first in range(0, len(left), PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run, params=left[first : first + PARAMETERS_AT_ONCE])

    def _get_last_step(self, key: str) -> int:
        """Return the last step for which the MLflow run has a value of the metric `key`; -1 without one."""
        return max((metric.step for metric in self._client.get_metric_history(self._run, key)), default=-1)

    def _get_experiment_id(self) -> str:
        """Return the id of the MLflow experiment, which is created if missing."""
        found = self._client.get_experiment_by_name(self._experiment)
        made: str = found.experiment_id if found else self._client.create_experiment(self._experiment)
        return made
