"""NF4 weights whose scales are quantized too: double quantization (Dettmers et al. 2023, arXiv:2305.14314, section 3).

The scales of all blocks of a matrix, minus their mean, are quantized to 8 bits in groups of 256 blocks. A record holds
the codes of its block and that of its scale; the mean, and the largest absolute value of each group, are float32
numbers outside the records. They are those of the whole matrix as the checkpoint stores it, so that a rank that has any
blocks of it dequantizes what one device does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from meshwright.quantization.packing import QuantizedFormat, ReadEntry
from meshwright.spec.adapter_config import BLOCK, GROUP, count_groups

NAME = "nf4-double"


@functools.cache
def _build_scale_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 256 quantization levels of bitsandbytes' dynamic 8-bit format [256] and the midpoints between
    neighbouring levels [255], float32 on `device`. A code consists of a sign bit, a decimal exponent in unary, and a
    fraction in the remaining bits (Dettmers 2015, arXiv:1511.04561)."""
    levels = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        positive = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        levels += [*positive.tolist(), *(-positive).tolist()]
    table = torch.tensor(sorted(levels), dtype=torch.float32, device=device)
    return table, (table[:-1] + table[1:]) / 2


class Matrix(Protocol):
    """Interface of a matrix of a checkpoint: its name, number of elements, and shape [output, input]."""

    @property
    def name(self) -> str:
        """Name of the matrix in the checkpoint."""

    @property
    def numel(self) -> int:
        """Number of elements of the whole matrix."""

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Shape of the whole matrix in memory, [output, input]."""


class ColumnRange(Protocol):
    """Interface of a range [start, stop) of columns of a matrix, such as the range that tensor parallelism gives to a
    rank.
    """

    @property
    def start(self) -> int:
        """Index of the first column."""

    @property
    def stop(self) -> int:
        """Index after the last column."""

    @property
    def total(self) -> int:
        """Number of columns of the whole matrix."""


class BufferSlice(Protocol):
    """Interface of a slice of a flat buffer that holds consecutive elements of one matrix, row by row."""

    @property
    def entry(self) -> Matrix:
        """Matrix of which the slice holds elements."""

    @property
    def offset(self) -> int:
        """Index in the buffer of the slice's first element."""

    @property
    def numel(self) -> int:
        """Number of elements in the slice."""

    @property
    def begin(self) -> int:
        """Index of the slice's first element in the flattened matrix, or in the flattened `columns` if the slice is
        limited to these."""

    @property
    def columns(self) -> ColumnRange | None:
        """Columns of the matrix to which the slice is limited; None: all columns."""


class _Region(NamedTuple):
    """Range [first, stop) of the 64-weight blocks of a buffer that hold one matrix, or some columns of one matrix.

    begin: index of block `first` among the blocks of the matrix or, if the buffer holds some columns, among the blocks
    of these columns. columns: in each row of the matrix (first block that the buffer holds, number of blocks that it
    holds, number of all blocks). base: index in `DoubleQuantized.scales` of the mean of the matrix's block scales; the
    scales of the matrix's groups of 256 blocks follow."""

    first: int
    stop: int
    begin: int
    columns: tuple[int, int, int]
    base: int

    def compute_group_indices(self, first: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return one index per buffer block in [first, stop), int32 [stop - first] on `device`. The index is the
        position in `DoubleQuantized.scales` of the scale of the block's group (256 consecutive blocks of a matrix)."""
        shift, (start, width, total) = self.begin - self.first, self.columns
        blocks = torch.arange(first + shift, stop + shift, dtype=torch.int32, device=device)
        if width != total:
            blocks = blocks // width * total + start + blocks % width
        return blocks // GROUP + (self.base + 1)


class DoubleQuantized(QuantizedFormat):
    """Storage format of a flat buffer of NF4 weights with double quantization (QLoRA): each block of 64 weights has a
    scale, and these block scales are quantized to 8 bits too.

    slices: slices of matrices that the buffer holds; all other blocks are padding and dequantize to 0. Attribute
    `scales`: a tuple of one float32 tensor. For each matrix it has the mean of the block scales, then for each group of
    256 blocks the largest absolute difference from this mean."""

    def __init__(self, slices: Sequence[BufferSlice]) -> None:
        super().__init__(NAME)
        bases, size = dict[str, int](), 0
        self._regions, self._entries = list[_Region](), dict[str, Matrix]()
        for each in slices:
            entry, first = each.entry, each.offset // BLOCK
            if entry.name not in bases:
                bases[entry.name], size = size, size + 1 + count_groups(entry.numel)
                self._entries[entry.name] = entry
            row = entry.model_shape[-1] // BLOCK
            columns = (0, row, row)
            if each.columns is not None:
                columns = (each.columns.start // BLOCK, (each.columns.stop - each.columns.start) // BLOCK, row)
            stop = first + each.numel // BLOCK
            self._regions.append(_Region(first, stop, each.begin // BLOCK, columns, bases[entry.name]))
        self._regions.sort()
        self.scales = (torch.zeros(size, dtype=torch.float32),)
        self._incomplete = torch.zeros(size, dtype=torch.bool)
        for name, entry in self._entries.items():
            self._incomplete[bases[name] + count_groups(entry.numel)] = entry.numel % (BLOCK * GROUP) != 0

    def compute_scales(self, read_slice: ReadEntry, device: torch.device) -> None:
        """Compute the second-level scales (the mean of the block scales, and the scale of each group of blocks) of all
        matrices, and store them on `device` in the attribute `scales`. They are computed from whole matrices, so that
        they are equal under every parallel layout. read_slice: function that reads the values of a matrix."""
        parts = [
            compute_scale_statistics(read_slice(entry, 0, entry.numel, None)).cpu() for entry in self._entries.values()
        ]
        self.scales = (torch.cat(parts).to(device),)

    def _find_overlaps(self, first: int, stop: int) -> Iterator[tuple[_Region, int, int]]:
        """Yield (region, low, high) for each region that overlaps the buffer blocks [first, stop), in ascending order.
        A region is a range of consecutive blocks of one matrix; [low, high) are its blocks inside [first, stop)."""
        for region in self._regions:
            low, high = max(first, region.first), min(stop, region.stop)
            if low < high:
                yield region, low, high

    def _encode_scales(self, scales: torch.Tensor, first: int) -> torch.Tensor:
        """Quantize the block scales `scales` [blocks] to 8 bits; return the codes, uint8 [blocks, 1]. The codes equal
        the codes of bitsandbytes' PyTorch implementation bit for bit. first: index in the buffer of the first of these
        blocks."""
        known, incomplete = self.scales[0].to(scales.device), self._incomplete.to(scales.device)
        bounds = _build_scale_tables(scales.device)[1]
        codes = torch.zeros(len(scales), dtype=torch.uint8, device=scales.device)
        for region, low, high in self._find_overlaps(first, first + len(scales)):
            part, groups = slice(low - first, high - first), region.compute_group_indices(low, high, scales.device)
            centred, largest = scales[part] - known[region.base], known[groups].clamp(min=1e-38)
            # bitsandbytes divides in an incomplete group, and multiplies by the reciprocal in others.
            scaled = torch.where(incomplete[groups], centred / largest, centred * (1.0 / largest)).clamp(-1, 1)
            codes[part] = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8)
        return codes[:, None]

    def _decode_scales(self, stored: torch.Tensor, first: int) -> torch.Tensor:
        """Dequantize block scales from their 8-bit codes; return float32 [blocks, 1]. stored: codes, uint8 [blocks, 1].
        first: index in the buffer of the first of these blocks."""
        known, end = self.scales[0], first
        scales = _build_scale_tables(stored.device)[0].index_select(0, stored.flatten().int())
        for region, low, high in self._find_overlaps(first, first + len(stored)):
            if low > end:
                scales[end - first : low - first] = 0.0
            part, end = scales[low - first : high - first], high
            part.mul_(known.index_select(0, region.compute_group_indices(low, high, stored.device))).add_(
                known[region.base]
            )
        scales[end - first :] = 0.0
        return scales[:, None]


def compute_scale_statistics(values: torch.Tensor) -> torch.Tensor:
    """Return the second-level scales of a matrix for double quantization, float32 [1 + groups]. The first number is the
    mean of the matrix's block scales. The other numbers are the largest absolute difference from this mean in each
    group of 256 blocks. values: the matrix, flattened."""
    largest = torch.linalg.vector_norm(values.reshape(-1, BLOCK), torch.inf, dim=1).float()
    mean = largest.mean()
    centred = torch.nn.functional.pad((largest - mean).abs(), (0, -len(largest) % GROUP))
    return torch.cat([mean[None], centred.view(-1, GROUP).amax(dim=1)])
