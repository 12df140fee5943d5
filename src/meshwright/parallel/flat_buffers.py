"""Flat buffers: the offsets of parameter entries in them, the slices that a rank holds, and a pool of gradient buffers.

Every FSDP unit is one flat buffer (FSDP's FlatParameter): this rank's slices of its decayed tensors first, then of the
rest, each row-major as the model stores it ([output, input]), then padding. ZeRO, optimizer and checkpoint use index
ranges of it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from meshwright.layout import Layout
from meshwright.model.initialise import ReadSlice
from meshwright.quantization.formats import WeightFormat, get_weight_format
from meshwright.spec.parameter_entries import BufferKind, compute_padded_numel, count_reused_buffers
from meshwright.spec.parameters import ModelParameter, ParameterEntry, ParameterTable


class Columns(NamedTuple):
    """Range [start, stop) of the columns of a matrix with `total` columns, such as the range that tensor parallelism
    gives to a rank. The matrix is a parameter entry (one tensor of a checkpoint) in memory order, [output, input]."""

    start: int
    stop: int
    total: int

    @property
    def width(self) -> int:
        """Number of columns in the range."""
        return self.stop - self.start


def select_columns(values: torch.Tensor, columns: Columns | None) -> torch.Tensor:
    """Return some columns of a matrix that is flattened in the last dim of `values`: [..., rows x columns.total] ->
    [..., rows x columns.width]. `columns`: range of the columns; None: all columns; `values` itself is returned."""
    if columns is None:
        return values
    return values.unflatten(-1, (-1, columns.total))[..., columns.start : columns.stop].flatten(-2)


def make_slice_reader(value_of: Callable[[ParameterEntry], torch.Tensor]) -> ReadSlice:
    """Return a function that reads a slice of a parameter entry (one tensor of a checkpoint). value_of: function that
    returns the unsharded value of an entry in its shape on disk, which may be the transpose of the model's.

    The returned function, (entry, start, stop, columns) -> 1-D tensor, returns the elements [start, stop) of the
    flattened entry. columns: (first, end, width): flatten only the columns [first, end) of the entry, a matrix of
    `width` columns; None: all columns. The last value is cached, so that consecutive slices of one entry call
    `value_of` once."""
    known: dict[str, torch.Tensor] = {}  # the last entry's value, flattened

    def read_slice(entry: ParameterEntry, start: int, stop: int, columns: tuple[int, int, int] | None) -> torch.Tensor:
        """Return the elements [start, stop) of `entry`, flattened row-major as the model stores it. `columns`: (first,
        end, width): `start` and `stop` count only the elements of columns [first, end) of a matrix of `width` columns;
        None: all."""
        if entry.name not in known:
            known.clear()
            value = value_of(entry)
            known[entry.name] = (value.t() if entry.transposed else value).reshape(-1)
        return select_columns(known[entry.name], columns and Columns(*columns))[start:stop]

    return read_slice


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Slice of one tensor of a checkpoint: a range of the elements of a parameter entry. `tensor` is a 1-D view of the
    values of these elements; saving a checkpoint reads the view, loading overwrites it.

    `kind`: quantity in `tensor`: "master" (weights) or an optimizer state such as "exp_avg"; `name`: name of the entry.
    `start`, `stop`: element range [start, stop) of the flattened entry, row-major as the model stores it, [output,
    input] (the checkpoint file may hold the transpose). `columns`: only these columns of the matrix are flattened and
    counted by the range (None: all columns)."""

    kind: str
    name: str
    start: int
    stop: int
    tensor: torch.Tensor
    columns: Columns | None = None

    def select(self, values: torch.Tensor) -> torch.Tensor:
        """Return this slice's elements, [..., stop - start], of `values` [..., n], which has one value for each of the
        n elements of the unsharded entry (row-major as the model stores it).
        """
        return select_columns(values, self.columns)[..., self.start : self.stop]

    def write_into(self, values: torch.Tensor) -> None:
        """Write this slice's elements into `values` [entry.numel], the flattened unsharded entry as the model stores
        it, in place."""
        if self.columns is None:
            values[self.start : self.stop] = self.tensor
        else:
            values[self.select(torch.arange(values.numel()))] = self.tensor.to(values.dtype)


@dataclass(frozen=True, slots=True)
class EntrySlice:
    """Slice of a parameter entry (one tensor of a checkpoint) in a flat buffer: the buffer elements [offset, offset +
    numel) are the elements [begin, begin + numel) of the flattened `entry`.

    `columns`: only these columns of the matrix are flattened and counted by `begin` (None: all columns). `copies`:
    number of neighbouring ranks of the mesh axis `axis` ("tp" or, for experts, "etp") that hold the same slice.
    `partial`: True if each of these ranks computes only a partial gradient of the slice, so that their gradients must
    be summed."""

    entry: ParameterEntry
    offset: int
    numel: int
    begin: int
    columns: Columns | None
    copies: int
    axis: str
    partial: bool


class PlacedTensor(NamedTuple):
    """A model parameter (such as fused qkv) and its position in a flat buffer. `offset`: index in the buffer of its
    first element; `shape`: shape of this rank's tp or ep shard of the tensor."""

    tensor: ModelParameter
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements of this rank's shard."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Layout of one flat buffer (the parameters of an FSDP unit, concatenated) on one rank, before ZeRO shards it.

    `name`: name of the buffer; `tensors`: the model's parameters in it (such as fused qkv); `slices`: the slices of
    parameter entries (checkpoint tensors) in it, which do not cover padding of the vocabulary. `padded`: number of
    elements of the buffer; the first `numel` are parameters, and the first `decay_numel` of these have weight decay.
    `storage_format`: format of the elements: unpacked or, for frozen weights, quantized in blocks (NF4 or int8)."""

    name: str
    tensors: tuple[PlacedTensor, ...]
    slices: tuple[EntrySlice, ...]
    decay_numel: int
    numel: int
    padded: int
    storage_format: WeightFormat

    @property
    def trainable(self) -> bool:
        """False if the buffer holds frozen parameters, which have no gradient."""
        return all(placed.tensor.trainable for placed in self.tensors)

    @property
    def rate_factor(self) -> float:
        """Factor by which µP scales the learning rate of the buffer's matrices, which are its first `decay_numel`
        elements; 1 without µP."""
        rates = {placed.tensor.entries[0].rate for placed in self.tensors if placed.tensor.decay}
        assert len(rates) < 2, f"{self.name}: matrices with different learning rates {rates}"
        return rates.pop() if rates else 1.0

    def find_slices(self, low: int, high: int) -> Iterator[tuple[EntrySlice, int, int]]:
        """Yield (slice, first, last) for each slice of a parameter entry that overlaps the elements [low, high) of the
        flat buffer; [first, last) is the overlap, in buffer elements.
        """
        for part in self.slices:
            first, last = max(low, part.offset), min(high, part.offset + part.numel)
            if first < last:
                yield part, first, last

    def split_by_copies(self, low: int, high: int) -> list[tuple[int, int, int]]:
        """Divide the buffer elements [low, high) into ranges, so that all elements of a range are held by the same
        number of ranks along tp (for experts, etp). Return (first, last, copies) for each range [first, last), where
        `copies` is that number of ranks; a gradient norm divides by it to count each element once. Elements that do not
        count in gradient norms are left out: padding, and the routers' load-balancing biases."""
        ranges: list[tuple[int, int, int]] = []
        for part, first, last in self.find_slices(low, high):
            if part.entry.balances:
                continue
            if ranges and ranges[-1][1:] == (first, part.copies):
                first = ranges.pop()[0]
            ranges.append((first, last, part.copies))
        return ranges

    def view_parameters(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the model's parameters as views of `buffer`, an unsharded flat buffer (1-D, `self.padded` elements),
        in the order of `self.tensors` and in their shapes on this rank.
        """
        ranges = (self.locate_items(each.offset, each.offset + each.numel) for each in self.tensors)
        parts = zip(ranges, self.tensors, strict=True)
        return [self.storage_format.view(buffer[items], each.shape) for items, each in parts]

    def locate_items(self, start: int, stop: int) -> slice:
        """Return the slice of a buffer's items in memory that store its elements [start, stop); an item of a quantized
        format stores several elements."""
        return slice(self.storage_format.count_items(start), self.storage_format.count_items(stop))

    def bind(self, model: nn.Module, buffer: torch.Tensor) -> list[nn.Parameter]:
        """Make the parameters of `model` in this layout views of `buffer`, an unsharded flat buffer (1-D, `self.padded`
        elements); return them in the order of `self.tensors`. Parameters on the meta device are replaced by new
        parameters.

        The views are assigned through `.data` and so have separate version counters: to autograd, an all-gather that
        refills the buffer is then no in-place change of saved tensors.
        """
        bound = []
        for placed, view in zip(self.tensors, self.view_parameters(buffer), strict=True):
            parent, _, leaf = placed.tensor.name.rpartition(".")
            module = model.get_submodule(parent)
            before = getattr(module, leaf)
            assert (before.shape or (1,)) == placed.shape, (placed.tensor.name, before.shape, placed.shape)
            parameter = before
            if before.device.type == "meta":
                parameter = nn.Parameter(torch.empty(0, dtype=buffer.dtype, device=buffer.device), self.trainable)
                module.register_parameter(leaf, parameter)
            # The same object otherwise: a tied layer or an LSTM's list of weights may refer to it too.
            parameter.data = self.storage_format.bind(module, placed.offset, view, before.shape)
            bound.append(parameter)
        return bound

    def fill(self, shard: torch.Tensor, start: int, read_slice: ReadSlice) -> None:
        """Write parameter values into the 1-D `shard` of the flat buffer, whose first element is the buffer element
        `start`.

        `read_slice`: function (entry, first, last, columns) -> values that reads a slice of a parameter entry
        (checkpoint tensor)."""
        form = self.storage_format
        form.compute_scales(read_slice, shard.device)
        for part, first, last in self.find_slices(start, start + form.count_elements(shard.numel())):
            shift = part.begin - part.offset
            values = read_slice(part.entry, first + shift, last + shift, part.columns)
            shard[self.locate_items(first - start, last - start)].copy_(form.pack(values, first))

    def fill_from_model(self, shard: torch.Tensor, start: int, model: nn.Module) -> None:
        """Copy the parameters of `model` into the 1-D `shard` of the flat buffer. Must be called before `bind`. start:
        index in the buffer of the shard's first element. Parameters on the meta device are skipped."""
        for placed in self.tensors:
            value = model.get_parameter(placed.tensor.name).detach()
            offset = placed.offset
            first, last = max(start, offset), min(start + shard.numel(), offset + placed.numel)
            if first < last and value.device.type != "meta":
                shard[first - start : last - start].copy_(value.reshape(-1)[first - offset : last - offset])


def make_flat_layout(
    table: ParameterTable, name: str, shards: int = 1, layout: Layout | None = None,
    coordinates: Mapping[str, int] | None = None, buffer: BufferKind = "dense",
) -> FlatLayout:  # fmt: skip
    """Build the layout of one flat buffer of the FSDP unit `name` on one rank.

    `table`: the model's parameter table; `shards`: number of ranks over which ZeRO shards the buffer, which is padded
    to equal shards; `layout`: parallel layout (None: one device); `coordinates`: {axis: index} of this rank in it
    (None: rank 0); `buffer`: which of the unit's parameters: "dense" (trained), "experts" (routed experts under expert
    parallelism), "frozen", "frozen_experts" or "packed" (quantized). The layout has the name of the unit; for other
    kinds than "dense" the kind is appended, as in "layers.3.experts"."""
    layout = layout or Layout()
    coordinates = coordinates or layout.coordinates(0)
    tensors = []
    slices = []
    for tensor in table.unit_tensors(name, layout, buffer):
        placed = PlacedTensor(tensor, table.tensor_range(tensor, layout)[0], tensor.local_shape(layout))
        tensors.append(placed)
        for entry in tensor.entries:
            slices += _list_entry_slices(table, entry, layout, coordinates, placed)
    numel = sum(placed.numel for placed in tensors)
    decay_numel = sum(placed.numel for placed in tensors if placed.tensor.decay)
    padded = compute_padded_numel(numel, shards if buffer != "packed" else 2 * shards)  # shards of whole blocks
    form = get_weight_format(tensors[0].tensor.entries[0].packed if tensors else None, slices)
    name = name if buffer == "dense" else f"{name}.{buffer}"
    return FlatLayout(name, tuple(tensors), tuple(slices), decay_numel, numel, padded, form)


def _list_entry_slices(
    table: ParameterTable, entry: ParameterEntry, layout: Layout, coordinates: Mapping[str, int], placed: PlacedTensor
) -> list[EntrySlice]:
    """Return this rank's slices of a parameter entry (one tensor of a checkpoint) in the flat buffer.

    `table`: the model's parameter table; `coordinates`: {axis: index} of this rank in `layout`; `placed`: position, in
    the buffer, of the model's parameter that contains the entry (such as fused qkv)."""
    held = entry.replicas(layout), entry.width_axis(layout), entry.partial_axis(layout) is not None
    slices = []
    for box in table.local_slices(entry, layout, coordinates):
        whole = entry.model_shape
        assert box.shape[1:] == placed.shape[1:], f"{entry.name}: a box that is not contiguous in its tensor"
        cut = [dim for dim in range(1, len(whole)) if box.shape[dim] != whole[dim]]
        assert len(cut) <= 1, f"{entry.name}: cut along dims {cut}"
        columns = None
        for dim in cut:
            inner = math.prod(whole[dim + 1 :])
            columns = Columns(box.start[dim] * inner, (box.start[dim] + box.shape[dim]) * inner, whole[dim] * inner)
        stride = math.prod(box.shape[1:])
        offset = placed.offset + box.local_start[0] * stride
        slices.append(EntrySlice(entry, offset, math.prod(box.shape), box.start[0] * stride, columns, *held))
    return slices


def cut_slices(
    flat: FlatLayout, kind: str, values: torch.Tensor, start: int, low: int, high: int,
    position: Mapping[str, int] | None = None,
) -> list[TensorSlice]:  # fmt: skip
    """Return the elements [low, high) of a flat buffer as slices of checkpoint tensors: one `TensorSlice` for each
    parameter entry (checkpoint tensor) in that range, each a view of the 1-D `values`.

    `flat`: layout of the buffer; `values`: consecutive elements of the buffer from its element `start` on; `kind`: name
    of the quantity in `values` ("master", "exp_avg", ...); `position`: {axis: index of this rank}: elements that
    several ranks of an axis hold are divided equally among these ranks, and only this rank's share is returned; None:
    all elements are returned."""
    slices = []
    for part, first, last in flat.find_slices(low, high):
        if position is not None:
            first, last = split_evenly(first, last, position[part.axis] % part.copies, part.copies)
        if first < last:
            view = values[first - start : last - start]
            shift = part.begin - part.offset
            slices.append(TensorSlice(kind, part.entry.name, first + shift, last + shift, view, part.columns))
    return slices


def split_evenly(start: int, stop: int, index: int, shares: int) -> tuple[int, int]:
    """Split the index range [start, stop) into `shares` consecutive, nearly equal ranges; return the range with the
    given `index` (from 0) as (start, stop).
    """
    length = stop - start
    return start + length * index // shares, start + length * (index + 1) // shares


class GradientBufferPool:
    """Pool of 1-D buffers for unsharded gradients under ZeRO-2 and 3, which are used only during backward passes. FSDP
    units of equal sizes, such as layers, share a few buffers that the pool keeps; other buffers are freed on release:
    those of other sizes, such as an embedding's, and those that units need beyond the few.

    `sizes`: for each FSDP unit, in forward order, the numbers of elements of its buffers; `device`, `dtype`: of the
    buffers.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, sizes: Sequence[tuple[int, ...]]) -> None:
        self._allocate = partial(torch.empty, dtype=dtype, device=device)
        self._missing = Counter(count_reused_buffers(sizes))
        """{size: buffers that the pool may still allocate to keep; below 0: buffers that it frees on release}."""
        self._free = defaultdict[int, list[torch.Tensor]](list)

    def acquire(self, size: int) -> torch.Tensor:
        """Return an uninitialised 1-D buffer of `size` elements, from the pool or newly allocated."""
        if self._free[size]:
            return self._free[size].pop()
        self._missing[size] -= 1
        return self._allocate(size)

    def release(self, buffer: torch.Tensor) -> None:
        """Return `buffer` to the pool after use; the pool keeps it for reuse or frees it."""
        if self._missing[buffer.numel()] < 0:
            self._missing[buffer.numel()] += 1
        else:
            self._free[buffer.numel()].append(buffer)

    def idle(self) -> list[torch.Tensor]:
        """Return the buffers of the pool that are allocated but not acquired."""
        return [buffer for free in self._free.values() for buffer in free]
