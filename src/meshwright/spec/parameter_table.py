"""Table of a model's parameters: lookups by name, the slices and flat buffers of a rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright.layout import Layout
from meshwright.spec.parameter_entries import BUFFER_KINDS, Box, BufferKind, ModelParameter, ParameterEntry


@dataclass(frozen=True)
class ParameterTable:
    """Table of all parameters of a model, in the forward order of its FSDP units (the embedding, each layer, the head)
    and, within a unit, in the order of its flat buffer.

    Attributes:
        entries: Parameter entries, one for each tensor on disk.
        tensors: The parameters of the model in memory, each a concatenation of entries (such as query, key and value,
            or all experts).
        units: Names of the FSDP units.
        tied: True if the head uses the embedding matrix.
    """

    entries: tuple[ParameterEntry, ...]
    tensors: tuple[ModelParameter, ...]
    units: tuple[str, ...]
    tied: bool = False

    @cached_property
    def _entry_by_name(self) -> dict[str, ParameterEntry]:
        """Parameter entries (tensors of a checkpoint) as {name on disk: entry}."""
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def _tensor_by_name(self) -> dict[str, ModelParameter]:
        """Model parameters as {name: parameter}."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def _tensors_by_unit(self) -> dict[str, tuple[ModelParameter, ...]]:
        """Model parameters of each FSDP unit as {name of the unit: parameters}, in the order of the unit's flat
        buffers."""
        found: dict[str, list[ModelParameter]] = {unit: [] for unit in self.units}
        for tensor in self.tensors:
            found[tensor.unit].append(tensor)
        return {unit: tuple(tensors) for unit, tensors in found.items()}

    def list_partial_blocks(self, layout: Layout) -> list[tuple[str, int]]:
        """Return (mesh axis "tp" or "etp", number of consecutive ranks on it) of each kind of block over which partial
        gradients are all-reduced under `layout`."""
        partial = (entry for entry in self.entries if entry.partial_axis(layout))
        return list(dict.fromkeys((entry.width_axis(layout), entry.replicas(layout)) for entry in partial))

    def entry(self, name: str) -> ParameterEntry:
        """Return the parameter entry (one tensor of a checkpoint) whose name on disk is `name`; `KeyError` if there is
        none."""
        return self._entry_by_name[name]

    def tensor(self, name: str) -> ModelParameter:
        """Return the model parameter of this name, such as "layers.0.attention.qkv.weight"; `KeyError` if there is
        none."""
        return self._tensor_by_name[name]

    def unit_tensors(
        self, unit: str, layout: Layout | None = None, buffer: BufferKind | None = None
    ) -> tuple[ModelParameter, ...]:
        """Return the model parameters of the FSDP unit called `unit` in the order of its flat buffers, with
        weight-decayed parameters first. `buffer`: select only the parameters in this flat buffer under `layout`:
        "dense" (trained parameters), "experts" (routed experts under expert parallelism), "frozen", "frozen_experts" or
        "packed" (quantized); None: all."""
        tensors = self._tensors_by_unit[unit]
        if buffer is None:
            return tensors
        return tuple(each for each in tensors if each.buffer_kind(layout or Layout()) == buffer)

    def unit_buffers(self, unit: str, layout: Layout) -> tuple[BufferKind, ...]:
        """Return the kinds of flat buffers that the FSDP unit called `unit` has under `layout`: "dense"; "experts" if
        its routed experts are sharded over other ranks than its other parameters (expert parallelism); "frozen",
        "frozen_experts" and "packed" (quantized) for the frozen parameters of a model with an adapter."""
        held = {tensor.buffer_kind(layout) for tensor in self._tensors_by_unit[unit]}
        return tuple(kind for kind in BUFFER_KINDS if kind in held) or ("dense",)

    def needed_by(self, unit: str) -> tuple[str, ...]:
        """Return the names of the FSDP units whose parameters the unit called `unit` reads: `unit` itself and, for a
        head tied to the embedding, "embedding".
        """
        return (unit, "embedding") if self.tied and unit == "head" else (unit,)

    @cached_property
    def numel(self) -> int:
        """The model's parameter count; a tied embedding counts once."""
        return sum(entry.numel for entry in self.entries)

    @cached_property
    def trained(self) -> ParameterTable:
        """Table of the trainable parameters alone, which checkpoints of a run hold; `self` if no parameter is
        frozen."""
        if all(entry.trainable for entry in self.entries):
            return self
        tensors = tuple(tensor for tensor in self.tensors if tensor.trainable)
        entries = tuple(entry for entry in self.entries if entry.trainable)
        return ParameterTable(entries, tensors, self.units, self.tied)

    @cached_property
    def frozen(self) -> ParameterTable:
        """Table of the same model with all parameters marked as frozen, as for a teacher."""
        tensors = tuple(
            replace(tensor, entries=tuple(replace(entry, trainable=False) for entry in tensor.entries))
            for tensor in self.tensors
        )
        entries = tuple(entry for tensor in tensors for entry in tensor.entries)
        return ParameterTable(entries, tensors, self.units, self.tied)

    @cached_property
    def active_numel(self) -> int:
        """The number of parameters that one token uses on average: all except the routed experts that do not process
        the token."""
        return round(sum(entry.numel * entry.active for entry in self.entries))

    def local_slices(self, entry: ParameterEntry, layout: Layout, coordinates: Mapping[str, int]) -> tuple[Box, ...]:
        """Return the blocks of a parameter entry (one tensor of a checkpoint) that one rank holds. ``coordinates``:
        {axis: position} of the rank, from ``layout.coordinates``.

        The blocks of all ranks cover the entry; ``entry.replicas(layout)`` tp ranks hold each element. A routed expert
        under expert parallelism is covered by the blocks of the ep x etp ranks that share the experts."""
        offset = self.tensor(entry.tensor).local_offset(entry, layout)
        dims = range(len(entry.model_shape))
        boxes = []
        for intervals in itertools.product(*(entry.intervals(layout, coordinates, dim) for dim in dims)):
            starts, sizes, local = (tuple(part) for part in zip(*intervals, strict=True))
            boxes.append(Box(starts, sizes, (local[0] + offset, *local[1:])))
        return tuple(boxes)

    def unit_numel(self, unit: str, layout: Layout | None = None, buffer: BufferKind = "dense") -> int:
        """Return the number of elements of one flat buffer of the FSDP unit called `unit` on a rank, before ZeRO
        sharding and padding. layout: None: one device. buffer: "dense" (trained parameters), "experts" (trained routed
        experts under expert parallelism), "frozen" (frozen parameters), "frozen_experts" (frozen routed experts under
        expert parallelism), or "packed" (quantized parameters)."""
        tensors = self.unit_tensors(unit, layout, buffer)
        return sum(math.prod(tensor.local_shape(layout or Layout())) for tensor in tensors)

    def tensor_range(self, tensor: ModelParameter, layout: Layout | None = None) -> tuple[int, int]:
        """Return the range [start, stop) of the flat buffer that holds a rank's shard of the model parameter `tensor`
        (such as fused qkv), in elements. layout: None: one device.
        """
        layout = layout or Layout()
        together = self.unit_tensors(tensor.unit, layout, tensor.buffer_kind(layout))
        before = itertools.takewhile(lambda other: other.name != tensor.name, together)
        start = sum(math.prod(other.local_shape(layout)) for other in before)
        return start, start + math.prod(tensor.local_shape(layout))

    def entry_range(self, entry: ParameterEntry, layout: Layout | None = None) -> tuple[int, int]:
        """Return the range [start, stop) of the flat buffer that holds a rank's shard of the parameter entry `entry`
        (one tensor of a checkpoint), in elements. layout: None: one device.
        """
        layout = layout or Layout()
        tensor = self.tensor(entry.tensor)
        start = self.tensor_range(tensor, layout)[0]
        start += tensor.local_offset(entry, layout) * math.prod(tensor.local_shape(layout)[1:])
        return start, start + math.prod(entry.local_shape(layout))
