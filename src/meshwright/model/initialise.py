"""Initial values of parameters: an element of a tensor depends on (seed, the tensor's name on disk, the element's
index) alone, not on layout, rank, threads or other tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from meshwright.spec.initial_values import draw_normal_values
from meshwright.spec.parameter_entries import ParameterEntry
from meshwright.spec.parameters import ParameterTable

ReadSlice = Callable[[ParameterEntry, int, int, tuple[int, int, int] | None], Tensor]
"""Function (entry, start, stop, columns) -> values [stop - start] of the elements [start, stop) of a parameter entry,
flattened as the model stores it. columns: (first, end, width): `start` and `stop` count only the elements of the
columns [first, end) of a matrix of `width` columns; None: of all."""


def initial_value(entry: ParameterEntry, seed: int) -> Tensor:
    """Return the unsharded initial value of a parameter entry (one tensor of a checkpoint), drawn from `seed`: float32
    on the CPU, in its shape on disk."""
    value = make_initial_slice(entry, 0, entry.numel, seed=seed).view(entry.model_shape)
    return value.T if entry.transposed else value.view(entry.shape)


def make_initial_slice(
    entry: ParameterEntry, start: int, stop: int, columns: tuple[int, int, int] | None = None, *, seed: int
) -> Tensor:
    """Return the initial values of the elements [start, stop) of a parameter entry (checkpoint tensor): float32 [stop -
    start] on the CPU. Elements are counted in the flattened matrix [output, input], as in the model's memory.

    `columns`: None: the range counts all elements; (first, end, width): the entry is a matrix of `width` columns, and
    the range counts only elements in its columns [first, end). `seed`: seed of the random values. A value depends only
    on the seed, the entry's name and the element's index.
    """
    if entry.initial.kind == "normal":
        values = draw_normal_values(seed, entry.name, start, stop, columns, torch.get_num_threads())
        return torch.from_numpy(values).mul_(entry.initial.std)
    return torch.full((stop - start,), float(entry.initial.kind == "ones"))


def initialise(model: nn.Module, table: ParameterTable, seed: int) -> None:
    """Initialise all parameters of an unsharded model from `seed`, in place. table: its parameter table."""
    fill_parameters(model, table, partial(initial_value, seed=seed))


def fill_parameters(model: nn.Module, table: ParameterTable, value_of: Callable[[ParameterEntry], Tensor]) -> None:
    """Write all parameters of the unsharded `model`, in place. table: the model's parameter table. value_of: function
    that returns the value of a parameter entry (checkpoint tensor) in its shape on disk (before any transposition)."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for entry in table.entries:
            extract_entry(parameters[entry.tensor], entry).copy_(value_of(entry))


def extract_entry(tensor: Tensor, entry: ParameterEntry) -> Tensor:
    """Return one parameter entry (one tensor of a checkpoint) as a view of a model parameter, in its shape on disk.

    `tensor`: the unsharded model parameter of which the entry is a slice (such as fused qkv), or that parameter's
    gradient."""
    part = tensor[entry.offset : entry.offset + entry.model_shape[0]]
    return part.T if entry.transposed else part
