"""Where the rows of the parameter table lie in the flat buffers, and the pieces of them that a rank holds.

Every unit of the table (an embedding, a layer, the head) is one flat buffer: its decayed tensors first, then the rest,
each row-major in engine orientation, then padding. Data parallelism, optimizer and checkpoint speak in ranges of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.model.parameters import ParameterTable, Row, Tensor

ALIGNMENT = 32
"""Every shard holds a multiple of this many elements: whole vector registers here, what NCCL likes elsewhere."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous part of one logical tensor, [start, stop) of the flattened row in ENGINE orientation (row-major),
    held in the 1-D `tensor` of stop - start elements, which is a view: reading a checkpoint writes into it.

    `kind`: "master", "exp_avg", "exp_avg_sq", "momentum"; `name`: the row's name.
    """

    kind: str
    name: str
    start: int
    stop: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """The flat buffer of one unit. `tensors` and `rows` go with their offset; `padded` elements in all."""

    name: str
    tensors: tuple[tuple[Tensor, int], ...]
    rows: tuple[tuple[Row, int], ...]
    decay_numel: int
    numel: int
    padded: int


def padded_numel(numel: int, shards: int) -> int:
    """Elements of a flat buffer that holds `numel` and is cut into `shards` equal, aligned parts."""
    step = ALIGNMENT * shards
    return -(-numel // step) * step


def flat_unit(table: ParameterTable, name: str, shards: int = 1) -> FlatUnit:
    """The flat layout of unit `name` when it is cut into `shards` parts."""
    tensors = tuple((tensor, table.tensor_range(tensor)[0]) for tensor in table.unit_tensors(name))
    rows = tuple((row, table.row_range(row)[0]) for tensor, _ in tensors for row in tensor.rows)
    numel = table.unit_numel(name)
    return FlatUnit(name, tensors, rows, table.unit_decay_numel(name), numel, padded_numel(numel, shards))


def pieces_of(unit: FlatUnit, kind: str, flat: torch.Tensor, start: int, low: int, high: int) -> list[Piece]:
    """The pieces of rows inside [low, high) of the unit's buffer, as views of `flat`, whose first element is the
    buffer's element `start`."""
    pieces = []
    for row, offset in unit.rows:
        first = max(low, offset)
        last = min(high, offset + row.numel)
        if first < last:
            view = flat[first - start : last - start]
            pieces.append(Piece(kind, row.name, first - offset, last - offset, view))
    return pieces


def part_of(start: int, stop: int, index: int, parts: int) -> tuple[int, int]:
    """The `index`-th of `parts` nearly equal parts of [start, stop)."""
    length = stop - start
    return start + length * index // parts, start + length * (index + 1) // parts
