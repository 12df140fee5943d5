"""Initial values: those of a tensor depend on (seed, its name on disk) alone, not on layout, rank or other tensors."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from meshwright.spec.parameters import ParameterTable
from meshwright.spec.rows import Row


def initial_value(row: Row, seed: int) -> torch.Tensor:
    """The whole of a row in float32 on the CPU, as it lies on disk (`row.shape`)."""
    if row.initial.kind == "zeros":
        return torch.zeros(row.shape)
    if row.initial.kind == "ones":
        return torch.ones(row.shape)
    digest = hashlib.sha256(f"{seed}:{row.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.empty(row.shape).normal_(std=row.initial.std, generator=generator)


def initialise(model: nn.Module, table: ParameterTable, seed: int) -> None:
    """Fill a whole, unsharded model."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for tensor in table.tensors:
            for row in tensor.rows:
                place_row(parameters[tensor.name], row, initial_value(row, seed))


def place_row(tensor: torch.Tensor, row: Row, value: torch.Tensor) -> None:
    """Write a row, as it lies on disk, into its place in the whole engine tensor."""
    part = tensor[row.offset : row.offset + row.engine_shape[0]]
    part.copy_(value.T if row.transposed else value)


def take_row(tensor: torch.Tensor, row: Row) -> torch.Tensor:
    """A row, as it lies on disk, out of the whole engine tensor."""
    part = tensor[row.offset : row.offset + row.engine_shape[0]]
    return part.T if row.transposed else part
