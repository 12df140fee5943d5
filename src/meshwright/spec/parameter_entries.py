"""Entries of the parameter table: one tensor on disk each, its sharding over mesh axes, and the axes over which its
gradient is all-reduced.

*Axis* is an axis of the mesh, *dim* a dimension of a tensor. An *FSDP unit* is the set of parameters that ZeRO-3
all-gathers together: the embedding, one layer, or the head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.layout import Layout

SplitAxis = Literal["tp"]
BufferKind = Literal["dense", "experts", "frozen", "frozen_experts", "packed"]
"""The flat buffers that a unit may have: expert-parallel experts have a separate one, because they are replicated on
other ranks than all other parameters; frozen parameters too, because they have no gradient and no optimizer state, and
packed ones, which are bytes."""

BUFFER_KINDS: tuple[BufferKind, ...] = ("dense", "experts", "frozen", "frozen_experts", "packed")
EXPERT_BUFFERS: tuple[BufferKind, ...] = ("experts", "frozen_experts")
TRAINED_BUFFERS: tuple[BufferKind, ...] = ("dense", "experts")

_DENSE, _EXPERTS = ("data", "shard", "replica"), ("expert_data", "expert_shard", "expert_replica")
AXES_OF: dict[BufferKind, tuple[str, str, str]] = {
    "dense": _DENSE, "experts": _EXPERTS, "frozen": _DENSE, "frozen_experts": _EXPERTS, "packed": _DENSE,
}  # fmt: skip
"""Mesh axes of a kind of flat parameter buffer: over which gradients are summed, over which ZeRO shards, and over whose
ranks shards are replicated."""

ALIGNMENT = 32
"""Every shard holds a multiple of this many elements, for vector registers and NCCL."""


REDUCTIONS_IN_FLIGHT = 2
"""Gradient reductions that may be in flight before the backward pass waits for the oldest: this bounds the number of
unsharded gradient buffers."""


def compute_padded_numel(numel: int, shards: int) -> int:
    """Return the size in elements of a flat buffer of `numel` elements after padding: the next multiple of `shards` x
    `ALIGNMENT` (32), so that it divides into equal, aligned shards.
    """
    step = ALIGNMENT * shards
    return -(-numel // step) * step


def count_reused_buffers(sizes: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Return how many buffers for unsharded gradients are kept for reuse under ZeRO-2 and 3: {size in elements: number
    of buffers}.

    `sizes`: for each FSDP unit, in forward order, the numbers of elements of its flat buffers. Only consecutive units
    of equal sizes, such as layers, share buffers: one for the unit whose backward runs, and one for each gradient
    reduction in flight (at most `REDUCTIONS_IN_FLIGHT`)."""
    kept: dict[int, int] = {}
    for unit, run in itertools.groupby(sizes):
        length = len(list(run))
        for size in set(unit) if length > 1 else ():
            several = unit.count(size) * min(length, 1 + REDUCTIONS_IN_FLIGHT // len(unit))
            kept[size] = max(kept.get(size, 0), several)
    return kept


@dataclass(frozen=True, slots=True)
class Initial:
    """Initial values of a tensor. kind: "normal" (random), "ones" (all 1) or "zeros" (all 0). std: standard deviation
    of "normal", whose mean is 0; not used otherwise."""

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Box:
    """Contiguous block of a parameter entry (one tensor of a checkpoint) on one rank. start: index of the block's first
    element in the unsharded entry, one per dim. shape: shape of the block. local_start: index of the block's first
    element in the rank's shard of the model parameter that contains the entry (such as fused qkv), one per dim.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    local_start: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the block in the unsharded entry: one slice for each dim."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Index of the block in the rank's shard of the model parameter: one slice for each dim."""
        return tuple(slice(start, start + size) for start, size in zip(self.local_start, self.shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """Entry of the parameter table, which describes one tensor of a checkpoint.

    Attributes:
        name, shape: Name and shape on disk.
        initial: Initial values.
        decay: True if weight decay applies.
        rate: Factor on the learning rate, not 1 in matrices under µP (`spec.width_scaling`).
        transposed: True if the disk holds the transpose (GPT-2's Conv1D) of the matrix in memory, which is [output,
            input] as in `nn.Linear`. All other fields describe the matrix in memory.
        tensor: Name of the model parameter (such as fused qkv) of which the entry is a slice along dim 0, starting at
            index ``offset``.
        unit: Name of its FSDP unit (parameters that ZeRO-3 all-gathers together).
        split: {axis: dim along which the axis shards the entry}: {"tp": 0} for column-parallel and vocabulary-parallel
            weights, {"tp": 1} for row-parallel weights, {} if replicated.
        blocks: Sizes along the sharded dim of consecutive blocks, each of which is sharded separately (query, key and
            value if they are fused on disk).
        granularity: Shard boundaries are multiples of this number (the size of a head).
        remainder: What happens if tp does not divide the heads or the vocabulary: "refuse" the layout; "replicate"
            key-value heads, so that neighbouring ranks share a head; "pad" the shards of the last ranks (vocabulary).
        expert: For a routed expert, (index of the expert, number of experts); otherwise None. Under expert parallelism
            such an entry is on one ep rank and is sharded over etp instead of tp.
        stacked: True if one tensor on disk holds the entries of all experts, along a further first dim; ``name`` is
            then its name with the expert's index, "NAME[3]".
        active: Fraction of all tokens that use the entry, below 1 for routed experts.
        partial: Reason why tp ranks that hold the same values compute only partial gradients of them. "sequence": the
            ranks see different tokens under sequence parallelism; "heads": the ranks compute different heads or expert
            columns; "gate": the gate of a shared expert, as "heads", but under expert parallelism, where it multiplies
            the sum over the ranks, as "sequence". None: each rank computes the complete gradient.
        balances: True for a bias on router scores that balances the experts' load. Its gradient is the load of its
            expert minus the mean load; it is excluded from the gradient norm, and the optimizer follows its sign.
        trainable: False for a frozen parameter of a model with an adapter: it is held, and sharded like any other, but
            has no gradient, master weight or optimizer state, and is not in checkpoints.
        packed: Format in which a frozen matrix is held in blocks of 64 elements; None: the dtype of the parameters.
        exported: False for a trained parameter that is not part of the model, such as a projection to a teacher's
            hidden states: checkpoints hold it only in their directory training/, the state for resuming.
        kept: Dtype, such as "int64", of a buffer or frozen parameter of a user's module, which is in checkpoints but
            not in flat buffers; None for a trained parameter.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    tensor: str
    offset: int = 0
    unit: str
    split: Mapping[SplitAxis, int] = field(default_factory=dict, hash=False)
    blocks: tuple[int, ...] = ()
    granularity: int = 1
    remainder: Literal["refuse", "replicate", "pad"] = "refuse"
    partial: Literal["sequence", "heads", "gate"] | None = None
    initial: Initial
    decay: bool
    rate: float = 1.0
    active: float = 1.0
    balances: bool = False
    expert: tuple[int, int] | None = None
    stacked: bool = False
    trainable: bool = True
    packed: Literal["nf4", "nf4-double", "int8"] | None = None
    exported: bool = True
    kept: str | None = None

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Unsharded shape of this entry in memory: that on disk, reversed if `transposed`; (1,) for a scalar."""
        return (self.shape[::-1] if self.transposed else self.shape) or (1,)

    @property
    def disk_name(self) -> str:
        """Name of the tensor on disk that holds the entry."""
        return self.name.rpartition("[")[0] if self.stacked else self.name

    @property
    def disk_shape(self) -> tuple[int, ...]:
        """Shape of the tensor on disk that holds the entry. If one tensor holds the entries of all experts (`stacked`),
        this is the shape of all of them together."""
        return (self.expert[1], *self.shape) if self.stacked and self.expert else self.shape

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded entry."""
        return math.prod(self.shape)

    def buffer_kind(self, layout: Layout) -> BufferKind:
        """Return the kind of flat buffer that holds the entry under `layout`. A routed expert under expert parallelism
        is in "experts" or, if it is frozen, in "frozen_experts". Any other entry is in "packed" if it is held
        quantized, in "frozen" if it is frozen, else in "dense"."""
        if self.expert_parallel(layout):
            return "experts" if self.trainable else "frozen_experts"
        return "packed" if self.packed else "dense" if self.trainable else "frozen"

    def expert_parallel(self, layout: Layout) -> bool:
        """Return True if the entry belongs to a routed expert and `layout` has expert parallelism (axes ep, etp)."""
        return self.expert is not None and layout.expert_parallel

    def ep_rank(self, layout: Layout) -> int | None:
        """Return the ep rank that holds this entry of a routed expert under `layout`; None for other entries, and if ep
        is 1."""
        if self.expert is None or layout.ep == 1:
            return None
        number, experts = self.expert
        return number // (experts // layout.ep)

    def sharded_dims(self, layout: Layout) -> Mapping[str, int]:
        """Return {axis: dim along which this axis shards the entry} under `layout`. The result is the attribute
        ``split``; for routed experts under expert parallelism "tp" is replaced by "etp"."""
        return {self.width_axis(layout): self.split["tp"]} if "tp" in self.split else {}

    def width_axis(self, layout: Layout) -> Literal["tp", "etp"]:
        """Return the mesh axis that shards the widths of layers under `layout`: "tp", or "etp" for routed experts under
        expert parallelism."""
        return "etp" if self.expert_parallel(layout) else "tp"

    def replicas(self, layout: Layout) -> int:
        """Return, for `layout`, the number of consecutive ranks of the axis `width_axis` (tp or etp) that hold the same
        values of the entry; 1 if all ranks of that axis hold different shards.

        A sum over all ranks of that axis counts each element this many times. Routed experts under expert parallelism
        also have the same values on all ranks of a group of the mesh axis "expert_data"; these ranks are not counted.
        """
        if "tp" not in self.split:
            return int(getattr(layout, self.width_axis(layout)))
        if self.expert_parallel(layout):
            return 1
        pieces = self.model_shape[self.split["tp"]] // self.granularity
        return layout.tp // pieces if self.remainder == "replicate" and pieces < layout.tp else 1

    def gradient_axes(self, layout: Layout) -> tuple[str, ...]:
        """Return the mesh axes over which the entry's gradient is all-reduced under `layout`; () for a frozen entry.

        The first axis is "data" (dp x cp), because ranks see different samples and different slices of a sequence; for
        routed experts under expert parallelism it is "expert_data" instead. The axis `partial_axis` follows, if there
        is one. Axis pp is not listed: pipeline ranks that hold the same FSDP unit all-reduce its gradient separately
        (`partition.Partition.holders`)."""
        if not self.trainable:
            return ()
        partial = self.partial_axis(layout)
        return ("expert_data" if self.expert_parallel(layout) else "data", *(() if partial is None else (partial,)))

    def partial_axis(self, layout: Layout) -> Literal["tp", "etp"] | None:
        """Return the mesh axis ("tp" or, for experts, "etp") whose ranks each compute only a partial gradient of the
        entry; None if each rank computes the complete gradient, and for a frozen entry. The partial gradients are
        all-reduced over the ``replicas(layout)`` consecutive ranks with the same values."""
        if not self.trainable or self.replicas(layout) == 1:
            return None
        by_tokens = self.partial == "sequence" or (self.partial == "gate" and layout.expert_parallel)
        partial = layout.tensor_sequence_parallel if by_tokens else self.partial is not None
        return self.width_axis(layout) if partial else None

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of a rank's shard of the entry under `layout`, vocabulary padding included. All ranks that
        hold a shard have equal shapes."""
        shape = list(self.model_shape)
        for axis, dim in self.sharded_dims(layout).items():
            parts = getattr(layout, axis)
            shape[dim] = sum(self._local_block_size(block, parts) for block in self.blocks)
        return tuple(shape)

    def _local_block_size(self, block: int, parts: int) -> int:
        """Return the number of rows or columns, along the sharded dim, that one rank holds of a block (one part of a
        fused weight, such as Q, K or V). block: number of rows or columns of the whole block. parts: number of ranks
        that shard the block."""
        pieces = block // self.granularity
        if pieces % parts == 0:
            return pieces // parts * self.granularity
        if self.remainder == "pad":
            return -(-pieces // parts) * self.granularity
        assert self.remainder == "replicate" and parts % pieces == 0, f"{self.name}: {pieces} pieces on {parts} ranks"
        return self.granularity

    def intervals(self, layout: Layout, coordinates: Mapping[str, int], dim: int) -> list[tuple[int, int, int]]:
        """Return the index ranges along ``dim`` that one rank holds under `layout`, as tuples (start in the unsharded
        entry, length, start in the rank's shard); empty if the rank has no shard. coordinates: {axis: position} of the
        rank, such as {"tp": 1}."""
        if self.ep_rank(layout) not in (None, coordinates.get("ep")):
            return []
        axis = next((axis for axis, at in self.sharded_dims(layout).items() if at == dim), None)
        if axis is None:
            return [(0, self.model_shape[dim], 0)]
        parts, position = getattr(layout, axis), coordinates[axis]
        found, begin, local = [], 0, 0
        for block in self.blocks:
            share = self._local_block_size(block, parts)
            pieces = block // self.granularity
            shared_by = max(1, parts // pieces) if self.remainder == "replicate" else 1
            first = position // shared_by * share
            size = min(share, block - first)
            if size > 0:
                found.append((begin + first, size, local))
            begin, local = begin + block, local + share
        return found


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """Parameter of the model in memory, such as fused qkv: the concatenation along dim 0 of the parameter entries
    (tensors on disk) in `entries`. unit: name of its FSDP unit."""

    name: str
    unit: str
    entries: tuple[ParameterEntry, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Unsharded shape of the parameter; [output, input] for matrices."""
        first = self.entries[0].model_shape
        return (sum(entry.model_shape[0] for entry in self.entries), *first[1:])

    @property
    def numel(self) -> int:
        """Number of elements of the unsharded parameter."""
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """True if weight decay applies."""
        return self.entries[0].decay

    @property
    def trainable(self) -> bool:
        """False for a frozen parameter of a model with an adapter."""
        return self.entries[0].trainable

    def buffer_kind(self, layout: Layout) -> BufferKind:
        """Return the kind of flat buffer ("dense", "experts", "frozen" ...) that holds the parameter, with all of its
        entries, under `layout`."""
        return self.entries[0].buffer_kind(layout)

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of a rank's shard of the parameter under `layout`, vocabulary padding included; all ranks
        have equal shapes."""
        shapes = [entry.local_shape(layout) for entry in self.entries if entry.ep_rank(layout) in (None, 0)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def local_offset(self, entry: ParameterEntry, layout: Layout) -> int:
        """Return the index along dim 0 at which the shard of `entry` begins within a rank's shard of this parameter,
        under `layout`. `entry`: one of `entries`."""
        before = itertools.takewhile(lambda other: other.name != entry.name, self.entries)
        place = entry.ep_rank(layout)
        return sum(other.local_shape(layout)[0] for other in before if other.ep_rank(layout) == place)
