"""Build the training task of a script's module: the same module with the same values on every rank."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from meshwright.adapters.modules import adapt_module, load_module_adapter
from meshwright.checkpoint.agreement import Agreement, agree_on_adapter
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.parallel.module.table import ModuleDescription, check_trainable, describe_module
from meshwright.spec.adapter_entries import PEFT_PREFIX
from meshwright.spec.adapter_json import settings_to_peft
from meshwright.spec.config_from_recipe import make_adapter_config
from meshwright.spec.parameters import ParameterTable
from meshwright.training.module.data import derive_seed, seed_generators
from meshwright.training.module.module_task import ModuleTask, parameter_dtype
from meshwright.training.module.recipe import ModuleRecipe
from meshwright.training.module.spec import ModuleSpec
from meshwright.training.module.values import broadcast_values, make_buffers_contiguous


def build_task(spec: ModuleSpec, recipe: ModuleRecipe, mesh: Mesh) -> ModuleTask:
    """Build the training task of a user's module on this rank; all ranks get rank 0's initial values. Collective. spec:
    arguments of `fit` (module, loss, data); recipe: settings of the run; mesh: device mesh of this rank."""
    layout = recipe.parsed_layout
    module = _build_module(spec, recipe.run.seed, layout, torch.device(mesh.device))
    adapter = make_adapter_config(recipe.adapter)
    modules = [] if adapter is None else adapt_module(module, adapter)
    if recipe.adapter.from_path is not None:
        load_module_adapter(module, agree_on_adapter(recipe.adapter.from_path, mesh), adapter)
    derived = describe_module(module, spec.units, spec.decays)
    if adapter is not None:
        derived = _name_as_peft(derived, module)
    _check_same_module(derived, mesh)
    broadcast_values(module, mesh)
    if layout.precision is None and parameter_dtype(module, layout) == torch.float32:
        layout = Layout.parse(f"{layout} fp32")
    task = ModuleTask(spec, recipe, layout, mesh, module, derived)
    task.adapter = None if adapter is None else settings_to_peft(adapter, modules)
    return task


def _name_as_peft(derived: ModuleDescription, module: nn.Module) -> ModuleDescription:
    """Return a changed copy of `derived`, the description of the adapted `module`, for checkpoints that are PEFT
    directories. In it, tensors have PEFT's names; buffers are saved next to the adapter; frozen parameters are not
    saved."""
    table = derived.table
    tensors = tuple(
        replace(each, entries=tuple(replace(entry, name=f"{PEFT_PREFIX}{entry.name}") for entry in each.entries))
        for each in table.tensors
    )
    entries = tuple(entry for tensor in tensors for entry in tensor.entries)
    frozen = {name for name, _ in module.named_parameters()}
    kept = tuple(each for each in derived.kept if each.name not in frozen)
    return replace(derived, table=ParameterTable(entries, tensors, table.units), kept=kept)


def _build_module(spec: ModuleSpec, seed: int, layout: Layout, device: torch.device) -> nn.Module:
    """Call the script's function `build` and return its module, on `device` and in training mode. Frozen parameters and
    batch-norm statistics are cast to the compute dtype of the layout; trained parameters keep their dtype until they
    are sharded.

    spec: arguments of `fit`. seed: seed of the run, which determines the module's random initial values. `UserError` if
    `build` returns no `nn.Module`."""
    seed_generators(derive_seed(seed, "module"), device)
    module = spec.build()
    if not isinstance(module, nn.Module):
        raise UserError(f"build returned a {type(module).__name__}; it must return a torch.nn.Module")
    check_trainable(module)
    module.to(device)
    if not module.training:  # from_pretrained returns modules in eval mode
        module.train()
    dtype = parameter_dtype(module, layout)
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    for inner in module.modules():
        if isinstance(inner, nn.modules.batchnorm._NormBase):  # needs statistics in the dtype of its weights
            for name, value in inner.named_buffers(recurse=False):
                if value.is_floating_point() and dtype.itemsize < value.dtype.itemsize:
                    inner._buffers[name] = value.to(dtype)
    make_buffers_contiguous(module)
    return module


def _check_same_module(derived: ModuleDescription, mesh: Mesh) -> None:
    """Raise `UserError` on all ranks of `mesh` if the ranks' modules differ in names or shapes of parameters, FSDP
    units, weight decay, buffers or frozen parameters.

    derived: description of this rank's module. Collective.
    """
    entries = [(entry.name, entry.shape, entry.unit, entry.decay) for entry in derived.table.entries]
    mine, agreement = derive_seed(0, entries, derived.kept), Agreement(mesh)
    problem = None
    if agreement.broadcast_numbers([mine], count=1) != [mine]:
        problem = f"rank {mesh.rank} built another module than rank 0: build must not depend on the rank"
    if (failure := agreement.broadcast_first_text(problem)) is not None:
        raise UserError(failure[1])
