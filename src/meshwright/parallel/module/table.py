"""Parameter table of a user-defined module, derived from `named_parameters()`, and its FSDP units.

Parameters outside every unit (of small modules, of the module itself, shared by several modules) form the unit `REST`,
which stays unsharded for a whole pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshwright.errors import UserError
from meshwright.spec.foreign import REST, ForeignParameter, KeptValue, build_module_table
from meshwright.spec.parameters import ParameterTable

ChooseUnit = Callable[[str, nn.Module], bool]
"""Function (name, module) -> True if the module is a separate FSDP unit."""

SMALL = 1 / 32
"""Share of all parameters below which a module stays in `REST`, unless it is one of a list of modules."""
LARGE = 1 / 4
"""A list's module with more, and with a list inside, is not one unit: its inner modules are."""


@dataclass(frozen=True, slots=True)
class ModuleDescription:
    """Description of a user-defined module for ZeRO.

    `table`: its parameter table; `units`: path -> submodule that is an FSDP unit; `kept`: name, shape and dtype of each
    tensor that checkpoints store but training does not change (persistent buffers and frozen parameters)."""

    table: ParameterTable
    units: Mapping[str, nn.Module]
    kept: tuple[KeptValue, ...]


def describe_module(
    module: nn.Module, choose: ChooseUnit | None = None, decays: Callable[[str, nn.Parameter], bool] | None = None
) -> ModuleDescription:
    """Derive the parameter table and the FSDP units of a user-defined module.

    `choose`: function (path of a submodule, submodule) -> True if it is an FSDP unit; None: chosen by size. `decays`:
    function (parameter name, parameter) -> True if weight decay applies; None: it applies to parameters of two or more
    dims. Raises UserError if the module has nothing to train."""
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if not trained:
        raise UserError("the module has no parameter with requires_grad: there is nothing to train")
    uses = Counter(id(each) for _, each in module.named_parameters(remove_duplicate=False))
    total = sum(each.numel() for each in trained.values())
    units: dict[str, nn.Module] = {}
    _find_units(module, "", total, choose, units)
    unit_of: dict[int, str] = {}
    for name, unit in units.items():
        inside = Counter(id(each) for _, each in unit.named_parameters(remove_duplicate=False))
        unit_of |= {
            key: name for key, count in inside.items() if count == uses[key]
        }  # sharing inside one unit does not count
    decays = decays or (lambda name, parameter: parameter.ndim > 1)
    parameters = [
        ForeignParameter(name, tuple(each.shape), unit_of.get(id(each), REST), decays(name, each))
        for name, each in trained.items()
    ]
    table = build_module_table(parameters)
    kept = tuple(
        KeptValue(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
        for name, value in list_untrained_tensors(module, saved=True).items()
    )
    return ModuleDescription(table, {name: unit for name, unit in units.items() if name in table.units}, kept)


def list_untrained_tensors(module: nn.Module, *, saved: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a module that are not trained (frozen parameters and buffers), by name. `saved`: True to
    return only those that a checkpoint stores, which excludes non-persistent buffers and empty tensors; False to return
    all."""
    frozen = {name: each.detach() for name, each in module.named_parameters() if not each.requires_grad}
    not_saved: set[str] = set()
    if saved:
        for prefix, inner in module.named_modules():
            not_saved |= {f"{prefix}.{name}".lstrip(".") for name in inner._non_persistent_buffers_set}
    buffers = {name: each for name, each in module.named_buffers() if name not in not_saved}
    return {name: each for name, each in (frozen | buffers).items() if each.numel() or not saved}


def check_trainable(module: nn.Module) -> None:
    """Raise UserError for the first parameter or buffer of `module` that cannot be trained or saved: a tensor that is
    lazy and uninitialised, on the meta device, complex, or not strided, or a trained parameter without elements."""
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(value, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
            raise UserError(f"{name} is not initialised yet (a lazy module): run the module once where it is built")
        if value.device.type == "meta":
            raise UserError(f'{name} has no values (device "meta"): build the module on a device with memory')
        if value.is_complex() or value.layout != torch.strided:
            raise UserError(f"{name} is {value.dtype} in layout {value.layout}: real, dense tensors can be trained")
        if value.requires_grad and not value.numel():
            raise UserError(f"{name} has no elements: give it requires_grad=False")


def _find_units(
    module: nn.Module, prefix: str, total: int, choose: ChooseUnit | None, found: dict[str, nn.Module]
) -> None:
    """Find the FSDP units among the submodules of `module` and add them to `found` (path -> submodule). A submodule of
    an FSDP unit is not an FSDP unit, nor is a module that is never called, such as a ModuleList.

    `prefix`: start of the submodules' paths, "" or "PATH."; `total`: number of elements of all trained parameters;
    `choose`: function (path, submodule) -> True if it is a unit; None: chosen by size."""
    listed = isinstance(module, nn.ModuleList)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if any(child is unit for unit in found.values()):
            continue  # the same module under a second name
        called = type(child).forward is not nn.Module.forward
        trained = any(each.requires_grad for each in child.parameters())
        wanted = choose(path, child) if choose is not None else _is_unit_by_size(child, total, listed)
        if called and trained and wanted:
            found[path] = child
        else:
            _find_units(child, f"{path}.", total, choose, found)


def _is_unit_by_size(module: nn.Module, total: int, listed: bool) -> bool:
    """Return True if a module becomes an FSDP unit because of its size. An item of a ModuleList does, unless it has
    more than 1/4 of all trained parameters and contains a list (ModuleList or Sequential of several modules). Any other
    module does if it has at least 1/32 of all trained parameters and contains no list.

    `total`: number of elements of all trained parameters; `listed`: True if the module's parent is a ModuleList."""
    size = sum(each.numel() for each in module.parameters() if each.requires_grad)
    lists = any(isinstance(inner, (nn.ModuleList, nn.Sequential)) and len(inner) > 1 for inner in module.modules())
    if listed:
        return not (lists and size > LARGE * total)
    return size >= SMALL * total and not lists
