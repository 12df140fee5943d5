"""Packing and the matrix product: results match float64, and a row's bits do not depend on the other rows."""

from __future__ import annotations

import os
import threading
import time
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import Linear
from meshwright.kernels.row_order import find_gate_order
from meshwright.kernels.structures import PackedMatrix
from tests.kernels.conftest import compute_linear, one_sequence, unpack

TYPES = ("float32", "bfloat16")


def draw_floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Torch's rounding, back in float32."""
    return torch.from_numpy(x).bfloat16().float().numpy()


def bits(x: np.ndarray) -> np.ndarray:
    """Upper halves of the float32 bits: bfloat16."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def multiply_exactly(kernels: Kernels, x: np.ndarray, weight: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """x Wᵀ in float64 of the operands as the kernels see them, and a bound of its rounding error."""
    if dtype == "bfloat16":
        weight = round_to_bfloat16(weight)
        if kernels.instruction_set in ("amx", "avx512_bf16"):
            x = round_to_bfloat16(x)
    wide, magnitude = x.astype(np.float64), np.abs(x).astype(np.float64)
    return wide @ weight.T.astype(np.float64), 3e-7 * (16 + len(weight[0]) ** 0.5) * (
        magnitude @ np.abs(weight.T)
    ) + 1e-30


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 70), st.integers(1, 600), st.sampled_from(TYPES), st.integers(1, 3))
def test_matrix_product_matches_float64_for_any_shape(built_kernels, rows, n, k, dtype, threads):
    built_kernels.set_threads(threads)
    x, weight, bias = draw_floats(0, rows, k), draw_floats(1, n, k), draw_floats(2, n)
    y = compute_linear(built_kernels, x, built_kernels.pack(weight, dtype), bias)
    exact, bound = multiply_exactly(built_kernels, x, weight, dtype)
    assert np.all(np.abs(y - exact - bias) <= bound + 1e-6 * np.abs(exact + bias))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("n", "k"), [(576, 576), (48, 2100), (37, 1031), (130, 33), (16, 2), (1, 1)])
def test_row_bits_are_independent_of_batch(kernels: Kernels, dtype: str, n: int, k: int):
    packed, x = kernels.pack(draw_floats(1, n, k), dtype), draw_floats(0, 211, k)
    whole = compute_linear(kernels, x, packed)
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        for begin, end in (
            (0, 1),
            (210, 211),
            (3, 5),
            (4, 7),
            (9, 14),
            (20, 26),
            (30, 37),
            (1, 98),
            (100, 197),
            (0, 211),
        ):
            part = compute_linear(kernels, np.ascontiguousarray(x[begin:end]), packed)
            assert np.array_equal(part.view(np.int32), whole[begin:end].view(np.int32)), (threads, begin, end)


def test_row_result_ignores_neighbouring_rows_and_padding(kernels: Kernels):
    """Odd sizes, with NaN in all other rows."""
    for dtype in TYPES:
        packed = kernels.pack(draw_floats(1, 19, 33), dtype)
        x = draw_floats(0, 8, 33)
        expected = compute_linear(kernels, x, packed)
        x[[0, 1, 2, 4, 5, 6, 7]] = np.nan
        assert np.array_equal(compute_linear(kernels, x, packed)[3], expected[3])


def test_bfloat16_rounds_to_nearest_even_and_keeps_special_values(kernels: Kernels):
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 3.4e38, np.inf, -np.inf], np.float32)
    x = np.concatenate([x, draw_floats(0, 500)])
    packed = kernels.pack(x[:, None], "bfloat16")
    stored = unpack(packed)[0, : len(x), 0]
    assert np.array_equal(stored, bits(round_to_bfloat16(x)))
    nan = kernels.pack(np.array([[np.nan]], np.float32), "bfloat16").buffer.view(np.uint16)[0]
    assert nan & 0x7F80 == 0x7F80 and nan & 0x7F


def test_packing_bfloat16_bits_equals_packing_their_values(kernels: Kernels):
    weight = round_to_bfloat16(draw_floats(0, 3, 21, 47))
    for dtype in TYPES:
        a, b = kernels.pack(bits(weight), dtype), kernels.pack(weight, dtype)
        assert np.array_equal(a.buffer, b.buffer) and (a.n, a.k, a.count) == (21, 47, 3)
        assert len(a.buffer) == 3 * 32 * (64 * 2 if dtype == "bfloat16" else 47 * 4)  # rows and columns are padded


def tile_product(a: np.ndarray, b: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """TDPBF16PS on whole tiles, after Intel's SDM (volume 2): `a` [16 rows][32 bfloat16], `b` [16 rows][16 x 2], sums
    [16][16] float32; the even and the odd products of all pairs are summed apart, in float32."""
    wide = lambda x: (x.astype(np.uint32) << 16).view(np.float32)  # noqa: E731
    even, odd = np.zeros((16, 16), np.float32), np.zeros((16, 16), np.float32)
    for k in range(16):
        even += wide(a[:, 2 * k])[:, None] * wide(b[k, 0::2])[None]
        odd += wide(a[:, 2 * k + 1])[:, None] * wide(b[k, 1::2])[None]
    return sums + (even + odd)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ordered_rows_are_packed_without_a_copy_of_the_matrices(kernels: Kernels, dtype: str):
    weight, order = draw_floats(1, 4 * 1024, 64).reshape(4, 1024, 64), find_gate_order(512, interleaved=True)
    assert order[:2].tolist() == [0, 2] and order[16:18].tolist() == [1, 3] and order[32] == 32
    expected = kernels.pack(weight[:, order], dtype)
    tracemalloc.start()
    found = kernels.pack(weight, dtype, order)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(found.buffer, expected.buffer)
    assert peak < weight.nbytes / 2


def test_packing_copies_no_more_rows_of_wide_matrices_than_a_few_mebibytes(kernels: Kernels):
    weight, order = np.zeros((512, 16384), np.float32), np.arange(512)[::-1]
    kernels.end_packing()
    tracemalloc.start()
    kernels.pack(weight, "float32", order)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 9 * 2**20  # for each of two threads 2 MiB, and 2 MiB of its piece before


def emulate_amx(x: np.ndarray, packed: PackedMatrix) -> np.ndarray:
    """The product as `multiply_by_amx` computes it: tiles read from the packed bytes by address arithmetic alone."""
    depth = -(-packed.k // 32) * 32
    rows = np.zeros((-(-len(x) // 16) * 16, depth), np.uint16)
    rows[: len(x), : packed.k] = bits(round_to_bfloat16(x))
    lines = packed.buffer.view(np.uint16).reshape(-1, 32)
    panels = len(lines) * 2 // depth
    out = np.zeros((len(rows), 16 * panels), np.float32)
    for p in range(panels):
        first = p // 2 * depth + p % 2  # the lines of two panels alternate
        panel = lines[first : first + depth : 2].reshape(-1)
        for r in range(0, len(rows), 16):
            sums = np.zeros((16, 16), np.float32)
            for k in range(0, depth, 32):
                tile = panel[k * 16 : k * 16 + 512].reshape(16, 32)  # 16 tile rows of 64 bytes, one after another
                sums = tile_product(rows[r : r + 16, k : k + 32], tile, sums)
            out[r : r + 16, 16 * p : 16 * p + 16] = sums
    return out[: len(x), : packed.n]


@pytest.mark.parametrize("rows", [1, 5, 33, 300])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("accumulate", [True, False])
def test_products_of_whole_panels_keep_the_columns_beside_them(
    kernels: Kernels, rows: int, dtype: str, accumulate: bool
):
    x, weight, out = draw_floats(0, rows, 2101), draw_floats(1, 272, 2101), draw_floats(2, rows, 288)
    before, operations = out.copy(), kernels.create_op_list()
    packed = kernels.pack(weight, dtype)
    operations.append(Linear(out[:, 8:280], x, packed, accumulate=accumulate))
    operations.run(one_sequence(rows))
    exact, bound = multiply_exactly(kernels, x, weight, dtype)
    found = out[:, 8:280] - accumulate * before[:, 8:280].astype(np.float64)
    assert np.all(np.abs(found - exact) <= bound + 1e-6 * np.abs(out[:, 8:280]))
    assert np.array_equal(out[:, :8], before[:, :8]) and np.array_equal(out[:, 280:], before[:, 280:])
    alone, last = before[-1:].copy(), kernels.create_op_list()
    last.append(Linear(alone[:, 8:280], x[-1:], packed, accumulate=accumulate))
    last.run(one_sequence(1))
    assert np.array_equal(alone, out[-1:])


def list_worker_cpus(kernels: Kernels, threads: int, most: int) -> list[set[int]]:
    """The CPUs that each worker of a new thread pool may run on, when it has had time to begin: at most `most` each,
    which a busy machine may delay."""
    kernels.set_threads(1)
    others = set(os.listdir("/proc/self/task"))
    kernels.set_threads(threads)
    workers = set(os.listdir("/proc/self/task")) - others
    time.sleep(0.3)
    deadline = time.monotonic() + 30
    while True:
        found = [os.sched_getaffinity(int(thread)) for thread in workers]
        if max(map(len, found)) <= most or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_as_many_threads_as_cpus_are_bound_to_one_each(built_kernels: Kernels):
    cpus = os.sched_getaffinity(0)
    packed = built_kernels.pack(draw_floats(1, 999, 64), "float32")
    bound = list_worker_cpus(built_kernels, len(cpus), most=1)
    assert sorted(map(len, bound)) == [1] * (len(cpus) - 1)
    assert set().union(*bound) == cpus - {min(cpus)}  # the first is that of the calling thread
    compute_linear(built_kernels, draw_floats(0, 9, 64), packed)
    assert os.sched_getaffinity(0) == cpus
    os.sched_setaffinity(0, {max(cpus)})  # a worker's
    try:
        compute_linear(built_kernels, draw_floats(0, 9, 64), packed)
        assert os.sched_getaffinity(0) == {max(cpus)}
    finally:
        os.sched_setaffinity(0, cpus)
    assert list_worker_cpus(built_kernels, len(cpus) + 1, most=len(cpus)) == [cpus] * len(cpus)


def test_more_threads_than_items_compute_every_item_once(kernels: Kernels):
    """Ranges of threads are empty, threads take each other's items, and runs follow one another closely."""
    x = draw_floats(0, 3, 96)
    packed = [kernels.pack(draw_floats(seed, n, 96), "float32") for seed, n in enumerate((16, 50, 96, 400))]
    expected = [compute_linear(kernels, x, each) for each in packed]
    for threads in (5, 9):
        kernels.set_threads(threads)
        found = [np.zeros((3, each.n), np.float32) for each in packed]
        operations = kernels.create_op_list()
        for out, each in zip(found, packed, strict=True):
            operations.append(Linear(out, x, each, accumulate=True))
        for number in range(1, 31):
            operations.run(one_sequence(3))
            for out, each in zip(found, expected, strict=True):
                np.testing.assert_allclose(out, number * each, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("rows", "n", "k"), [(5, 20, 70), (17, 16, 32), (1, 3, 1), (33, 33, 31)])
def test_packed_panels_are_the_tiles_that_amx_multiplies(kernels: Kernels, rows: int, n: int, k: int):
    x, weight = draw_floats(0, rows, k), draw_floats(1, n, k)
    y = emulate_amx(x, kernels.pack(weight, "bfloat16"))
    exact = round_to_bfloat16(x).astype(np.float64) @ round_to_bfloat16(weight).T.astype(np.float64)
    assert np.abs(y - exact).max() <= 1e-5 * (1 + np.abs(exact).max())


def test_memory_is_aligned_zeroed_and_apart(kernels: Kernels):
    arrays = [kernels.allocate((n,), np.uint8) for n in (1, 65, 4096, 70 << 20)] + [
        kernels.allocate((3, 5), np.float32)
    ]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0 and not array[:1].any()
        array[:] = number + 1
    assert all((array == number + 1).all() for number, array in enumerate(arrays))


def test_threads_must_be_positive(kernels: Kernels):
    with pytest.raises(ValueError, match="at least 1"):
        kernels.set_threads(0)


def test_packing_works_again_after_its_threads_were_given_back(built_kernels: Kernels):
    weight = draw_floats(1, 37, 33)
    packed = built_kernels.pack(weight, "float32")
    built_kernels.end_packing()
    assert not any(thread.name.startswith("packing") for thread in threading.enumerate())
    np.testing.assert_array_equal(built_kernels.pack(weight, "float32").buffer, packed.buffer)
