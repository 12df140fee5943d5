"""Weights quantized in blocks of 64 elements: NF4 (Dettmers et al. 2023, arXiv:2305.14314, section 3) and int8.

A block is stored as one record of bytes: the codes of its elements, then its scale, the largest absolute value, as
float32. Records are independent, so that a buffer may be cut at any block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
    """Return a lookup table, int64 [256] on `device`, that dequantizes two NF4 codes at a time. The index is a byte of
    two codes; the entry's 8 bytes are their two float32 levels, that of the high half first. This is twice as fast as
    one lookup per code."""
    values = _build_nf4_tables(device)[0]
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1).view(torch.int64).flatten()


class UnquantizedFormat:
    """Storage format of a flat weight buffer whose items are the weights themselves, one item per weight. Base class of
    `QuantizedFormat`, whose items are bytes. dtype: dtype of the buffer; None: the dtype of the weights."""

    dtype: torch.dtype | None = None

    def count(self, elements: int) -> int:
        """Return the number of buffer items that store `elements` weights: here the same number."""
        return elements

    def count_elements(self, items: int) -> int:
        """Return the number of weights that `items` buffer items store: here the same number."""
        return items

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Convert weights `values` [n] to buffer items [n]. Here they are the same, and `values` itself is returned."""
        return values

    def unpack(self, items: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert buffer items [n] to weights [n]. Here they are the same, and `items` itself is returned. dtype:
        ignored; a quantized format dequantizes to it."""
        return items

    def view(self, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return buffer items [n] as a view of shape `shape`, which has n elements."""
        return items.view(shape)


UNPACKED = UnquantizedFormat()


def get_weight_format(name: str | None) -> UnquantizedFormat:
    """Return the storage format of a flat weight buffer. name: quantization of the weights, "nf4" or "int8"; None: not
    quantized."""
    return UNPACKED if name is None else QuantizedFormat(name)


@dataclass(frozen=True)
class QuantizedFormat(UnquantizedFormat):
    """Storage format of weights that are quantized in blocks of 64 elements. The buffer items are bytes (uint8); a
    block is one record, its codes followed by its float32 scale. name: "nf4" or "int8"."""

    name: str
    dtype: ClassVar[torch.dtype] = torch.uint8  # type: ignore[misc]

    @property
    def record_bytes(self) -> int:
        """Size in bytes of a record: the codes and the scale of a block of 64 elements."""
        return RECORD_BYTES[self.name]

    def count(self, elements: int) -> int:
        """Return the size in bytes of `elements` quantized weights with their scales. `elements` must be a multiple of
        64."""
        assert elements % BLOCK == 0, elements
        return elements // BLOCK * self.record_bytes

    def count_elements(self, items: int) -> int:
        """Return the number of weights that `items` bytes of the buffer store."""
        return items // self.record_bytes * BLOCK

    def view(self, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return `items`, the quantized bytes of a weight, unchanged, since they cannot be viewed as a weight of shape
        `shape`."""
        return items

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Quantize the weights `values` [n], n a multiple of 64; return one record (codes and scale) per 64 weights, as
        flat uint8 [n / 64 x record bytes]. NF4 codes and scales equal those of bitsandbytes bit for bit."""
        blocks = values.reshape(-1, BLOCK).float()
        largest = blocks.abs().amax(dim=1)
        scaled = (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp(-1, 1)
        if self.name == "nf4":
            code = torch.bucketize(scaled, _build_nf4_tables(values.device)[1], out_int32=True).to(torch.uint8)
            codes = (code[:, ::2] << 4) | code[:, 1::2]
        else:
            codes = (scaled * 127).round().to(torch.int8).view(torch.uint8)
        return torch.cat([codes, largest[:, None].view(torch.uint8)], dim=1).flatten()

    def unpack(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize `records` (as `pack` returns them) to weights [n] in `dtype`; the arithmetic is in float32, as in
        bitsandbytes."""
        records = records.view(-1, self.record_bytes)
        at_once = UNPACKED_AT_ONCE.get(records.device.type, len(records))
        if len(records) <= at_once or torch.compiler.is_compiling():
            return self._unpack(records, dtype).flatten()
        values = torch.empty(len(records), BLOCK, dtype=dtype, device=records.device)
        for start in range(0, len(records), at_once):
            part = slice(start, start + at_once)
            values[part] = self._unpack(records[part], dtype)
        return values.flatten()

    def _unpack(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize `records` [blocks, record bytes], uint8; return the weights [blocks, 64] in `dtype`."""
        codes, largest = records[:, :-4], records[:, -4:].contiguous().view(torch.float32)
        if self.name == "nf4":
            pairs = _build_nf4_pairs(records.device).index_select(0, codes.reshape(-1).int())
            return pairs.view(torch.float32).view(-1, BLOCK).mul_(largest).to(dtype)
        return codes.contiguous().view(torch.int8).float().div_(127).mul_(largest).to(dtype)

    def round_trip(self, values: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize `values` [...], whose number of elements is a multiple of 64; return the result in
        float64, same shape. The difference from `values` is the rounding error of the format."""
        return self.unpack(self.pack(values.reshape(-1)), torch.float32).double().view(values.shape)


class QuantizedMatmul:
    """Product x Wᵀ of a linear layer whose frozen weight W [outputs, inputs] is quantized (QLoRA). W is dequantized for
    the forward pass and again in backward.

    packing: storage format of W. outputs, inputs: shape of W on this rank.
    """

    def __init__(self, packing: QuantizedFormat, outputs: int, inputs: int) -> None:
        self.packing, self.shape = packing, (outputs, inputs)

    def unpack(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the weight from `records`, its quantized bytes (flat uint8); return W [outputs, inputs] in
        `dtype`."""
        return self.packing.unpack(records, dtype).view(self.shape)

    def __call__(self, x: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ [..., outputs] for `x` [..., inputs]. records: the quantized bytes of W, flat uint8."""
        return _QuantizedMatmulFunction.apply(x, records, self)  # type: ignore[no-untyped-call, no-any-return]


class _QuantizedMatmulFunction(torch.autograd.Function):
    """Autograd function of x Wᵀ with a quantized weight W; the gradient of x is computed, W gets none."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, records: torch.Tensor, product: QuantizedMatmul) -> torch.Tensor:
        """Return x Wᵀ [..., outputs] for `x` [..., inputs]. records: the quantized bytes of W, flat uint8. product:
        storage format and shape of W."""
        context.save_for_backward(records)
        context.product = product
        return torch.nn.functional.linear(x, product.unpack(records, x.dtype))

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return (dy W, None, None): the gradient of x, and none for the other inputs. dy: output gradient [...,
        outputs]."""
        (records,) = context.saved_tensors
        return dy @ context.product.unpack(records, dy.dtype), None, None
