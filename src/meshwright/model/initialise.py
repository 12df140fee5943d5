"""Initial values: those of a tensor depend on (seed, its name on disk) alone, not on layout, rank or other tensors."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from meshwright.spec.parameters import ParameterTable
from meshwright.spec.rows import Row


def initial_value(row: Row, seed: int) -> torch.Tensor:
    """Return the unsharded initial value of a parameter entry (`row`), float32 on the CPU, in its shape on disk
    (`row.shape`).
    """
    if row.initial.kind == "zeros":
        return torch.zeros(row.shape)
    if row.initial.kind == "ones":
        return torch.ones(row.shape)
    digest = hashlib.sha256(f"{seed}:{row.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.empty(row.shape).normal_(std=row.initial.std, generator=generator)


def initialise(model: nn.Module, table: ParameterTable, seed: int) -> None:
    """Initialise all parameters of an unsharded model from `seed`, in place."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in table.tensors:
            for row in tensor.rows:
                place_row(parameters[tensor.name], row, initial_value(row, seed))


def place_row(tensor: torch.Tensor, row: Row, value: torch.Tensor) -> None:
    """Copy the value of a parameter entry (`row`), oriented as on disk, into its slice of the unsharded (fused) model
    parameter `tensor`.
    """
    part = tensor[row.offset : row.offset + row.engine_shape[0]]
    part.copy_(value.T if row.transposed else value)


def take_row(tensor: torch.Tensor, row: Row) -> torch.Tensor:
    """Return a view of a parameter entry (`row`), oriented as on disk, in the unsharded (fused) model parameter
    `tensor`.
    """
    part = tensor[row.offset : row.offset + row.engine_shape[0]]
    return part.T if row.transposed else part
