"""Each operation of a step: results match float64 and do not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import (
    Activation,
    Embed,
    Gate,
    Linear,
    Norm,
    Scale,
)
from meshwright.kernels.row_order import find_gate_order
from meshwright.model.experts import ClampedSwiGLU
from tests.kernels.conftest import one_sequence
from tests.kernels.product_checks import (
    CONFIGS,
    ROWS,
    build_mixture,
    check_experts,
    check_gated,
    check_heads,
    draw_floats,
    mixture_op,
    relative_error,
    run,
    wide,
)


@pytest.mark.parametrize("size", [1, 15, 16, 37, 576])
def test_norms_equal_float64(kernels: Kernels, size: int):
    x, weight, bias = 3 + draw_floats(0, ROWS, size), draw_floats(1, size), draw_floats(2, size)
    rms, layer = np.empty_like(x), np.empty_like(x)
    run(kernels, Norm(rms, x, weight, epsilon=1e-3), Norm(layer, x, weight, bias, 1e-3, "layer"))
    exact = wide(x) * torch.rsqrt(wide(x).square().mean(1, keepdim=True) + 1e-3) * wide(weight)
    assert relative_error(rms, exact) < 1e-6
    assert relative_error(layer, F.layer_norm(wide(x), (size,), wide(weight), wide(bias), 1e-3)) < 1e-5


@pytest.mark.parametrize("size", [1, 16, 37])
@pytest.mark.parametrize("softcap", [0.0, 0.7, 50.0])
def test_scaled_rows_equal_float64(kernels: Kernels, size: int, softcap: float):
    x, start = draw_floats(0, ROWS, size) * 10 ** draw_floats(3, ROWS, size), draw_floats(1, ROWS, size)
    out, added = np.empty_like(x), start.copy()
    run(kernels, Scale(out, x, 0.22, softcap), Scale(added, x, 0.22, softcap, accumulate=True))
    exact = wide(x) * 0.22
    exact = softcap * torch.tanh(exact / softcap) if softcap else exact
    assert relative_error(out, exact) < 1e-6
    assert np.allclose(out, exact.numpy(), rtol=2e-6, atol=0)  # also near 0
    assert relative_error(added, exact + wide(start)) < 1e-6


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activate(kernels: Kernels, x: np.ndarray, activation: Activation) -> np.ndarray:
    """The activation of the product of x and the identity; of a gated one, gate comes before up in x."""
    width = x.shape[1] // (1 + activation.gated)
    order, out = find_gate_order(width) if activation.gated else None, np.empty((len(x), width), np.float32)
    identity = kernels.pack(np.eye(x.shape[1], dtype=np.float32), "float32", order)
    run(kernels, Linear(out, x, identity, activation=activation), batch=one_sequence(len(x)))
    return out


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_equal_float64(kernels: Kernels, kind: str):
    gate = np.linspace(-12, 12, 1003, dtype=np.float32)
    x = np.concatenate([gate, draw_floats(0, 1003)])[None].repeat(ROWS, 0)
    gated, plain = (activate(kernels, x, Activation(kind, each)) for each in (True, False))
    exact = ACTIVATIONS[kind](wide(x))
    tolerance = (6e-6 if kind.startswith("gelu") else 3e-7) * exact.abs() + 1e-9  # gelu's: far out, where it is small
    assert bool((wide(plain) - exact).abs().le(tolerance).all())
    assert relative_error(gated, exact[:, :1003] * wide(x[:, 1003:])) < 1e-6


def test_clamped_activation_equals_the_model_function(kernels: Kernels):
    x = 9 * draw_floats(0, ROWS, 74)
    out = activate(kernels, x, Activation("silu", True, limit=7.0, alpha=1.702))
    exact = ClampedSwiGLU.apply(wide(x), 7.0, 1.702, False)
    assert (wide(x) > 7).any() and (wide(x) < -7).any()
    assert relative_error(out, exact) < 1e-6


def test_activations_have_the_right_limits(kernels: Kernels):
    x = np.array([[-1e30, -100, -0.0, 0, 100, 1e30]], np.float32)
    for kind in ACTIVATIONS:
        out = activate(kernels, x, Activation(kind, False))
        assert (abs(out[0, :4]) < 1e-8).all() and (out[0, 4:] > 99).all(), (kind, out)


def test_embedding_reads_plain_and_packed_tables_and_slices(kernels: Kernels):
    table, out = draw_floats(0, 40, 19), np.empty((ROWS, 19), np.float32)
    half = torch.from_numpy(table).bfloat16()
    half_bits = (half.float().numpy().view(np.uint32) >> 16).astype(np.uint16)
    packed = {dtype: kernels.pack(table, dtype) for dtype in ("float32", "bfloat16")}
    for source, expected in [
        *((table, table), (half_bits, half.float().numpy())),
        *((packed["float32"], table), (packed["bfloat16"], half.float().numpy())),
    ]:
        run(kernels, Embed(out, source))
        assert np.array_equal(out, expected[:ROWS])
        run(kernels, Embed(out, source, first=2))
        assert not out[:2].any() and np.array_equal(out[2:], expected[: ROWS - 2])
    run(kernels, Embed(out, table), Embed(out, table[:3].copy(), ids="positions", accumulate=True))
    assert np.array_equal(out[:3], 2 * table[:3]) and np.array_equal(out[3:], table[3:ROWS])


def test_norm_of_outputs_reads_the_rows_of_their_tokens(kernels: Kernels):
    x, weight = draw_floats(0, ROWS, 19), draw_floats(1, 19)
    every, taken = np.empty_like(x), np.zeros((2, 19), np.float32)
    run(kernels, Norm(every, x, weight), Norm(taken, x, weight, rows="outputs"), batch=one_sequence(ROWS, (3, 1)))
    assert np.array_equal(taken, every[[3, 1]])


def test_gate_multiplies_rows_by_a_sigmoid(kernels: Kernels):
    total, weight, gates = draw_floats(1, ROWS, 19), draw_floats(2, 1, 7), draw_floats(3, ROWS, 7)
    exact = wide(total) * (wide(gates) @ wide(weight).T).sigmoid()
    run(kernels, Gate(total, gates, kernels.pack(weight, "float32"), np.empty((ROWS, 1), np.float32)))
    assert relative_error(total, exact) < 1e-6


@pytest.mark.parametrize(
    ("heads", "dtype", "rows"),
    [(1, "float32", 5), (3, "bfloat16", 5), (40, "float32", 5), (3, "float32", 600), (3, "bfloat16", 600)],
)
def test_linear_multiplies_each_head_by_its_own_matrix(kernels: Kernels, heads: int, dtype: str, rows: int):
    check_heads(kernels, heads, dtype, rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [5, 600])
def test_gated_products_equal_float64(kernels: Kernels, dtype: str, rows: int):
    check_gated(kernels, dtype, rows)


def test_linear_adds_bias_and_residual_and_reads_strided_input(kernels: Kernels):
    weight, bias, buffer = draw_floats(0, 21, 12), draw_floats(1, 21), draw_floats(2, ROWS, 30)
    out = draw_floats(3, ROWS, 40)
    before = out.copy()
    run(kernels, Linear(out[:, 8:29], buffer[:, 5:17], kernels.pack(weight, "float32"), bias, accumulate=True))
    exact = wide(before[:, 8:29]) + wide(buffer[:, 5:17]) @ wide(weight).T + wide(bias)
    assert relative_error(out[:, 8:29], exact) < 1e-6
    assert np.array_equal(out[:, :8], before[:, :8]) and np.array_equal(out[:, 29:], before[:, 29:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "tokens"), [*((name, 50) for name in CONFIGS), ("normalised", 700)])
def test_experts_equal_the_model_layer(kernels: Kernels, name: str, tokens: int, dtype: str):
    check_experts(kernels, name, dtype, tokens)


def test_ranks_that_share_the_experts_add_up_to_all(kernels: Kernels):
    mixture, x = build_mixture(CONFIGS["sigmoid"]), draw_floats(5, 30, 24)
    whole, parts = np.empty_like(x), draw_floats(6, 30, 24)
    before = parts.copy()
    run(kernels, mixture_op(kernels, mixture, whole, x, range(10)), batch=one_sequence(30))
    for held in (range(4), range(4, 9), range(9, 10)):
        run(kernels, mixture_op(kernels, mixture, parts, x, held, accumulate=True), batch=one_sequence(30))
    assert np.abs(parts - before - whole).max() < 1e-5 * np.abs(whole).max()


def test_equal_scores_choose_the_lower_expert(kernels: Kernels):
    mixture = build_mixture(CONFIGS["softmax"])
    mixture.router.weight.data.zero_()
    op = mixture_op(kernels, mixture, np.empty((4, 24), np.float32), draw_floats(0, 4, 24), range(10))
    run(kernels, op, batch=one_sequence(4))
    assert (op.workspace.chosen == [0, 1, 2]).all() and np.allclose(op.workspace.weights, 0.1)


def test_segments_run_in_order_for_any_thread_count(kernels: Kernels):
    weight, x = draw_floats(0, 64, 64), draw_floats(1, ROWS, 64)
    packed, results = kernels.pack(weight, "bfloat16"), []
    for threads in (1, 2, 3, 5):
        kernels.set_threads(threads)
        a, b = np.zeros_like(x), np.zeros_like(x)
        operations = kernels.create_op_list()
        operations.append(Linear(a, x, packed))
        middle = operations.append(Scale(b, a, 0.5))
        operations.append(Linear(a, b, packed, accumulate=True))
        for _ in range(200):
            operations.run(one_sequence(ROWS), 0, middle)
            assert not b.any()
            operations.run(one_sequence(ROWS), middle)
            b_first = b.copy()
            b[:] = 0
        results.append(np.concatenate([a, b_first]))
    assert all(np.array_equal(results[0], other) for other in results)


def test_buffers_of_a_wrong_shape_or_type_are_refused(kernels: Kernels):
    x, packed, operations = (
        draw_floats(0, 4, 8),
        kernels.pack(draw_floats(1, 6, 8), "float32"),
        kernels.create_op_list(),
    )
    for op in [
        Linear(x, x, packed),
        Linear(np.zeros((4, 6)), x, packed),  # float64
        Linear(np.zeros((4, 6), np.float32), x, packed, bias=np.zeros(5, np.float32)),
        Norm(x, x, np.zeros(7, np.float32)),
        Linear(x, x, kernels.pack(draw_floats(1, 2, 4, 8), "float32"), steps=(4, 1)),
        Linear(np.zeros((4, 6), np.float32), x, packed, activation=Activation("silu", True)),
    ]:
        with pytest.raises(ValueError, match=r"rows|expected"):
            operations.append(op)
    assert len(operations) == 0
