"""Initial values of parameters: those of a tensor depend on (seed, its name on disk) alone, not on layout, rank or
other tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from meshwright.spec.parameter_entries import ParameterEntry
from meshwright.spec.parameters import ParameterTable


def initial_value(entry: ParameterEntry, seed: int) -> torch.Tensor:
    """Return the unsharded initial value of a parameter entry (one tensor of a checkpoint): float32 on the CPU, in its
    shape on disk. The value depends on `seed` and the entry's name alone."""
    if entry.initial.kind == "zeros":
        return torch.zeros(entry.shape)
    if entry.initial.kind == "ones":
        return torch.ones(entry.shape)
    digest = hashlib.sha256(f"{seed}:{entry.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.empty(entry.shape).normal_(std=entry.initial.std, generator=generator)


def initialise(model: nn.Module, table: ParameterTable, seed: int) -> None:
    """Initialise all parameters of an unsharded model from `seed`, in place. table: its parameter table."""
    fill_parameters(model, table, partial(initial_value, seed=seed))


def fill_parameters(
    model: nn.Module, table: ParameterTable, value_of: Callable[[ParameterEntry], torch.Tensor]
) -> None:
    """Write all parameters of an unsharded model, in place. table: its parameter table. value_of: function that returns
    the value of a parameter entry in its shape on disk (before any transposition)."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for entry in table.entries:
            write_entry(parameters[entry.tensor], entry, value_of(entry))


def write_entry(tensor: torch.Tensor, entry: ParameterEntry, value: torch.Tensor) -> None:
    """Copy the value of one parameter entry (one tensor of a checkpoint) into a model parameter. `value`: in its shape
    on disk, transposed here if the model stores the transpose; `tensor`: unsharded model parameter of which the entry
    is a slice (such as fused qkv)."""
    part = tensor[entry.offset : entry.offset + entry.engine_shape[0]]
    part.copy_(value.T if entry.transposed else value)


def extract_entry(tensor: torch.Tensor, entry: ParameterEntry) -> torch.Tensor:
    """Return one parameter entry (one tensor of a checkpoint) as a view of a model parameter, in its shape on disk.
    `tensor`: the unsharded model parameter of which the entry is a slice (such as fused qkv), or that parameter's
    gradient."""
    part = tensor[entry.offset : entry.offset + entry.engine_shape[0]]
    return part.T if entry.transposed else part
