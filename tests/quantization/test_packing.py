"""Packed weights: NF4 codes, scales and values are those of bitsandbytes 0.50.2, bit for bit (SHA-256 of its results on
the same weights); int8 rounds to the nearest of 255 values."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from meshwright.quantization.formats import round_trip
from meshwright.quantization.packing import QuantizedFormat, QuantizedMatmul

# bitsandbytes.functional.quantize_4bit(weights, blocksize=64, quant_type="nf4"): codes, absmax, dequantized values.
EXPECTED = {
    torch.float32: ("fabf26277a4bae90", "2277f7795426a0ae", "6c27b15cdc16b7d7"),
    torch.bfloat16: ("47b961db97d34553", "6453ef8a80ec09dd", "c3458618e10ae862"),
}


def weights() -> torch.Tensor:
    """Return normal values [96, 128], with a block of zeros."""
    values = torch.from_numpy(np.random.default_rng(7).standard_normal((96, 128)).astype(np.float32))
    values[3, :64] = 0
    return values


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("dtype", EXPECTED)
def test_nf4_is_that_of_bitsandbytes(dtype: torch.dtype):
    packing = QuantizedFormat("nf4")
    records = packing.pack(weights().to(dtype).flatten()).view(-1, 36)
    scales = records[:, 32:].contiguous().view(torch.float32)
    values = packing.unpack(records, dtype).float()
    assert (digest(records[:, :32]), digest(scales), digest(values)) == EXPECTED[dtype]


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_records_are_independent_of_where_the_weights_are_cut(name: str):
    packing, whole = QuantizedFormat(name), weights()
    records = packing.pack(whole.flatten()).view(96, 2, -1)
    assert torch.equal(packing.pack(whole[:, 64:].flatten()).view(96, -1), records[:, 1])
    assert torch.equal(packing.pack(whole[5:9].flatten()).view(4, 2, -1), records[5:9])


def test_int8_is_off_by_at_most_half_a_step():
    whole = weights()
    error = (round_trip("int8", whole) - whole.double()).view(-1, 64).abs().amax(dim=1)
    steps = whole.view(-1, 64).abs().amax(dim=1) / 127
    assert bool((error <= 0.5001 * steps).all()) and float(error.max()) > 0


def test_packed_product_has_the_gradient_of_the_unpacked_weight():
    packing, whole = QuantizedFormat("nf4"), weights()
    product, records = QuantizedMatmul(packing, (96, 128)), packing.pack(whole.flatten())
    x = torch.randn(3, 5, 128, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(3, 5, 96, dtype=torch.float64)
    y = product(x, records)
    (dx,) = torch.autograd.grad(y, x, dy)
    dense = round_trip("nf4", whole)
    torch.testing.assert_close(y, x @ dense.T)
    torch.testing.assert_close(dx, dy @ dense)
