"""`fit`: what a script calls on every rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import default_collate

from meshwright.checkpoint import find_checkpoint
from meshwright.errors import UserError
from meshwright.launcher import rendezvous
from meshwright.launcher.recipe_checks import check_watching
from meshwright.model.huggingface import CheckpointFiles
from meshwright.parallel.module.table import ChooseUnit
from meshwright.spec.foreign import refuse_for_module
from meshwright.training import script, worker
from meshwright.training.module.data import Collate, Samples
from meshwright.training.module.recipe import module_recipe
from meshwright.training.module.run import check_task, train_module
from meshwright.training.module.task import Loss, Measure, Task


def fit(
    build: Callable[[], nn.Module],
    loss: Loss,
    data: Samples,
    *,
    recipe: Mapping[str, Any] | str | Path,
    overrides: Sequence[str] = (),
    collate: Collate = default_collate,
    count: Callable[[Any], int | torch.Tensor] | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    validation: Samples | None = None,
    measures: Mapping[str, Measure] | None = None,
    units: ChooseUnit | None = None,
    decays: Callable[[str, nn.Parameter], bool] | None = None,
    workers: int = 0,
    trust: bool = False,
    show_progress: bool = True,
) -> dict[str, Any] | None:
    """Train a module, or go on from its newest whole checkpoint. Every rank of the layout calls this.

    build: makes the module, the same on every rank; what it draws at random comes from `run.seed`, and all ranks start
        from rank 0's values. Its trained parameters are those with `requires_grad`.
    loss: `loss(module, batch)`, a tensor of one number: the mean over the batch's items (`reduction="sum"`: their sum).
    count: items in a batch, such as labels that are not ignored; its samples unless given. The step's loss is the sum
        over all items of all ranks, divided by their number, whatever the layout.
    data, validation: anything with a length and items by number. collate: makes a batch of a list of them.
    recipe: the tables `layout`, `[run]`, `[train]`, `[checkpoint]` and `[collectives]` of a recipe, or a file of them;
        `overrides` as on the command line. A run's name is the script's unless said.
    measures: `{"accuracy": f}`: f(module, batch) is a sum over the batch's items; its mean over the validation data
        goes into metrics.jsonl and the result.
    units: whether a module, given its name and itself, is what ZeRO-3 gathers together; by sizes and lists unless
        given. decays: whether weight decay applies to a parameter; to those of two dims and more unless given.
    workers: processes that read data for each rank. trust: a recipe's file may name code that runs, such as a tracker's
        class; tables are the script's own.

    Returns the result document on rank 0, None on others. Raises `UserError` for mistakes, `Terminated` after SIGTERM
    and a save, `CheckFailed` when too many steps in a row were not finite, `RankLost`.
    """
    name = Path(sys.argv[0]).stem or "module"
    found = module_recipe(recipe, overrides, name=name, directory=str(script.directory() or ""), trust=trust)
    task = Task(build, loss, data, collate, count, reduction, validation, dict(measures or {}), units, decays, workers)
    check_task(task, found)
    refuse_for_module(found.parsed_layout, found.train.batch)
    check_watching(found)
    start = script.place(found.run.rendezvous)
    if start.ranks == 1 and found.parsed_layout.world_size > 1:
        ranks = found.parsed_layout.world_size
        raise UserError(
            f'layout "{found.layout}" needs {ranks} ranks, and this is one process; start the script as '
            f"`meshwright run --ranks {ranks} {Path(sys.argv[0]).name}` or by torchrun"
        )
    rendezvous.check_world_size(start, found.parsed_layout)
    result = worker.join_script(found, start, train_module, script.directory(), task=task, show_progress=show_progress)
    script.note(result)
    return result if start.rank == 0 else None


def load(module: nn.Module, path: str | Path) -> nn.Module:
    """Put the values of a checkpoint (or the newest of a run directory) into a module that was built alike, and return
    it. `UserError` names the first tensor that does not fit."""
    files = CheckpointFiles(find_checkpoint(path))
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
                raise UserError(f"{files.directory} holds no {names[0]}: it was trained with another module")
            if files.shape(saved) != tuple(value.shape):
                raise UserError(
                    f"{files.directory}: {saved} has shape {files.shape(saved)}, the module's {tuple(value.shape)}"
                )
            value.copy_(files.read_weights(saved) if isinstance(value, nn.Parameter) else files.read(saved))
    return module
