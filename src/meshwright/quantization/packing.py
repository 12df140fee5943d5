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
def _nf4_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return NF4's 16 quantization levels (arXiv:2305.14314, appendix E), [16], and the midpoints between them, by
    which values are rounded, [15]; float32, on `device`."""
    values = torch.tensor(_NF4, dtype=torch.float32, device=device)
    return values, (values[:-1] + values[1:]) / 2


@functools.cache
def _nf4_pairs(device: torch.device) -> torch.Tensor:
    """Return a table [256] that maps a byte of two NF4 codes to the two float32 levels, that of the high code first,
    stored as one int64. Looking up pairs is twice as fast as looking up codes."""
    values = _nf4_tables(device)[0]
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1).view(torch.int64).flatten()


class Unpacked:
    """Storage format of a flat weight buffer that holds the weights themselves, not quantized: one buffer item for each
    weight. Base class of `Packing`, whose items are bytes. Attribute `dtype`: dtype of the buffer; None: that of the
    weights."""

    dtype: torch.dtype | None = None

    def count(self, elements: int) -> int:
        """Return the number of items of the buffer that store `elements` weights: `elements`, one for each weight."""
        return elements

    def count_elements(self, items: int) -> int:
        """Return the number of weights that `items` items of the buffer store: `items`, one weight in each."""
        return items

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Convert weights `values` [n] to buffer items: `values` itself."""
        return values

    def unpack(self, items: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert buffer items [n] to weights [n]: `items` itself. `dtype`: ignored here; dtype to which `Packing`
        dequantizes."""
        return items

    def view(self, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the weight of shape `shape` as a view of its buffer items [n], n the number of its elements."""
        return items.view(shape)


UNPACKED = Unpacked()


def packing_of(name: str | None) -> Unpacked:
    """Return the storage format of a weight buffer by its name: "nf4" or "int8"; None: not quantized."""
    return UNPACKED if name is None else Packing(name)


@dataclass(frozen=True)
class Packing(Unpacked):
    """Storage format of weights quantized in blocks of 64 elements; the buffer items are bytes (uint8). name: "nf4" or
    "int8"."""

    name: str
    dtype: ClassVar[torch.dtype] = torch.uint8  # type: ignore[misc]

    @property
    def record_bytes(self) -> int:
        """Number of bytes of a record: the codes and the scale of a block of 64 elements."""
        return RECORD_BYTES[self.name]

    def count(self, elements: int) -> int:
        """Return the size in bytes of `elements` quantized weights with their scales; `elements` must be a multiple of
        64."""
        assert elements % BLOCK == 0, elements
        return elements // BLOCK * self.record_bytes

    def count_elements(self, items: int) -> int:
        """Return the number of weights that `items` bytes of the buffer store."""
        return items // self.record_bytes * BLOCK

    def view(self, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return `items`, the bytes of a weight's records, unchanged: quantized bytes have no view in the weight's
        shape `shape`."""
        return items

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Quantize weights `values` [n], n a multiple of 64; return their records, uint8 [n / 64 x record bytes]. The
        codes and scales of NF4 are those of bitsandbytes, bit for bit."""
        blocks = values.reshape(-1, BLOCK).float()
        largest = blocks.abs().amax(dim=1)
        scaled = (blocks * (1.0 / largest.clamp(min=1e-38))[:, None]).clamp(-1, 1)
        if self.name == "nf4":
            code = torch.bucketize(scaled, _nf4_tables(values.device)[1], out_int32=True).to(torch.uint8)
            codes = (code[:, ::2] << 4) | code[:, 1::2]
        else:
            codes = (scaled * 127).round().to(torch.int8).view(torch.uint8)
        return torch.cat([codes, largest[:, None].view(torch.uint8)], dim=1).flatten()

    def unpack(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize `records`, uint8 [n / 64 x record bytes], to weights [n] in `dtype`, computed in float32 as by
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
            pairs = _nf4_pairs(records.device).index_select(0, codes.reshape(-1).int())
            return pairs.view(torch.float32).view(-1, BLOCK).mul_(largest).to(dtype)
        return codes.contiguous().view(torch.int8).float().div_(127).mul_(largest).to(dtype)

    def round_trip(self, values: torch.Tensor) -> torch.Tensor:
        """Quantize `values`, of any shape with a multiple of 64 elements, and dequantize them; return the result in
        float64, same shape. Shows the rounding error of the format."""
        return self.unpack(self.pack(values.reshape(-1)), torch.float32).double().view(values.shape)


class PackedProduct:
    """Function that computes the product x Wᵀ of a linear layer whose frozen weight W [outputs, inputs] is quantized
    (QLoRA); W is dequantized for the product, and again in backward. `packing`: storage format of W; `outputs`,
    `inputs`: shape of W on this rank."""

    def __init__(self, packing: Packing, outputs: int, inputs: int) -> None:
        self.packing, self.shape = packing, (outputs, inputs)

    def unpack(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the weight from its `records`, flat uint8; return W [outputs, inputs] in `dtype`."""
        return self.packing.unpack(records, dtype).view(self.shape)

    def __call__(self, x: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ [..., outputs] for `x` [..., inputs]. `records`: the quantized weight, flat uint8."""
        return _Product.apply(x, records, self)  # type: ignore[no-untyped-call, no-any-return]


class _Product(torch.autograd.Function):
    """Autograd function of the product x Wᵀ with a quantized weight W; x gets a gradient, W none."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, records: torch.Tensor, product: PackedProduct) -> torch.Tensor:
        """Return x Wᵀ [..., outputs] for `x` [..., inputs], with W dequantized from `records` (uint8). `product`:
        format and shape of W."""
        context.save_for_backward(records)
        context.product = product
        return torch.nn.functional.linear(x, product.unpack(records, x.dtype))

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return dy W, the gradient of x; None for the other inputs. `dy`: output gradient [..., outputs]."""
        (records,) = context.saved_tensors
        return dy @ context.product.unpack(records, dy.dtype), None, None
