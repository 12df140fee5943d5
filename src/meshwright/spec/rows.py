"""What a row of the parameter table says: a tensor on disk, how axes cut it, what its gradient is a sum of.

*Axis* is an axis of the mesh, *dim* a dimension of a tensor.
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
    """Elements of a flat buffer that holds `numel` and is cut into `shards` equal, aligned parts."""
    step = ALIGNMENT * shards
    return -(-numel // step) * step


def kept_buffers(sizes: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """Number of unsharded gradient buffers by size (elements) that are kept from unit to unit (ZeRO-2 and 3), given the
    sizes of each unit's buffers in order: where neighbours have the same (layers), those of the unit that the backward
    pass is in and one for each reduction in flight."""
    kept: dict[int, int] = {}
    for unit, run in itertools.groupby(sizes):
        length = len(list(run))
        for size in set(unit) if length > 1 else ():
            several = unit.count(size) * min(length, 1 + REDUCTIONS_IN_FLIGHT // len(unit))
            kept[size] = max(kept.get(size, 0), several)
    return kept


@dataclass(frozen=True, slots=True)
class Initial:
    """How a tensor begins: normal with mean 0 and this standard deviation, or all ones, or all zeros."""

    kind: Literal["normal", "ones", "zeros"]
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a row that a rank holds: where it begins in the row (engine orientation), its shape, and where it
    begins in the rank's part of the engine tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    local_start: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box in the row, in engine orientation."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        """The box in the rank's part of the engine tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.local_start, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor as it lies on disk.

    ``transposed``: the disk holds the transpose of the engine's orientation (GPT-2's Conv1D); everything below is in
    the engine's orientation, [output, input] for matrices. The row begins at row ``offset`` of the engine tensor.

    ``split``: axis -> dim along which the axis cuts the tensor: tp:0 column parallel and vocabulary, tp:1 row parallel,
    none replicated. ``expert``: which expert of how many it belongs to; under expert parallelism ep says who holds it
    at all, and etp cuts it in the place of tp. ``blocks``: sizes along that dim that are cut one by one (query,
    key and value fused on disk). ``granularity``: a cut falls on multiples of it (a head). ``remainder``: what happens
    when there are fewer pieces than ranks or pieces do not divide: ``refuse``; ``replicate``, neighbouring ranks share
    a piece (key-value heads); ``pad``, the last ranks' parts are filled up (vocabulary).

    ``partial``: why ranks of tp that hold the same values each have only a part of their gradient: ``sequence``, they
    see different tokens when activations are split along the sequence; ``heads``, they serve different heads or columns
    of experts, always.

    ``active``: the part of all tokens that compute with it, below 1 for one of several experts. ``balances``: a bias on
    a router's scores. Its gradient is its expert's load above the mean and no derivative of the loss: it counts in no
    norm, and the optimizer follows its sign.

    ``kept``: the dtype, such as "int64", of a value that is not trained and stays as it is, on disk too: a buffer or a
    frozen parameter of a foreign module. Checkpoints have such rows, flat buffers have not.
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
        """Shape in the engine's orientation; of a single number, which has no dim to cut along, (1,)."""
        return (self.shape[::-1] if self.transposed else self.shape) or (1,)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self, layout: Layout) -> Part:
        """In which of its unit's flat buffers the row lies."""
        return "experts" if self.expert is not None and layout.expert_parallel else "dense"

    def place(self, layout: Layout) -> int | None:
        """The place on ep of the ranks that hold this expert; None where every rank holds its part of the row."""
        if self.expert is None or layout.ep == 1:
            return None
        number, experts = self.expert
        return number // (experts // layout.ep)

    def cut_by(self, layout: Layout) -> Mapping[str, int]:
        """``split`` with the axis that this layout cuts along."""
        axis = "etp" if self.part(layout) == "experts" else "tp"
        return {axis: self.split["tp"]} if "tp" in self.split else {}

    def replicas(self, layout: Layout) -> int:
        """How many ranks of tp hold the same values: neighbours, each group of so many consecutive ranks.

        1 when every rank of tp has its own part. A sum of squares over tp counts each element so many times. 1 for
        experts under expert parallelism: who else holds them, ``layout.groups("expert_data")`` says alone.
        """
        if self.part(layout) == "experts":
            return 1
        if "tp" not in self.split:
            return layout.tp
        pieces = self.engine_shape[self.split["tp"]] // self.granularity
        return layout.tp // pieces if self.remainder == "replicate" and pieces < layout.tp else 1

    def gradient_axes(self, layout: Layout) -> tuple[str, ...]:
        """Axes over which this tensor's gradient is a sum of the ranks' parts.

        * ``data`` (dp x cp), always: ranks see different samples and different pieces of a sequence; in its place
          ``expert_data`` for experts under expert parallelism: each block of ep x etp ranks saw other tokens.
        * ``tp``: over each group of ``replicas(layout)`` consecutive ranks of tp, which hold the same values.

        Which ranks of pp hold the whole unit, and so sum its gradient too, `partition.Partition.holders` says.
        """
        axes = ["data" if self.part(layout) == "dense" else "expert_data"]
        if self.replicas(layout) > 1 and (
            self.partial == "heads" or (self.partial == "sequence" and layout.tensor_sequence_parallel)
        ):
            axes.append("tp")
        return tuple(axes)

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Shape of a rank's part, equal on all ranks that hold one, vocabulary padding included."""
        shape = list(self.engine_shape)
        for axis, dim in self.cut_by(layout).items():
            parts = getattr(layout, axis)
            shape[dim] = sum(self._share(block, parts) for block in self.blocks)
        return tuple(shape)

    def _share(self, block: int, parts: int) -> int:
        """Elements of a block that each of ``parts`` ranks holds."""
        pieces = block // self.granularity
        if pieces % parts == 0:
            return pieces // parts * self.granularity
        if self.remainder == "pad":
            return -(-pieces // parts) * self.granularity
        assert self.remainder == "replicate" and parts % pieces == 0, f"{self.name}: {pieces} pieces on {parts} ranks"
        return self.granularity

    def intervals(self, layout: Layout, coordinates: Mapping[str, int], dim: int) -> list[tuple[int, int, int]]:
        """What a rank holds along ``dim``: (begin in the row, size, begin in the rank's part)."""
        if self.place(layout) not in (None, coordinates.get("ep")):
            return []
        axis = next((axis for axis, at in self.cut_by(layout).items() if at == dim), None)
        if axis is None:
            return [(0, self.engine_shape[dim], 0)]
        parts, position = getattr(layout, axis), coordinates[axis]
        found, begin, local = [], 0, 0
        for block in self.blocks:
            share = self._share(block, parts)
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
    """One tensor of the engine: its rows, one after the other along dim 0."""

    name: str
    unit: str
    rows: tuple[Row, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.rows[0].engine_shape
        return (sum(row.engine_shape[0] for row in self.rows), *first[1:])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """Whether weight decay applies."""
        return self.rows[0].decay

    def part(self, layout: Layout) -> Part:
        """In which of its unit's flat buffers the tensor lies."""
        return self.rows[0].part(layout)

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """Shape on a rank, equal on all ranks, vocabulary padding included."""
        shapes = [row.local_shape(layout) for row in self.rows if row.place(layout) in (None, 0)]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def local_offset(self, row: Row, layout: Layout) -> int:
        """First index along dim 0 of a row's part in the part of this tensor of a rank that holds it."""
        before = itertools.takewhile(lambda other: other.name != row.name, self.rows)
        place = row.place(layout)
        return sum(other.local_shape(layout)[0] for other in before if other.place(layout) == place)
