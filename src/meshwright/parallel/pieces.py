"""Where the rows of the parameter table lie in a rank's flat buffers, and the pieces of them that it holds.

Every unit of the table (an embedding, a layer, the head) is one flat buffer: this rank's slices of its decayed tensors
first, then of the rest, each row-major in engine orientation, then padding. Under expert parallelism the experts of a
layer are a second one. Data parallelism, optimizer and checkpoint speak in ranges of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from meshwright.layout import Layout
from meshwright.spec.parameters import ParameterTable, Row, Tensor
from meshwright.spec.rows import Part, padded_numel


class Columns(NamedTuple):
    """Columns [start, stop) of a row seen as a matrix of `of` columns."""

    start: int
    stop: int
    of: int

    @property
    def width(self) -> int:
        return self.stop - self.start


def restricted(values: torch.Tensor, columns: Columns | None) -> torch.Tensor:
    """Of a whole row, flat in the last dimension, the elements in `columns` (None: all), flat again."""
    if columns is None:
        return values
    return values.unflatten(-1, (-1, columns.of))[..., columns.start : columns.stop].flatten(-2)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of one logical tensor (a row flattened in ENGINE orientation, row-major), or of those of
    its `columns`, held in the 1-D `tensor` of stop - start elements, which is a view: reading a checkpoint writes into
    it.

    `kind`: "master", "exp_avg", "exp_avg_sq", "momentum"; `name`: the row's name.
    """

    kind: str
    name: str
    start: int
    stop: int
    tensor: torch.Tensor
    columns: Columns | None = None

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """This piece's elements of a whole row, flat in engine orientation in the last dimension."""
        return restricted(values, self.columns)[..., self.start : self.stop]

    def put(self, values: torch.Tensor) -> None:
        """Write this piece into a whole row, flat in engine orientation."""
        if self.columns is None:
            values[self.start : self.stop] = self.tensor
        else:
            values[self.of(torch.arange(values.numel()))] = self.tensor.to(values.dtype)


@dataclass(frozen=True, slots=True)
class RowPart:
    """What a rank holds of a row: `numel` elements of its flat buffer from `offset` on are those of the flattened row,
    or of its `columns`, from `begin` on.

    `copies` neighbouring ranks of tp hold the same; `partial`: the gradient is the sum of what they have.
    """

    row: Row
    offset: int
    numel: int
    begin: int
    columns: Columns | None
    copies: int
    partial: bool

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """The part's elements of a whole row, flat in engine orientation."""
        return restricted(values, self.columns)[self.begin : self.begin + self.numel]


class PlacedTensor(NamedTuple):
    """An engine tensor, where it lies in the flat buffer, and the shape of this rank's slice of it."""

    tensor: Tensor
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """The flat buffer of one unit on one rank: `padded` elements in all. Where the vocabulary does not divide, what
    fills the last ranks' slices up belongs to no part."""

    name: str
    tensors: tuple[PlacedTensor, ...]
    parts: tuple[RowPart, ...]
    decay_numel: int
    numel: int
    padded: int

    def within(self, low: int, high: int) -> Iterator[tuple[RowPart, int, int]]:
        """The parts that have elements in [low, high) of the buffer, each with its range [first, last) there."""
        for part in self.parts:
            first, last = max(low, part.offset), min(high, part.offset + part.numel)
            if first < last:
                yield part, first, last

    def copies(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """[low, high) as few ranges (first, last, how many ranks of tp hold the same); without what fills up, and
        without biases that balance experts, which no norm counts."""
        ranges: list[tuple[int, int, int]] = []
        for part, first, last in self.within(low, high):
            if part.row.balances:
                continue
            copies = part.copies
            if ranges and ranges[-1][1:] == (first, copies):
                first = ranges.pop()[0]
            ranges.append((first, last, copies))
        return ranges


def buffer_name(unit: str, part: Part) -> str:
    """What the flat buffer of a unit's part is called."""
    return unit if part == "dense" else f"{unit}.{part}"


def flat_unit(
    table: ParameterTable,
    name: str,
    shards: int = 1,
    layout: Layout | None = None,
    coordinates: Mapping[str, int] | None = None,
    part: Part = "dense",
) -> FlatUnit:
    """The flat layout of unit `name` (of its `part`) on the rank at `coordinates` of `layout` (on one device, unless
    given) when it is cut into `shards` parts."""
    layout = layout or Layout()
    coordinates = coordinates or layout.coordinates(0)
    tensors, parts = [], []
    for tensor in table.unit_tensors(name, layout, part):
        offset, shape = table.tensor_range(tensor, layout)[0], tensor.local_shape(layout)
        tensors.append(PlacedTensor(tensor, offset, shape))
        for row in tensor.rows:
            parts += _parts_of(table, row, layout, coordinates, offset, shape)
    numel, decay_numel = table.unit_numel(name, layout, part), table.unit_decay_numel(name, layout, part)
    return FlatUnit(
        buffer_name(name, part), tuple(tensors), tuple(parts), decay_numel, numel, padded_numel(numel, shards)
    )


def _parts_of(
    table: ParameterTable,
    row: Row,
    layout: Layout,
    coordinates: Mapping[str, int],
    offset: int,
    local_shape: tuple[int, ...],
) -> list[RowPart]:
    """A row's boxes in the slice, at `offset` of the flat buffer, of its engine tensor."""
    copies, partial = row.replicas(layout), "tp" in row.gradient_axes(layout)
    parts = []
    for box in table.local_slices(row, layout, coordinates):
        whole = row.engine_shape
        assert box.shape[1:] == local_shape[1:], f"{row.name}: a box that is not contiguous in its tensor"
        cut = [dim for dim in range(1, len(whole)) if box.shape[dim] != whole[dim]]
        assert len(cut) <= 1, f"{row.name}: cut along dims {cut}"
        columns = None
        for dim in cut:
            inner, start = math.prod(whole[dim + 1 :]), box.start[dim]
            columns = Columns(start * inner, (start + box.shape[dim]) * inner, whole[dim] * inner)
        one = math.prod(box.shape[1:])  # elements of one row of the box
        place = offset + box.local_start[0] * one
        parts.append(RowPart(row, place, math.prod(box.shape), box.start[0] * one, columns, copies, partial))
    return parts


def pieces_of(
    unit: FlatUnit, kind: str, flat: torch.Tensor, start: int, low: int, high: int, position: int | None = None
) -> list[Piece]:
    """The pieces of rows inside [low, high) of the unit's buffer, as views of `flat`, whose first element is the
    buffer's element `start`. `position`: this rank's place on tp, if of what several ranks of tp hold it is to have
    only its share."""
    pieces = []
    for part, first, last in unit.within(low, high):
        if position is not None:
            first, last = part_of(first, last, position % part.copies, part.copies)
        if first < last:
            view, shift = flat[first - start : last - start], part.begin - part.offset
            pieces.append(Piece(kind, part.row.name, first + shift, last + shift, view, part.columns))
    return pieces


def part_of(start: int, stop: int, index: int, parts: int) -> tuple[int, int]:
    """The `index`-th of `parts` nearly equal parts of [start, stop)."""
    length = stop - start
    return start + length * index // parts, start + length * (index + 1) // parts
