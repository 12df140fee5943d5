"""Training run of a user's module on one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.checkpoint import Checkpointer, find_newest
from meshwright.checkpoint.contents import CheckpointContents
from meshwright.checkpoint.files import to_json_bytes
from meshwright.comm.mesh import Mesh
from meshwright.emulation.scheduler import is_emulated_rank
from meshwright.errors import UserError
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.monitoring.comparison import Prediction
from meshwright.monitoring.resuming import check_resume_differences
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.spec.adapter_json import ADAPTER_CONFIG, ADAPTER_FILE
from meshwright.spec.foreign import build_saved_table
from meshwright.spec.parameters import ParameterTable
from meshwright.training.deterministic import deterministic
from meshwright.training.loop import Run, make_save_options
from meshwright.training.module.building import build_task
from meshwright.training.module.data import check_samples
from meshwright.training.module.module_task import ModuleTask
from meshwright.training.module.recipe import ModuleRecipe, parse_module_recipe
from meshwright.training.module.spec import ModuleSpec
from meshwright.training.trainer import Trainer


def train_module(
    recipe: ModuleRecipe, mesh: Mesh, run_directory: RunDirectory, *, spec: ModuleSpec, show_progress: bool = True
) -> dict[str, Any]:
    """Train a user's module on this rank and return the result document: a JSON dict of step, loss, predicted and
    measured figures, complete only on rank 0.

    recipe: settings. mesh: device mesh of this rank. run_directory: directory for metrics and checkpoints, already
    locked. spec: arguments of `fit`. show_progress: print a line for each logged step. Raises `Terminated` after
    SIGTERM and `KeyboardInterrupt` after an interrupt, once a checkpoint is saved; `CheckFailed` after too many steps
    in a row that were not finite; `UserError` for mistakes in script or recipe and for a last save that failed."""
    with deterministic(recipe.train.deterministic, recipe.train.compile):
        return ModuleRun(recipe, mesh, run_directory, spec, show_progress).run()


class ModuleRun(Run):
    """Training run of a user's module on one rank: a `Run` with the script's module and data in place of a language
    model's.

    recipe: settings. mesh: device mesh of this rank. run_directory: directory for metrics and checkpoints, already
    locked. spec: arguments of `fit`. show_progress: print a line for each logged step."""

    def __init__(
        self, recipe: ModuleRecipe, mesh: Mesh, run_directory: RunDirectory, spec: ModuleSpec, show_progress: bool
    ) -> None:
        """Build the module and load the newest checkpoint if there is one. spec: the arguments of `fit`; show_progress:
        print a line for each logged step. Collective."""
        self._set_up(recipe, mesh, run_directory, show_progress)
        check_module_resume(recipe, len(spec.data))
        self.journal.memory.start()
        task = build_task(spec, recipe, mesh)
        self.waits_for_copies = task.saves_frozen
        self.trainer = Trainer(task)
        contents = _make_contents(task)
        options = make_save_options(recipe)
        self.checkpointer = Checkpointer(run_directory.checkpoints, mesh, contents, options, self.journal.log)
        loaded = self.checkpointer.load_newest(self.trainer.slices(owned=False))
        self.resumed_from = None if loaded is None else self._restore(*loaded)

    def _save(self, validation_loss: float | None) -> None:
        """Start to save a checkpoint, see `Run._save`. On a GPU the next forward, which may change frozen parameters,
        waits until they are copied; of buffers, which it may change too, there are copies on the GPU."""
        super()._save(validation_loss)
        if self.waits_for_copies:
            self.checkpointer.wait_on_stream()

    def _predict(self) -> Prediction:
        """Return a prediction of traffic alone: the FLOPs and activations of a user's module are unknown."""
        return Prediction(None, None, self.trainer.task.predicted_traffic_by_axis(), None, False)

    def _make_result(self) -> dict[str, Any]:
        """Build the result document (JSON dict of figures and checkpoint paths). Traffic is predicted again, because
        only training has shown which buffers change and are synchronized."""
        self.journal.prediction = self._predict()
        return super()._make_result()


def _make_contents(task: ModuleTask) -> CheckpointContents:
    """Return the contents of the checkpoints of a module's training (`task`): table of the saved tensors, configuration
    files, and the function that checks an existing checkpoint against the module. With an adapter, checkpoints are PEFT
    directories, with the buffers only in the subdirectory training/ (state for resuming)."""
    adapter = task.adapter
    table = build_saved_table(task.derived.table, task.derived.kept, exported=adapter is None)
    name = ADAPTER_FILE if adapter is not None else None
    files = {"config.json": _make_config_json(task.module)}
    if adapter is not None:
        files = {ADAPTER_CONFIG: to_json_bytes(adapter)}
    stem = "model" if name is None else name.split(".")[0]
    return CheckpointContents(table, files, lambda path: _check_checkpoint_tensors(table, path, name), stem)


def check_module_resume(recipe: ModuleRecipe, samples: int) -> None:
    """Raise `UserError` if the recipe cannot resume the newest checkpoint in its run directory: a recipe key that must
    not change, or the number of samples, differs. samples: number of training samples now."""
    checkpoint = find_newest(RunDirectory(recipe.run_directory).checkpoints)
    if checkpoint is None:
        return
    state = checkpoint.state()
    if "data_samples" not in state:
        raise UserError(f"{recipe.run_directory} holds a run of a built-in model; give another run.directory")
    check_resume_differences(parse_module_recipe(state["recipe"], f"the recipe of {checkpoint.path}"), recipe)
    if state["data_samples"] != samples:
        raise UserError(
            f"the data had {state['data_samples']} samples when {checkpoint.path} was written and have {samples} now, "
            "so the sample order would change; restore them, or start a new run with another run.name"
        )


def _check_checkpoint_tensors(table: ParameterTable, path: Path, name: str | None) -> None:
    """Raise `UserError` naming the first tensor whose name or shape in the checkpoint at `path` differs from `table`.
    table: parameter table of the module. name: name of the checkpoint's safetensors file; None: the usual name for
    whole models."""
    files = CheckpointFiles(path) if name is None else CheckpointFiles(path, name)
    wanted = {entry.name: entry.shape for entry in table.entries if entry.exported}
    for name in sorted(wanted.keys() | files.names):
        there = files.shape(name) if name in files.names else None
        if there != wanted.get(name):
            was, now = ("absent" if shape is None else f"of shape {shape}" for shape in (there, wanted.get(name)))
            raise UserError(
                f"checkpoint {path} holds another module: {name} is {was} there and {now} in the module that was "
                "built; build the same module, or start a new run with another run.name"
            )


def _make_config_json(module: nn.Module) -> bytes:
    """Return the bytes of the checkpoint's config.json: the module's transformers configuration if it has one, and its
    class name under "architectures"."""
    write: Callable[[], str] | None = getattr(getattr(module, "config", None), "to_json_string", None)
    if write is not None:
        config = json.loads(write())
        if isinstance(config, dict):
            return to_json_bytes(config | {"architectures": [type(module).__name__]})
    return to_json_bytes({"architectures": [type(module).__name__]})


def check_spec(spec: ModuleSpec, recipe: ModuleRecipe) -> None:
    """Raise `UserError` for the first invalid argument of `fit` (in `spec`), or the first argument that does not fit
    the recipe. Called before the module is built."""
    check_samples(spec.data, "data")
    if spec.validation is not None:
        check_samples(spec.validation, "validation")
    elif recipe.train.validate_every:
        raise UserError("train.validate_every needs validation data: give fit a data set as validation")
    if "loss" in spec.measures:
        raise UserError('measures: "loss" is reserved for the validation loss; give the measure another name')
    if spec.reduction not in ("mean", "sum"):
        raise UserError(f'reduction should be "mean" or "sum", not {spec.reduction!r}')
    if spec.workers < 0:
        raise UserError(f"workers should be 0 or more, not {spec.workers}")
    if spec.workers and is_emulated_rank():
        raise UserError(f"workers={spec.workers} is not emulated: an emulated rank starts no processes; use workers=0")
