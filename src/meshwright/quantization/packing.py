"""Weights quantized in blocks of 64 elements: NF4 (Dettmers et al. 2023, arXiv:2305.14314, section 3) and int8.

A block is stored as one record of bytes: the codes of its elements, then its scale, the largest absolute value, as
float32. Records are independent, so that a buffer may be cut at any block. `double_quantization` has the format whose
scales are quantized too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright.spec.adapter_config import BLOCK, RECORD_BYTES
from meshwright.spec.policy import UNPACKED_AT_ONCE

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@functools.cache
def _build_nf4_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two float32 tensors on `device`: NF4's 16 quantization levels [16] (arXiv:2305.14314, appendix E), and the
    midpoints between neighbouring levels [15], at which rounding changes from one level to the next."""
    values = torch.tensor(_NF4, dtype=torch.float32, device=device)
    return values, (values[:-1] + values[1:]) / 2


@functools.cache
def _build_nf4_pairs(device: torch.device) -> torch.Tensor:
    """Return a lookup table, int64 [256] on `device`, that dequantizes a byte of two NF4 codes at once. The index is
    the byte. The 8 bytes of an entry are two float32 numbers: the level of the code in the byte's high half, then the
    level of the other code. This is twice as fast as one lookup per code."""
    values = _build_nf4_tables(device)[0]
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1).view(torch.int64).flatten()


ReadEntry = Callable[[Any, int, int, None], torch.Tensor]
"""Function (entry, start, stop, None) -> weights [stop - start] of the elements [start, stop) of a parameter entry (one
tensor of a checkpoint), flattened as the model stores it."""


class WeightFormat:
    """Storage format of a flat weight buffer: converts weights to buffer items and back. This base class stores them
    unquantized, one buffer item per weight; in the subclass `QuantizedFormat` the buffer items are bytes.

    Attributes: `dtype`: dtype of the buffer; None: the dtype of the weights. `scales`: tensors that dequantization
    reads in addition to the buffer."""

    dtype: torch.dtype | None = None
    scales: tuple[torch.Tensor, ...] = ()

    def count_items(self, elements: int) -> int:
        """Return the number of buffer items that store `elements` weights: the same number, as this format does not
        quantize."""
        return elements

    def count_elements(self, items: int) -> int:
        """Return the number of weights that `items` buffer items store: the same number, as this format does not
        quantize."""
        return items

    def compute_scales(self, read_slice: ReadEntry, device: torch.device) -> None:
        """Do nothing, as this format has no scales. A format whose scales must be known before the buffer is filled
        overrides this method and sets the attribute `scales`. read_slice: function that reads the weights of a matrix.
        device: device of the scales."""

    def pack(self, values: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Convert weights to buffer items. This format does not quantize: `values` [n] is returned unchanged. start:
        number of weights that precede these in the buffer."""
        return values

    def unpack(self, items: torch.Tensor, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """Convert buffer items to weights of `dtype`. This format does not quantize: `items` [n] is returned unchanged,
        in its own dtype. start: number of weights that precede these in the buffer."""
        return items

    def bind(self, layer: Any, start: int, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor that a parameter of `layer` uses as its data: a view of its buffer items `items` [n] in
        `shape`. (A quantized format returns the bytes, and makes `layer` dequantize them in forward.) start: number of
        weights that precede the parameter in the buffer."""
        return self.view(items, shape)

    def view(self, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a view, with shape `shape`, of the buffer items `items` [n] of one weight tensor. This format has one
        item per weight, so `shape` has n elements."""
        return items.view(shape)


UNPACKED = WeightFormat()


class QuantizedFormat(WeightFormat):
    """Storage format of a flat weight buffer (uint8) that holds weights quantized in blocks of 64. name: "nf4" or
    "int8"; "nf4-double" is the subclass `DoubleQuantized`.
    """

    dtype = torch.uint8

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def record_bytes(self) -> int:
        """Bytes that a block of 64 weights occupies in the buffer: the codes of the weights and the block's scale."""
        return RECORD_BYTES[self.name]

    def count_items(self, elements: int) -> int:
        """Return the size in bytes of `elements` quantized weights, scales included. elements: a multiple of 64."""
        assert elements % BLOCK == 0, elements
        return elements // BLOCK * self.record_bytes

    def count_elements(self, items: int) -> int:
        """Return the number of weights that `items` bytes of the buffer store."""
        return items // self.record_bytes * BLOCK

    def view(self, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return `items`, the quantized bytes of a weight, unchanged: they cannot be viewed in `shape`, the shape of
        the weight.
        """
        return items

    def bind(self, layer: Any, start: int, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Make the linear layer `layer` dequantize its weight in forward; return the weight's quantized bytes `items`,
        the data of its parameter. start: number of weights that precede this parameter in the buffer. shape: ignored.
        """
        layer.packed = QuantizedMatmul(self, layer.packed.shape, start)
        return items

    def pack(self, values: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Quantize weights; return the bytes of their blocks, uint8 [n / 64 x bytes per block]. Codes and scales of NF4
        equal those of bitsandbytes bit for bit. values: weights [n], n a multiple of 64. start: number of weights that
        precede these in the buffer."""
        blocks = values.reshape(-1, BLOCK).float()
        largest = blocks.abs().amax(dim=1)
        scaled = (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp(-1, 1)
        if self.name != "int8":
            code = torch.bucketize(scaled, _build_nf4_tables(values.device)[1], out_int32=True).to(torch.uint8)
            codes = (code[:, ::2] << 4) | code[:, 1::2]
        else:
            codes = (scaled * 127).round().to(torch.int8).view(torch.uint8)
        return torch.cat([codes, self._encode_scales(largest, start // BLOCK)], dim=1).flatten()

    def _encode_scales(self, scales: torch.Tensor, first: int) -> torch.Tensor:
        """Encode the scales of blocks as bytes, the last bytes of each block in the buffer; return uint8 [blocks,
        bytes]. In this class they are the float32 bits of the scales. scales: [blocks]. first: index in the buffer of
        the first of these blocks."""
        return scales[:, None].view(torch.uint8)

    def _decode_scales(self, stored: torch.Tensor, first: int) -> torch.Tensor:
        """Decode the scales of blocks from their bytes in the buffer; return float32 [blocks, 1]. stored: uint8
        [blocks, bytes], the last bytes of each block. first: index in the buffer of the first of these blocks."""
        return stored.contiguous().view(torch.float32)

    def unpack(self, records: torch.Tensor, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
        """Dequantize weights; return [n] in `dtype`, computed in float32 as by bitsandbytes. records: the bytes of
        their blocks (codes, then scale), uint8 [n / 64 x bytes per block]. start: number of weights that precede these
        in the buffer."""
        records, block = records.view(-1, self.record_bytes), start // BLOCK
        at_once = UNPACKED_AT_ONCE.get(records.device.type, len(records))
        if len(records) <= at_once or torch.compiler.is_compiling():
            return self._unpack(records, dtype, block).flatten()
        values = torch.empty(len(records), BLOCK, dtype=dtype, device=records.device)
        for first in range(0, len(records), at_once):
            part = slice(first, first + at_once)
            values[part] = self._unpack(records[part], dtype, block + first)
        return values.flatten()

    def _unpack(self, records: torch.Tensor, dtype: torch.dtype, first: int) -> torch.Tensor:
        """Dequantize all blocks at once; return weights [blocks, 64] in `dtype`. records: the bytes of each block
        (codes, then scale), uint8 [blocks, bytes per block]. first: index of the first of these blocks in the flat
        buffer, by which scales that are quantized themselves are found."""
        width = BLOCK if self.name == "int8" else BLOCK // 2
        codes, largest = records[:, :width], self._decode_scales(records[:, width:], first)
        if self.name != "int8":
            pairs = _build_nf4_pairs(records.device).index_select(0, codes.reshape(-1).int())
            return pairs.view(torch.float32).view(-1, BLOCK).mul_(largest).to(dtype)
        return codes.contiguous().view(torch.int8).float().div_(127).mul_(largest).to(dtype)


class QuantizedMatmul:
    """Callable that computes x Wᵀ for a linear layer with a frozen, quantized weight W [outputs, inputs] (QLoRA); W is
    dequantized in forward and again in backward.

    storage_format: format of the buffer that holds W. shape: shape of W on this rank. start: number of weights that
    precede W in the buffer.
    """

    def __init__(self, storage_format: QuantizedFormat, shape: tuple[int, ...], start: int = 0) -> None:
        self.storage_format, self.shape, self.start = storage_format, shape, start

    def unpack(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the weight; return W [outputs, inputs] in `dtype`. records: quantized bytes of W, flat uint8."""
        return self.storage_format.unpack(records, dtype, self.start).view(self.shape)

    def __call__(self, x: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ [..., outputs] for `x` [..., inputs]. records: the quantized bytes of W, flat uint8."""
        return _QuantizedMatmulFunction.apply(x, records, self)  # type: ignore[no-untyped-call, no-any-return]


class _QuantizedMatmulFunction(torch.autograd.Function):
    """Autograd function of x Wᵀ with a quantized weight W; the gradient of x is computed, W gets no gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, records: torch.Tensor, product: QuantizedMatmul) -> torch.Tensor:
        """Return x Wᵀ [..., outputs] for `x` [..., inputs]. records: the quantized bytes of W, flat uint8. product:
        storage format and shape of W."""
        context.save_for_backward(records)
        context.product = product
        return torch.nn.functional.linear(x, product.unpack(records, x.dtype))

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return (dy W, None, None): the gradient of x; the other inputs of `forward` get no gradient. dy: output
        gradient [..., outputs]."""
        (records,) = context.saved_tensors
        return dy @ context.product.unpack(records, dy.dtype), None, None
