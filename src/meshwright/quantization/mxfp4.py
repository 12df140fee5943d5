"""Float4 weights with a scale for each block of 32 elements (OCP Microscaling Formats 1.0, section 5; gpt-oss)."""

from __future__ import annotations

import torch

BLOCK_BYTES = 16
"""Bytes of a block: 32 elements of 4 bits."""
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes without sign


def unpacked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape [..., input, output] of the dequantized weights whose packed blocks have the shape `shape`,
    [..., output, blocks, 16]: 32 elements in the 16 bytes of a block."""
    *outer, outputs, blocks, size = shape
    return *outer, 2 * size * blocks, outputs


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return MXFP4 weights [..., input, output] in float32, a transposed view: the value of each 4-bit code times the
    power of two of its block. blocks: uint8 [..., output, blocks, 16], two codes in a byte, the low half first. scales:
    uint8 [..., output, blocks], the exponent of each block plus 127."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    pairs = torch.cartesian_prod(values, values).flip(-1)  # of each byte: the low half, then the high one
    unpacked = pairs[blocks.int()].flatten(-2)
    return torch.ldexp(unpacked, scales.int()[..., None] - 127).flatten(-2).mT
