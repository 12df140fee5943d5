"""TensorBoard tracker: event files in the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.monitoring.trackers import TrackedRun


class TensorBoardTracker:
    """Tracker that writes TensorBoard event files: metrics as scalars, the recipe as text and hyperparameters.

    directory: directory of the event files; None: `tensorboard` in the run directory. When a run is resumed,
    TensorBoard hides the earlier values of steps that are sent again.
    """

    packages = ("tensorboard",)

    def __init__(self, directory: str | None = None) -> None:
        """Store the option `directory`; see the class."""
        from torch.utils.tensorboard import SummaryWriter  # here, so that the import does not slow down the first steps

        self._directory, self._make = directory, SummaryWriter
        self._writer: Any = None

    def start(self, run: TrackedRun, recipe: Mapping[str, Any]) -> None:
        """Open a new event file and write the recipe to it. run: description of the run; recipe: {dotted key:
        value}."""
        from torch.utils.tensorboard.summary import hparams

        directory = self._directory or str(run.directory / "tensorboard")
        # TensorBoard drops the values of earlier files from `purge_step` on.
        writer: Any = self._make(directory, purge_step=0 if run.fresh else run.step + 1)
        rows = [f"| {key} | `{value}` |" for key, value in recipe.items()]
        writer.add_text("recipe", "\n".join(["| key | value |", "|---|---|", *rows]), run.step + 1)
        plain = {key: value if isinstance(value, (bool, int, float)) else str(value) for key, value in recipe.items()}
        for summary in hparams(plain, {"loss": 0.0})[:2]:
            writer.file_writer.add_summary(summary)
        writer.flush()
        self._writer = writer

    def log(self, step: int, values: Mapping[str, float | str]) -> None:
        """Write the values of the training step `step`, {name: value}, to the event file: numbers as scalars, texts as
        text."""
        for key, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, step)
            else:
                self._writer.add_scalar(key, value, step)
        self._writer.flush()  # so that a killed process loses nothing

    def finish(self, status: str) -> None:
        """Close the event file. status: ignored."""
        self._writer.close()
