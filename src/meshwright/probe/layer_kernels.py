"""Elementwise kernels, attention and loss of a transformer layer on CPUs, as measurement points, forward and backward.

The planner predicts these operations from their number of kernels and the bytes that each kernel reads and writes (for
attention, the bytes of the scores), so the measurement points have the same units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.model.axis_operations import SINGLE_DEVICE
from meshwright.model.layers import RMSNorm, activate
from meshwright.model.loss import Chunk, OutputHead
from meshwright.model.rope import rotate
from meshwright.model.tiled_attention import tiled_attention
from meshwright.parallel.context import RingAttention
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.cost.measured_rates import (
    BACKWARD,
    HEAD_SIZES,
    RING_PIECES,
    SCORE_BYTES,
    attention_name,
    attention_scores,
)
from meshwright.planner.cost.operators import elementwise_traffic
from meshwright.probe.points import DTYPES, MeasurementPlan, MeasurementPoint, start_backward

HIDDEN, WIDTH, HEAD_SIZE = 256, 512, 64
VOCABULARY = 2048
HEADS, KV_HEADS, ROW = 2, 1, 256  # attention: query heads, KV heads, tokens per sequence
_ELEMENTWISE = {
    "norm": (HIDDEN, elementwise_traffic("rmsnorm")),
    "rotary": (HEAD_SIZE, elementwise_traffic("rotary")),
    "activation": (WIDTH, elementwise_traffic("gated_activation")),
}
"""Operation of `planner/cost/blocks.py` -> (elements per token, kernels). Elements: normalized, rotated, or read by
the MLP's second matrix product."""


class _Attention(NamedTuple):
    """Attention kernel to be timed. head_size: dimension of a head. kv_block: tokens per KV block of ring attention;
    None: attention without context parallelism."""

    head_size: int
    kv_block: int | None = None

    @property
    def name(self) -> str:
        """Name of the kernel in the hardware profile, such as "attention-128"."""
        return attention_name(self.head_size, self.kv_block)

    @property
    def tokens(self) -> int:
        """Tokens of each sequence: 256, or for ring attention two KV blocks."""
        return ROW if self.kv_block is None else 2 * self.kv_block


_ATTENTION = [_Attention(size, kv_block) for kv_block in (None, *RING_PIECES) for size in HEAD_SIZES]


def list_layer_points(plan: MeasurementPlan) -> list[MeasurementPoint]:
    """List the measurement points of a transformer layer's operations: forward and backward of norm, rotary embedding,
    activation, loss and attention, in every precision and size of `plan`."""
    return [
        MeasurementPoint("kernel", name + (BACKWARD if back else ""), precision, (elements,), make, kernels, moved)
        for precision in plan.precisions
        for elements in plan.kernel_sizes
        for back in (False, True)
        for name, make, kernels, moved in _list_kernels(plan.axes, elements, DTYPES[precision], back)
    ]


def _list_kernels(
    axes: Sequence[str], elements: int, dtype: torch.dtype, back: bool
) -> Iterator[tuple[str, Callable[[torch.device], Callable[[], Any]], float, float]]:
    """Yield every timed operation of a transformer layer on tensors of `elements` elements, as (name, make, kernels,
    bytes).

    make: function (device) -> function that runs the operation once. kernels: number of device kernels that one run
    launches. bytes: mean bytes that one of these kernels reads and writes. dtype: dtype of the tensors. axes: mesh axes
    of the plan; with "cp" ring attention is included. back: True for the backward pass, False for the forward pass."""
    for name, (width, kernels) in _ELEMENTWISE.items():
        passes, tokens = kernels[back], elements // width
        moved = passes.bytes(dtype.itemsize) * tokens * width / passes.kernels
        yield name, partial(_make_call, partial(_make_elementwise, name, tokens, dtype), back), passes.kernels, moved
    loss_bytes = ENGINES["meshwright"].loss_bytes / 2 * elements
    yield "loss", partial(_make_loss_call, elements // VOCABULARY, dtype, back), 1.0, loss_bytes
    for one in _ATTENTION:
        rows = elements // (one.tokens * HEADS * one.head_size)
        if rows and (one.kv_block is None or "cp" in axes):
            keys = (one.tokens + 1) / 2
            scores = attention_scores(rows * one.tokens * HEADS, keys, one.kv_block or one.tokens)
            yield (
                one.name,
                partial(_make_call, partial(_make_attention, one, rows, dtype), back),
                1.0,
                SCORE_BYTES * scores,
            )


ForwardCall = tuple[list[torch.Tensor], Callable[[], torch.Tensor]]
"""(inputs whose gradients are computed, forward call)."""


def _make_call(made: Callable[[torch.device], ForwardCall], back: bool, device: torch.device) -> Callable[[], Any]:
    """Return a function that runs the forward or the backward pass of a layer operation on `device`.

    made: function (device) -> (inputs whose gradients are computed, forward function). back: True for the backward pass
    alone, False for the forward pass, which saves activations."""
    with torch.enable_grad():
        inputs, forward = made(device)
        if not back:
            return partial(_run_forward, forward)
        out = forward()
        loss = start_backward(out, torch.randn_like(out))
    return partial(torch.autograd.grad, loss, inputs, retain_graph=True)


def _run_forward(forward: Callable[[], Any]) -> None:
    """Call `forward` with autograd enabled, so that activations are saved for backward."""
    with torch.enable_grad():
        forward()


def _make_elementwise(name: str, tokens: int, dtype: torch.dtype, device: torch.device) -> ForwardCall:
    """Allocate the inputs of an elementwise operation for `tokens` tokens in `dtype` on `device`; return (inputs whose
    gradients are computed, function that runs the forward pass). name: "norm", "rotary" or "activation"."""
    if name == "norm":
        module = RMSNorm(HIDDEN, 1e-5, device=device, dtype=dtype)
        nn.init.ones_(module.weight)
        x = _make_leaf(dtype, device, tokens, HIDDEN)
        return [x, module.weight], partial(module, x)
    if name == "activation":
        up = _make_leaf(dtype, device, tokens, 2 * WIDTH)
        return [up], partial(_apply_swiglu, up)
    assert name == "rotary", name
    x = _make_leaf(dtype, device, 1, 1, tokens, HEAD_SIZE)
    angles = torch.rand(tokens, HEAD_SIZE // 2, device=device)
    return [x], partial(rotate, x, angles.cos()[None, None], angles.sin()[None, None])


def _make_loss_call(tokens: int, dtype: torch.dtype, back: bool, device: torch.device) -> Callable[[], Any]:
    """Return a function that computes the cross entropy of `tokens` tokens from random logits of `dtype` on `device`.
    back: True for a function that computes the gradient of the logits instead, and overwrites the logits with the
    gradient."""
    logits_CV = torch.randn(tokens, VOCABULARY, device=device).to(dtype)
    targets_C = torch.randint(VOCABULARY, (tokens,), device=device)
    head = OutputHead(logits_CV.new_empty(VOCABULARY, 0), SINGLE_DEVICE.tensor, widest=VOCABULARY)
    forward = partial(Chunk, slice(0, tokens), logits_CV, targets_C, head)
    return forward().differentiate if back else forward


def _make_attention(kernel: _Attention, rows: int, dtype: torch.dtype, device: torch.device) -> ForwardCall:
    """Allocate random Q, K and V of `rows` sequences, in `dtype` on `device`, for the attention kernel `kernel`; return
    (inputs whose gradients are computed, function that runs the forward pass)."""
    leaves = [
        _make_leaf(dtype, device, rows, kernel.tokens, heads, kernel.head_size) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    q, k, v = (
        each.transpose(1, 2) for each in leaves
    )  # memory layout of a projection's output: heads of a token are contiguous
    if kernel.kv_block is None:
        return leaves, partial(tiled_attention, q, k, v, None)
    return leaves, partial(RingAttention(Mesh.single().cp).attend, q, k, v, None)


def _make_leaf(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
    """Return a random tensor of this shape, dtype and device that requires a gradient."""
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _apply_swiglu(up: torch.Tensor) -> torch.Tensor:
    """Apply SwiGLU to concatenated gate and up projections, [..., 2 * WIDTH]; return [..., WIDTH]."""
    gate, value = up.chunk(2, dim=-1)
    return activate(gate, "silu") * value
