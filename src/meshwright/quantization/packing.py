"""Weights packed in blocks of 64 elements: NF4 (Dettmers et al. 2023, arXiv:2305.14314, section 3) and int8.

A block is stored as one record: its codes, then its largest absolute value as float32. Records are independent, so that
a buffer may be cut at any block.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from meshwright.spec.adapter_config import BLOCK, RECORD_BYTES

_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@functools.cache
def _nf4_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return NF4's 16 values (arXiv:2305.14314, appendix E) and the 15 midpoints between them, float32."""
    values = torch.tensor(_NF4, dtype=torch.float32, device=device)
    return values, (values[:-1] + values[1:]) / 2


class Unpacked:
    """Format of a buffer of elements that are not packed. Attribute `dtype`: dtype of the buffer; None: that of the
    elements."""

    dtype: torch.dtype | None = None

    def count(self, elements: int) -> int:
        """Return the number of items of the buffer that hold `elements` elements."""
        return elements

    def count_elements(self, items: int) -> int:
        """Return the number of elements in `items` items of the buffer."""
        return items

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return the items of flat `values`."""
        return values

    def unpack(self, items: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of flat `items`; `dtype` is that of packed ones."""
        return items

    def view(self, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a parameter of the given shape as a view of its flat `items`; a packed one stays flat."""
        return items.view(shape)


UNPACKED = Unpacked()


def packing_of(name: str | None) -> Unpacked:
    """Return the format of a buffer: "nf4", "int8", or None for elements that are not packed."""
    return UNPACKED if name is None else Packing(name)


@dataclass(frozen=True)
class Packing(Unpacked):
    """Format of packed weights, whose items are bytes. name: "nf4" or "int8"."""

    name: str
    dtype: ClassVar[torch.dtype] = torch.uint8  # type: ignore[misc]

    @property
    def record_bytes(self) -> int:
        """Number of bytes of a block of 64 elements."""
        return RECORD_BYTES[self.name]

    def count(self, elements: int) -> int:
        """Return the number of bytes of `elements` elements, a multiple of 64."""
        assert elements % BLOCK == 0, elements
        return elements // BLOCK * self.record_bytes

    def count_elements(self, items: int) -> int:
        """Return the number of elements in `items` bytes."""
        return items // self.record_bytes * BLOCK

    def view(self, items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the flat records, which stand for a parameter of the given shape."""
        return items

    def pack(self, values: torch.Tensor) -> torch.Tensor:
        """Return the records of flat `values` [n], n a multiple of 64: uint8 [n / 64 x record bytes]. The codes and
        scales of NF4 are those of bitsandbytes, bit for bit."""
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
        """Return the values of flat `records` (uint8), in `dtype`: [n]. They are computed in float32, as by
        bitsandbytes."""
        records = records.view(-1, self.record_bytes)
        codes, largest = records[:, :-4], records[:, -4:].contiguous().view(torch.float32)
        if self.name == "nf4":
            pairs = torch.stack([codes >> 4, codes & 15], dim=2).flatten(1)
            values = _nf4_tables(records.device)[0][pairs.int()]
        else:
            values = codes.contiguous().view(torch.int8).float() / 127
        return (values * largest).to(dtype).flatten()

    def round_trip(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values`, of any shape with a multiple of 64 elements, packed and unpacked, in float64."""
        return self.unpack(self.pack(values.reshape(-1)), torch.float32).double().view(values.shape)


class PackedProduct:
    """Product x Wᵀ of a linear layer whose weight W [outputs, inputs] is packed; W is unpacked for the product, and
    again in backward. `packing`: its format; `outputs`, `inputs`: shape of W on this rank."""

    def __init__(self, packing: Packing, outputs: int, inputs: int) -> None:
        self.packing, self.shape = packing, (outputs, inputs)

    def unpack(self, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return W [outputs, inputs] in `dtype`, from its `records`."""
        return self.packing.unpack(records, dtype).view(self.shape)

    def __call__(self, x: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
        """Return x Wᵀ [..., outputs] for `x` [..., inputs] and the packed weight `records`."""
        return _Product.apply(x, records, self)  # type: ignore[no-untyped-call, no-any-return]


class _Product(torch.autograd.Function):
    """Autograd function of `PackedProduct`: the packed weight gets no gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, records: torch.Tensor, product: PackedProduct) -> torch.Tensor:
        """Return x Wᵀ."""
        context.save_for_backward(records)
        context.product = product
        return torch.nn.functional.linear(x, product.unpack(records, x.dtype))

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient of x, dy W."""
        (records,) = context.saved_tensors
        return dy @ context.product.unpack(records, dy.dtype), None, None
