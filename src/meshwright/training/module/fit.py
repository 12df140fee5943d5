"""`fit` and `load`: train a script's own module, and load a checkpoint into one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from meshwright.adapters.modules import load_module_adapter
from meshwright.checkpoint import DamagedCheckpoint, find_checkpoint
from meshwright.checkpoint.loading import load_slices
from meshwright.checkpoint.slices import INDEX, read_index
from meshwright.errors import UserError
from meshwright.launcher import rendezvous
from meshwright.launcher.recipe_checks import check_profile_and_trackers
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.names import check_options
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.recipe import format_overrides
from meshwright.spec.adapter_json import ADAPTER_CONFIG
from meshwright.spec.foreign import refuse_for_module
from meshwright.training import script, worker
from meshwright.training.module.data import Samples
from meshwright.training.module.recipe import make_module_recipe
from meshwright.training.module.run import check_spec, train_module
from meshwright.training.module.spec import FitOptions, Loss, ModuleSpec


def fit(
    build: Callable[[], nn.Module],
    loss: Loss,
    data: Samples,
    *,
    recipe: Mapping[str, Any] | str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    trust: bool = False,
    show_progress: bool = True,
    **options: Unpack[FitOptions],
) -> dict[str, Any] | None:
    """Train the caller's module, or resume it from its newest complete checkpoint. Every rank of the layout calls this,
    in a script that `meshwright run`, torchrun or SLURM starts; one rank needs no launcher.

    Args:
        build: Function that returns the module, equal on every rank; its random draws come from `run.seed`, and all
            ranks start from rank 0's values. Parameters with `requires_grad` are trained.
        loss: Function `loss(module, batch)` that returns a scalar tensor: the mean over the batch's items.
        data: A map-style data set: anything with a length and integer indexing.
        recipe: The tables `layout`, `[run]`, `[train]`, `[adapter]`, `[checkpoint]` and `[collectives]` of a recipe, or
            a file of them. The default of `run.name` is the name of the script.
        overrides: Values of recipe keys by dotted name, `{"train.steps": 20}`, or texts as on the command line.
        trust: Allow a recipe's file to run code that it names, such as a tracker's class.
        show_progress: Print a line for each logged step.
        **options: Fields of `FitOptions`.

    Returns:
        The result document on rank 0, None on other ranks. Keys: step, loss, samples_per_second, predicted, measured,
            checkpoint.

    Raises:
        UserError: A key, value or file is wrong, or the layout has another number of ranks.
        CheckFailed: Too many steps in a row had a loss or gradient that was not finite.
        RankLost: A rank died or stopped answering.
        Terminated: SIGTERM arrived; the state has been saved.

    Examples:
        >>> import torch
        >>> import meshwright as mw
        >>> samples = [(torch.rand(4), torch.tensor([number % 2.0])) for number in range(32)]
        >>> def loss(module, batch):
        ...     inputs, targets = batch
        ...     return torch.nn.functional.mse_loss(module(inputs), targets)
        >>> recipe = {"train": {"steps": 3, "batch": 8, "learning_rate": 1e-2}, "run": {"directory": "runs/linear"}}
        >>> mw.fit(lambda: torch.nn.Linear(4, 1), loss, samples, recipe=recipe)["step"]
        3
    """
    check_options(fit, options, FitOptions)
    name = Path(sys.argv[0]).stem or "module"
    found = make_module_recipe(
        recipe,
        format_overrides(overrides),
        name=name,
        directory=str(script.get_locked_run_directory() or ""),
        trust=trust,
    )
    given: Any = {name: value for name, value in options.items() if value is not None}  # None: the default
    spec = ModuleSpec(build, loss, data, **given)
    check_spec(spec, found)
    refuse_for_module(found.parsed_layout, found.train.batch)
    check_profile_and_trackers(found)
    start = script.next_rendezvous(found.run.rendezvous)
    if start.ranks == 1 and found.parsed_layout.world_size > 1:
        ranks = found.parsed_layout.world_size
        raise UserError(
            f'layout "{found.layout}" needs {ranks} ranks, and this is one process; start the script as '
            f"`meshwright run --ranks {ranks} {Path(sys.argv[0]).name}` or by torchrun"
        )
    rendezvous.check_world_size(start, found.parsed_layout)
    result = worker.run_script_as_rank(
        found, start, train_module, script.get_locked_run_directory(), spec=spec, show_progress=show_progress
    )
    script.record_result(result)
    return result if start.rank == 0 else None


def load(module: nn.Module, path: str | Path) -> nn.Module:
    """Copy a checkpoint's values into a module of the same structure, in place, and return the module. path: a
    checkpoint, or a run directory, whose newest checkpoint is taken. If the checkpoint is a PEFT directory, the adapter
    is added to the module, and buffers under training/ are copied. `UserError` names the first tensor that does not
    fit."""
    directory = find_checkpoint(path)
    if (directory / ADAPTER_CONFIG).is_file():
        load_module_adapter(module, directory)
        if (directory / INDEX).is_file():
            _load_buffers(module, directory)
        return module
    files = CheckpointFiles(directory)
    state = module.state_dict(keep_vars=True)
    shared: dict[int, list[str]] = {}
    for name, value in state.items():
        shared.setdefault(id(value), []).append(name)
    with torch.no_grad():
        for names in shared.values():
            saved = next((name for name in names if name in files.names), None)
            value = state[names[0]]
            if not isinstance(value, torch.Tensor) or not value.numel():
                continue
            if saved is None:
                raise UserError(f"{files.directory} has no tensor {names[0]}: it was trained with another module")
            if files.shape(saved) != tuple(value.shape):
                raise UserError(
                    f"{files.directory}: {saved} has shape {files.shape(saved)}, the module's {tuple(value.shape)}"
                )
            value.copy_(files.read_weights(saved) if isinstance(value, nn.Parameter) else files.read(saved))
    return module


def _load_buffers(module: nn.Module, directory: Path) -> None:
    """Copy the buffers (such as running statistics) that the checkpoint `directory` of an adapter has under training/
    into the buffers of `module`. Raises `UserError` if the checkpoint is damaged or a buffer has another number of
    elements.
    """
    try:
        saved = {each.name for each in read_index(directory)}
        found = {name: value for name, value in module.named_buffers() if name in saved}
        slices = [
            TensorSlice("master", name, 0, value.numel(), torch.empty_like(value).reshape(-1))
            for name, value in found.items()
        ]
        load_slices(directory, slices, 0, 1)
    except DamagedCheckpoint as damage:
        raise UserError(f"{directory}: {damage}") from None
    with torch.no_grad():
        for each in slices:
            found[each.name].copy_(each.tensor.view_as(found[each.name]))
