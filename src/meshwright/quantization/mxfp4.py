"""Float4 weights with a scale for each block of 32 elements (OCP Microscaling Formats 1.0, section 5; gpt-oss)."""

from __future__ import annotations

import torch

BLOCK_BYTES = 16
"""Bytes of a block: 32 elements of 4 bits."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes without sign


def compute_dequantized_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape [..., input, output] of a dequantized MXFP4 weight. shape: shape [..., output, blocks, 16] of
    its packed blocks, where the 16 bytes of a block hold 32 elements."""
    *outer, outputs, blocks, size = shape
    return *outer, 2 * size * blocks, outputs


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize MXFP4 weights; return float32 [..., input, output], a transposed view. An element is the value of its
    4-bit code times the scale of its block (32 elements), a power of two.

    blocks: codes, uint8 [..., output, blocks, 16], two per byte, the low half first. scales: uint8 [..., output,
    blocks], the exponent of each scale plus 127."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    pairs = torch.cartesian_prod(values, values).flip(-1)  # of each byte: the low half, then the high one
    unpacked = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(unpacked, scales.int()[..., None] - 127).flatten(-2).mT
