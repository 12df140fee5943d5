"""Model states of a rank between steps: parameters, fp32 master weights, gradients and optimizer state, FSDP unit by
unit, as `parallel/zero.py` lays them out, and the gradient reductions of these units. The sums are those of
`ZeroEngine.memory` and of the optimizer's tensors, exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import OPTIMIZERS, unknown
from meshwright.planner.cost.micro_batch import ITEM_BYTES
from meshwright.planner.memory.snapshot import Allocation
from meshwright.spec import parameter_entries as entries
from meshwright.spec.adapter_config import BLOCK, RECORD_BYTES, count_scale_bytes
from meshwright.spec.parameters import ParameterTable

STATE_KINDS: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq"), "sgd": (), "momentum": ("momentum",),
}  # fmt: skip
"""Optimizer state tensors, each of the size and type of the master weights. "momentum": SGD with momentum."""
CATEGORY_OF_STATE = {
    "parameters": "parameters", "masters": "optimizer", "gradients": "gradients", "gradient_buffers": "gradients",
    "optimizer": "optimizer", "buffers": "buffers",
}  # fmt: skip
"""Category in the ledger by kind of persistent tensor: "masters" are fp32 master weights, "gradient_buffers" unsharded
gradients."""


class Flat(NamedTuple):
    """A flat parameter buffer on a rank: parameters of an FSDP unit, concatenated to one vector.

    Attributes:
        unit: FSDP unit, such as "layers.3".
        part: Kind of the buffer, such as "dense" or "experts".
        numel, padded: Number of elements before and after padding.
        shards: Number of ranks over which ZeRO shards the buffer.
        zero: ZeRO stage; 0 if there is a single rank.
        packed: Quantized format of frozen weights, such as "nf4"; None if not quantized.
        scales: Bytes of the scales of double quantization, which are stored outside the buffer.
    """

    unit: str
    part: entries.BufferKind
    numel: int
    padded: int
    shards: int
    zero: int
    packed: str | None = None
    scales: int = 0

    @property
    def held(self) -> int:
        """Number of elements for which this rank holds fp32 master weights."""
        return self.padded // self.shards if self.zero else self.numel

    def held_bytes(self, elements: int, itemsize: int) -> int:
        """Return the bytes of `elements` parameters of the buffer, quantized or not. itemsize: bytes of an unquantized
        element."""
        return elements * itemsize if self.packed is None else elements // BLOCK * RECORD_BYTES[self.packed]

    @property
    def name(self) -> str:
        """Name of the buffer, such as "layers.3" or "layers.3.experts"."""
        return self.unit if self.part == "dense" else f"{self.unit}.{self.part}"

    @property
    def trainable(self) -> bool:
        """False for frozen parameters, which have no gradient, fp32 master weights or optimizer state."""
        return self.part in entries.TRAINED_BUFFERS


class Reduction(NamedTuple):
    """A gradient reduction in flight. flat: flat parameter buffer whose gradient is reduced; later: True for a
    micro-batch after the first, so that the result is added to an earlier sum."""

    flat: Flat
    later: bool


class PassState(NamedTuple):
    """State of a pipeline stage when a pass begins. later: True if the stage has already run a backward in this step;
    last: True for its last backward of the step; before: gradient reductions in flight."""

    later: bool
    last: bool
    before: tuple[Reduction, ...] = ()


def optimizer_kinds(optimizer: str) -> tuple[str, ...]:
    """Return the names of an optimizer's state tensors, such as ("exp_avg", "exp_avg_sq"). optimizer: such as "adamw".
    Raises `UserError` if it is unknown."""
    if optimizer not in STATE_KINDS:
        raise UserError(unknown("optimizer", optimizer, dict.fromkeys((*OPTIMIZERS, *STATE_KINDS))))
    return STATE_KINDS[optimizer]


def flats_of(table: ParameterTable, layout: Layout, units: Sequence[str]) -> list[Flat]:
    """Return the flat parameter buffers of FSDP units such as "layers.3", on a rank that holds these units."""
    found = []
    for unit in units:
        for part in table.unit_buffers(unit, layout):
            shards = layout.group_size(entries.AXES_OF[part][1])
            # Nothing of frozen parameters is updated: they are sharded by ZeRO-3 alone.
            zero = layout.zero if shards > 1 and (part in entries.TRAINED_BUFFERS or layout.zero == 3) else 0
            shards = shards if zero else 1
            numel, tensors = table.unit_numel(unit, layout, part), table.unit_tensors(unit, layout, part)
            form = tensors[0].entries[0].packed
            padded = entries.compute_padded_numel(numel, shards * (1 + (part == "packed")))
            scaled = tensors if form == "nf4-double" else ()
            scales = sum(count_scale_bytes(entry.numel) for tensor in scaled for entry in tensor.entries)
            found.append(Flat(unit, part, numel, padded, shards, zero, form, scales))
    return found


def list_states(
    flats: Sequence[Flat], parameter_dtype: str, master_dtype: str, optimizer: str
) -> Iterator[tuple[str, Allocation]]:
    """Yield (kind, tensor) for the persistent tensors of a rank after the first step; the kind is a key of
    `CATEGORY_OF_STATE`. flats: its flat parameter buffers; parameter_dtype, master_dtype: torch's type names;
    optimizer: such as "adamw"."""

    def make_tensor(kind: str, name: str, numel: int) -> tuple[str, Allocation]:
        """Return the kind and a tensor of `numel` elements of the master weights' type."""
        size = numel * ITEM_BYTES[master_dtype]
        return kind, Allocation(CATEGORY_OF_STATE[kind], name, (numel,), master_dtype, size)

    for flat in flats:
        here = flat.padded // (flat.shards if flat.zero == 3 else 1)
        size = flat.held_bytes(here, ITEM_BYTES[parameter_dtype]) + flat.scales
        dtype = flat.packed or parameter_dtype
        yield "parameters", Allocation("parameters", f"{flat.name}.parameters", (here,), dtype, size)
        if not flat.trainable:
            continue
        if parameter_dtype != master_dtype:
            yield make_tensor("masters", f"{flat.name}.master", flat.held)
        yield make_tensor("gradients", f"{flat.name}.gradient", flat.padded // (flat.shards if flat.zero >= 2 else 1))
        for kind in optimizer_kinds(optimizer):
            yield make_tensor("optimizer", f"{flat.name}.{kind}", flat.held)
    for numel, count in gradient_buffers(flats).items():
        for number in range(count):
            yield make_tensor("gradient_buffers", f"gradient_buffer.{number}", numel)


def gradient_buffers(flats: Sequence[Flat]) -> dict[int, int]:
    """Return {number of elements: number of buffers} of the unsharded gradient buffers that layers share under ZeRO-2
    and 3. flats: the rank's flat parameter buffers."""
    units = groupby(flats, key=lambda flat: flat.unit)
    sizes = [tuple(flat.padded for flat in parts if flat.zero >= 2 and flat.trainable) for _, parts in units]
    return entries.count_reused_buffers(sizes)
