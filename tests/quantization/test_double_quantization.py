"""Double quantization: scales and values are those of bitsandbytes 0.50.2, bit for bit (SHA-256 of the results of its
PyTorch implementation on the same weights), whatever part of a matrix a buffer holds."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import pytest
import torch

from meshwright.quantization.double_quantization import DoubleQuantized, _build_scale_tables
from meshwright.quantization.formats import round_trip

ROWS, INPUTS = 150, 256  # 600 blocks: two groups of 256 and an incomplete one

# quantize_4bit(weights, blocksize=64, quant_type="nf4", compress_statistics=True): mean of the scales, largest value of
# each group, codes of the scales, dequantized values.
EXPECTED = {
    torch.float32: ("e057a8fb461ea994", "b2671050add4fdc0", "79787bcf9e07051e"),
    torch.bfloat16: ("a384779f471ed1bb", "4b6d5a04d68ab33c", "86f03bb80cf8b577"),
}


class Entry(NamedTuple):
    """A matrix of a checkpoint."""

    name: str = "weight"
    model_shape: tuple[int, int] = (ROWS, INPUTS)
    numel: int = ROWS * INPUTS


class Columns(NamedTuple):
    """Range of the columns of a matrix."""

    start: int
    stop: int
    total: int = INPUTS


class Slice(NamedTuple):
    """Slice of a matrix in a buffer."""

    entry: Entry
    offset: int
    numel: int
    begin: int
    columns: Columns | None = None


def weights() -> torch.Tensor:
    """Return normal values [150, 256] of rows of different size, rounded so that the sum of the scales is exact: sums
    of float32 numbers depend on the machine's vector length."""
    generator = np.random.default_rng(11)
    values = generator.standard_normal((ROWS, INPUTS)) * (0.2 + generator.random((ROWS, 1)))
    return torch.from_numpy((np.round(values * 128) / 128).astype(np.float32))


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:16]


def fill(form: DoubleQuantized, values: torch.Tensor, whole: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Measure the scales of the matrix `whole`, and return the records of the buffer's elements `values`."""
    form.compute_scales(lambda *_: whole.flatten(), whole.device)
    return form.pack(values.flatten(), start)


@pytest.mark.parametrize("dtype", EXPECTED)
def test_double_quantization_is_that_of_bitsandbytes(dtype: torch.dtype):
    whole = weights().to(dtype)
    form = DoubleQuantized([Slice(Entry(), 0, whole.numel(), 0)])
    records = fill(form, whole, whole).view(-1, 33)
    found = form.scales[0], records[:, 32:], form.unpack(records, dtype).float()
    assert tuple(digest(each) for each in found) == EXPECTED[dtype]


def test_scales_equal_an_independent_computation():
    """Codes by exhaustive search in float64; nearest of the 256 levels, which are listed by their definition."""
    whole = weights().numpy()
    scales = np.abs(whole.reshape(-1, 64)).max(axis=1)
    mean = scales.astype(np.float64).mean()
    fractions = [
        (exponent, (2 * step + 1) / 2 ** (exponent + 1)) for exponent in range(7) for step in range(2**exponent)
    ]
    positive = [10.0 ** (exponent - 6) * (0.1 + 0.9 * fraction) for exponent, fraction in fractions]
    levels = np.array(sorted([0.0, 1.0, *positive, *(-value for value in positive)]))
    assert len(levels) == 256
    form = DoubleQuantized([Slice(Entry(), 0, whole.size, 0)])
    records = fill(form, torch.from_numpy(whole), torch.from_numpy(whole)).view(-1, 33)
    assert abs(float(form.scales[0][0]) / mean - 1) < 1e-6
    for group, first in enumerate(range(0, len(scales), 256)):
        centred = scales[first : first + 256] - mean
        largest = np.abs(centred).max()
        assert abs(float(form.scales[0][1 + group]) / largest - 1) < 1e-5
        distance = np.abs(centred[:, None] / largest - levels)
        codes = records[first : first + 256, 32].numpy()
        assert (distance[np.arange(len(codes)), codes] <= distance.min(axis=1) + 1e-5).all()
        assert len(set(codes.tolist())) > 50


@pytest.mark.parametrize("bounds", [(0, 128), (64, 192), (128, 320)])
def test_columns_of_a_tp_rank_have_the_scales_of_the_whole_matrix(bounds: tuple[int, int]):
    # Rows of 5 blocks: groups of 256 blocks end within rows.
    whole, (start, stop) = weights().view(120, 320), bounds
    mine, width = whole[:, start:stop].contiguous(), stop - start
    # The buffer holds the rows 20 to 90 of the columns, after 3 blocks of padding.
    part = mine[20:90]
    entry = Entry(model_shape=(120, 320))
    form = DoubleQuantized([Slice(entry, 3 * 64, part.numel(), 20 * width, Columns(start, stop, 320))])
    records = fill(form, part, whole, 3 * 64)
    expected = round_trip("nf4-double", whole)[20:90, start:stop]
    assert torch.equal(form.unpack(records, torch.float64, 3 * 64), expected.flatten())
    padded = torch.cat([torch.zeros(3 * 33, dtype=torch.uint8), records, torch.zeros(33, dtype=torch.uint8)])
    values = form.unpack(padded, torch.float64)
    assert torch.equal(values[3 * 64 : -64], expected.flatten())
    assert not values[: 3 * 64].any() and not values[-64:].any()


def test_matrices_in_a_buffer_have_separate_scales():
    first, second = weights(), 3 * weights().flip(0)
    forms = [Slice(Entry(), 0, first.numel(), 0), Slice(Entry("other"), first.numel(), second.numel(), 0)]
    form = DoubleQuantized(forms)
    form.compute_scales(lambda entry, *_: (first if entry.name == "weight" else second).flatten(), first.device)
    records = form.pack(torch.cat([first, second]).flatten())
    expected = torch.cat([round_trip("nf4-double", each) for each in (first, second)])
    assert torch.equal(form.unpack(records, torch.float64), expected.flatten())
    assert len(form.scales[0]) == 2 * (1 + 3)


def test_scales_are_divided_in_an_incomplete_group_alone():
    """In complete groups they are multiplied by the reciprocal, as in bitsandbytes. Reference: both in numpy's float32,
    for values whose quotient and product lie on different sides of a bound between two codes."""
    bounds = _build_scale_tables(torch.device("cpu"))[1].numpy()
    largest = np.float32(0.7)
    near = (bounds[bounds > 0.01] * largest).astype(np.float32)
    near = np.concatenate([(near.view(np.int32) + step).view(np.float32) for step in range(-2, 3)])
    divided, multiplied = (np.searchsorted(bounds, each) for each in (near / largest, near * (1 / largest)))
    chosen = np.flatnonzero(divided != multiplied)
    assert (1 / largest).dtype == np.float32 and 10 < len(chosen) < 200
    scales = np.zeros(256 + 200, np.float32)
    scales[: len(chosen)] = scales[256 : 256 + len(chosen)] = near[chosen]
    for blocks in (456, 512):  # the second group is incomplete, complete
        form = DoubleQuantized([Slice(Entry("weight", (blocks, 64), blocks * 64), 0, blocks * 64, 0)])
        form.scales = (torch.tensor([0.0, largest, largest]),)  # a mean of 0, which leaves the scales as they are
        values = torch.zeros(blocks, 64)
        values[:456, 0] = torch.from_numpy(scales)
        codes = form.pack(values.flatten()).view(blocks, 33)[:, 32].numpy()
        np.testing.assert_array_equal(codes[: len(chosen)], multiplied[chosen])
        in_second = divided if blocks == 456 else multiplied
        np.testing.assert_array_equal(codes[256 : 256 + len(chosen)], in_second[chosen])


def test_error_is_close_to_that_of_float32_scales():
    whole = weights().double()
    errors = {name: float((round_trip(name, whole) - whole).norm() / whole.norm()) for name in ("nf4", "nf4-double")}
    assert errors["nf4"] < errors["nf4-double"] < 1.02 * errors["nf4"]
