"""An entry of the parameter table (`Row`): a tensor on disk, its cuts along mesh axes, the ranks that its gradient is
reduced over.

*Axis* is an axis of the mesh, *dim* a dimension of a tensor. An FSDP unit's flat buffers are called "dense" and
"experts" (`Part`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshwright.layout import Layout

SplitAxis = Literal["tp"]
Part = Literal["dense", "experts"]
"""The two flat buffers that a unit may have: experts that are spread over ranks of their own lie apart, because other
ranks hold the same of them than of all else."""

ALIGNMENT = 32
"""Every shard holds a multiple of this many elements: whole vector registers here, what NCCL likes elsewhere."""


REDUCTIONS_IN_FLIGHT = 2
"""Gradient reductions that may be in flight before the backward pass waits for the oldest: this bounds the number of
unsharded gradient buffers."""


def padded_numel(numel: int, shards: int) -> int:
    """Return the size in elements of a flat buffer that holds `numel` elements, padded so that it divides into
    `shards` equal, aligned shards.
    """
    step = ALIGNMENT * shards
    return -(-numel // step) * step


def kept_buffers(sizes: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Return how many unsharded gradient buffers of each size are reused from unit to unit (ZeRO-2 and 3): {elements:
    count}.

    `sizes`: the buffer sizes of each FSDP unit, in order. Equal neighbours (layers) share the buffers of the unit in
    backward and one for each reduction in flight.
    """
    kept: dict[int, int] = {}
    for unit, run in itertools.groupby(sizes):
        length = len(list(run))
        for size in set(unit) if length > 1 else ():
            several = unit.count(size) * min(length, 1 + REDUCTIONS_IN_FLIGHT // len(unit))
            kept[size] = max(kept.get(size, 0), several)
    return kept


@dataclass(frozen=True, slots=True)
class Initial:
    """Initial values of a tensor. kind: "normal" with mean 0 and standard deviation `std`, all "ones", or all
    "zeros".
    """

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a parameter entry that a rank holds. start: index of its first element in the entry (engine
    orientation). shape: its shape. local_start: index of its first element in the rank's shard of the engine tensor.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    local_start: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the box in the full entry, in engine orientation."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """Index of the box in the rank's shard of the engine tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.local_start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Row:
    """A parameter entry: one tensor as stored on disk. ``name``, ``shape``: those on disk. ``initial``: its initial
    values. ``decay``: weight decay applies.

    ``transposed``: the disk holds the transpose of the engine's orientation (GPT-2's Conv1D); all that follows is in
    the engine's orientation, [output, input] for matrices. The entry begins at index ``offset`` of dim 0 of the engine
    tensor ``tensor``, which belongs to FSDP unit ``unit``.

    ``split``: axis -> dim along which the axis cuts the tensor: tp:0 column parallel and vocabulary, tp:1 row parallel,
    none replicated. ``expert``: (index, number of experts); under expert parallelism the entry is on one ep rank, and
    etp cuts it instead of tp. ``blocks``: sizes along that dim that are cut one by one (query, key and value fused on
    disk). ``granularity``: a cut falls on multiples of it (a head). ``remainder``: what happens if the heads are fewer
    than the ranks or do not divide: ``refuse``; ``replicate``, neighbouring ranks share a head (key-value heads);
    ``pad``, the last ranks' shards are padded (vocabulary).

    ``partial``: why tp ranks that hold the same values have partial gradients: ``sequence``, they see different tokens
    under sequence parallelism; ``heads``, they always serve different heads or columns of experts.

    ``active``: the share of all tokens that use it, below 1 for one of several experts. ``balances``: a bias on a
    router's scores. Its gradient is its expert's load above the mean, not a derivative of the loss: it is left out of
    the gradient norm, and the optimizer follows its sign.

    ``kept``: the dtype, such as "int64", of a value that is not trained: a buffer or a frozen parameter of a foreign
    module. Checkpoints have such entries, flat buffers have not.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    tensor: str
    offset: int
    unit: str
    split: Mapping[SplitAxis, int] = field(hash=False)
    blocks: tuple[int, ...]
    granularity: int
    remainder: Literal["refuse", "replicate", "pad"]
    partial: Literal["sequence", "heads"] | None
    initial: Initial
    decay: bool
    active: float = 1.0
    balances: bool = False
    expert: tuple[int, int] | None = None
    kept: str | None = None

    @property
    def engine_shape(self) -> tuple[int, ...]:
        """Shape in the engine's orientation; (1,) for a scalar."""
        return (self.shape[::-1] if self.transposed else self.shape) or (1,)

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    def part(self, layout: Layout) -> Part:
        """Return the flat buffer of its unit that holds the entry: "experts" for an expert under expert parallelism,
        else "dense"."""
        return "experts" if self.expert is not None and layout.expert_parallel else "dense"

    def place(self, layout: Layout) -> int | None:
        """Return the ep rank that holds this expert; None if the entry is not an expert or ep is 1."""
        if self.expert is None or layout.ep == 1:
            return None
        number, experts = self.expert
        return number // (experts // layout.ep)

    def cut_by(self, layout: Layout) -> Mapping[str, int]:
        """Return by axis the dim along which this layout cuts the entry: ``split``, with etp instead of tp for
        experts under expert parallelism.
        """
        axis = "etp" if self.part(layout) == "experts" else "tp"
        return {axis: self.split["tp"]} if "tp" in self.split else {}

    def replicas(self, layout: Layout) -> int:
        """Return the number of tp ranks that hold the same values, which are consecutive ranks; 1 if each has its own
        shard.

        A sum of squares over tp counts each element so many times. Always 1 for experts under expert parallelism, whose
        replicas are ``layout.groups("expert_data")``.
        """
        if self.part(layout) == "experts":
            return 1
        if "tp" not in self.split:
            return layout.tp
        pieces = self.engine_shape[self.split["tp"]] // self.granularity
        return layout.tp // pieces if self.remainder == "replicate" and pieces < layout.tp else 1

    def gradient_axes(self, layout: Layout) -> tuple[str, ...]:
        """Return the axes over which this tensor's gradient is summed.

        * ``data`` (dp x cp), always: ranks see different samples and different slices of a sequence; instead
          ``expert_data`` for experts under expert parallelism: each block of ep x etp ranks saw other tokens.
        * ``tp``: over each group of ``replicas(layout)`` consecutive ranks of tp, which hold the same values.

        The pipeline ranks that hold the unit sum its gradient too: `partition.Partition.holders`.
        """
        axes = ["data" if self.part(layout) == "dense" else "expert_data"]
        if self.replicas(layout) > 1 and (
            self.partial == "heads" or (self.partial == "sequence" and layout.tensor_sequence_parallel)
        ):
            axes.append("tp")
        return tuple(axes)

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of a rank's shard, equal on all ranks that hold one, vocabulary padding included."""
        shape = list(self.engine_shape)
        for axis, dim in self.cut_by(layout).items():
            parts = getattr(layout, axis)
            shape[dim] = sum(self._local_block_size(block, parts) for block in self.blocks)
        return tuple(shape)

    def _local_block_size(self, block: int, parts: int) -> int:
        """Return how many of the `block` elements along a cut dim each of ``parts`` ranks holds."""
        pieces = block // self.granularity
        if pieces % parts == 0:
            return pieces // parts * self.granularity
        if self.remainder == "pad":
            return -(-pieces // parts) * self.granularity
        assert self.remainder == "replicate" and parts % pieces == 0, f"{self.name}: {pieces} pieces on {parts} ranks"
        return self.granularity

    def intervals(self, layout: Layout, coordinates: Mapping[str, int], dim: int) -> list[tuple[int, int, int]]:
        """Return the intervals that the rank at `coordinates` (position by axis, such as {"tp": 1}) holds along
        ``dim``, each (start in the full entry, size, start in the rank's shard).
        """
        if self.place(layout) not in (None, coordinates.get("ep")):
            return []
        axis = next((axis for axis, at in self.cut_by(layout).items() if at == dim), None)
        if axis is None:
            return [(0, self.engine_shape[dim], 0)]
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
class Tensor:
    """One tensor of the engine: its parameter entries (`rows`) concatenated along dim 0, such as query, key and
    value. unit: name of its FSDP unit.
    """

    name: str
    unit: str
    rows: tuple[Row, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full tensor, in engine orientation."""
        first = self.rows[0].engine_shape
        return (sum(row.engine_shape[0] for row in self.rows), *first[1:])

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """True if weight decay applies."""
        return self.rows[0].decay

    def part(self, layout: Layout) -> Part:
        """Return the flat buffer of its unit that holds the tensor: "dense" or "experts"."""
        return self.rows[0].part(layout)

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of a rank's shard, equal on all ranks, vocabulary padding included."""
        shapes = [row.local_shape(layout) for row in self.rows if row.place(layout) in (None, 0)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def local_offset(self, row: Row, layout: Layout) -> int:
        """Return the index along dim 0 at which the shard of the entry `row` begins in this tensor's shard on a rank
        that holds it.
        """
        before = itertools.takewhile(lambda other: other.name != row.name, self.rows)
        place = row.place(layout)
        return sum(other.local_shape(layout)[0] for other in before if other.place(layout) == place)
