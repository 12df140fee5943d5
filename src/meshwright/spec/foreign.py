"""The parameter table of a foreign module: any torch.nn.Module that Meshwright did not build; its parameters are
sharded over dp alone. Free of torch; `parallel/module/table.py` derives the entries from the module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.spec.parameter_entries import Initial, ModelParameter, ParameterEntry
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.partition import Partition
from meshwright.spec.stages import Stage

REST = "(rest)"
"""The unit of all parameters that are in no other; it stays unsharded from the first forward to the end of backward."""


class ForeignParameter(NamedTuple):
    """Trained parameter of a user's module. name: its name in `named_parameters`. shape: its unsharded shape. unit:
    name of its FSDP unit (parameters that are all-gathered together). decay: True if weight decay applies."""

    name: str
    shape: tuple[int, ...]
    unit: str
    decay: bool


class KeptValue(NamedTuple):
    """Buffer or frozen parameter of a user's module, which is saved in checkpoints but not trained. name: its name in
    the module. shape: its shape. dtype: name of its dtype, such as "int64", valid in torch and numpy."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class ModulePartition(Partition):
    """Pipeline partition of a module that the user defined: a single stage on one pipeline rank."""

    @classmethod
    def whole(cls, table: ParameterTable) -> ModulePartition:
        """Return the partition with a single stage, which holds every parameter of `table`."""
        return cls(table, (Stage(0, range(0), first=True, last=True),), ((0,),))

    def units(self, stage: Stage) -> tuple[str, ...]:
        """Return the names of all FSDP units, in the order of the parameter table. stage: the only stage; not read."""
        return self.table.units


def build_module_table(parameters: Sequence[ForeignParameter]) -> ParameterTable:
    """Build the parameter table of a user's module, with one entry for each of its trained `parameters`. FSDP units
    (parameters that are all-gathered together) are in the order of their first parameters. The unit `REST`, which holds
    the parameters outside all other units, comes first."""
    units = dict.fromkeys([each.unit for each in parameters if each.unit == REST])
    units |= dict.fromkeys(each.unit for each in parameters)
    tensors = []
    for unit in units:
        own = [each for each in parameters if each.unit == unit]
        tensors += [_make_foreign_tensor(each) for each in sorted(own, key=lambda each: not each.decay)]
    return ParameterTable(tuple(entry for tensor in tensors for entry in tensor.entries), tuple(tensors), tuple(units))


def build_saved_table(table: ParameterTable, kept: Sequence[KeptValue], exported: bool = True) -> ParameterTable:
    """Build the parameter table for checkpoints: the trained parameters of `table`, followed by the buffers and frozen
    parameters `kept`. exported: True to save all of these in the checkpoint's model file; False to save them only in
    its directory training/, the state for resuming."""
    entries = [_make_replicated_entry(each.name, each.shape, REST, decay=False, kept=each.dtype) for each in kept]
    entries = [replace(each, exported=exported) for each in entries]
    return ParameterTable((*table.entries, *entries), table.tensors, table.units)


def refuse_for_module(layout: Layout, batch: int) -> None:
    """Check that a user's module can run on the layout; raise `UserError` if not. The layout must not have tp, cp, pp,
    ep or recomputation, which need a model built by Meshwright, and `batch` must be a multiple of dp x micro-batches.
    batch: samples of a step over all ranks."""
    layout.check_implemented()
    spread = f'layout "{layout}"'
    own = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep * layout.etp}
    for axis, ranks in own.items():
        if ranks > 1:
            raise UserError(
                f"{spread}: {axis} splits models that Meshwright builds itself; your own module is parallelized over "
                "dp alone, with zero0 to zero3, hs and mb"
            )
    if layout.recompute != "none":
        raise UserError(
            f"{spread}: ac recomputes the blocks of models that Meshwright builds itself; in your own module, call "
            "torch.utils.checkpoint"
        )
    parts = layout.dp * layout.micro_batches
    if batch % parts:
        raise UserError(
            f"{spread}: train.batch = {batch} samples is not a multiple of dp x mb = {parts}; use a multiple, "
            f"such as {-(-batch // parts) * parts}"
        )


def _make_foreign_tensor(parameter: ForeignParameter) -> ModelParameter:
    """Return the `ModelParameter` for a parameter of a user's module: it has a single entry (tensor of a checkpoint)
    and is not sharded over tp."""
    entry = _make_replicated_entry(parameter.name, parameter.shape, parameter.unit, parameter.decay, None)
    return ModelParameter(parameter.name, parameter.unit, (entry,))


def _make_replicated_entry(
    name: str, shape: tuple[int, ...], unit: str, decay: bool, kept: str | None
) -> ParameterEntry:
    """Return a parameter entry (one tensor of a checkpoint) that every rank holds unsharded. name, shape: name and
    shape in the module. unit: name of its FSDP unit. decay: True if weight decay applies. kept: dtype of a buffer or
    frozen parameter; None for a trained parameter."""
    return ParameterEntry(
        name=name,
        shape=shape,
        tensor=name,
        unit=unit,
        initial=Initial("zeros"),  # unused: the module's own values are kept
        decay=decay,
        kept=kept,
    )
