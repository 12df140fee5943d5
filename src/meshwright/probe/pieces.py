"""Elementwise kernels, attention and loss of a layer on CPUs, as points that `probe` times, forward and backward.

Each is counted as `plan` counts it: kernels, and bytes that one of them reads and writes; attention in bytes of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.model.layers import RMSNorm, activate
from meshwright.model.loss import loss_chunk_from_logits
from meshwright.model.rope import rotate
from meshwright.model.tiled_attention import tiled_attention
from meshwright.parallel.context import ring_attention
from meshwright.planner import elementwise
from meshwright.planner.engines import ENGINES
from meshwright.planner.measured_rates import (
    BACKWARD,
    HEAD_SIZES,
    RING_PIECES,
    SCORE_BYTES,
    attention_name,
    attention_scores,
)
from meshwright.probe.points import DTYPES, Effort, Point

HIDDEN, WIDTH, HEAD_SIZE = 256, 512, 64
VOCABULARY = 2048
HEADS, KV_HEADS, ROW = 2, 1, 256  # of attention: query heads, KV heads, tokens of a sequence
_OF = {
    "norm": (HIDDEN, elementwise.norm("rmsnorm", "eager")),
    "rotary": (HEAD_SIZE, elementwise.rotary("eager")),
    "activation": (WIDTH, elementwise.activation(True, "eager")),
}

"""Elements per token (normed, rotated, or read by the second product of an MLP) and kernels, by operation of
`planner/operations.py`."""


class _Attention(NamedTuple):
    """Attention kernel to be measured. size: head dimension. piece: tokens of a KV block if it is ring attention,
    None for plain attention.
    """

    size: int
    piece: int | None = None

    @property
    def name(self) -> str:
        """Name of the kernel in the hardware profile."""
        return attention_name(self.size, self.piece)

    @property
    def row(self) -> int:
        """Number of tokens in a sequence: 256, or for ring attention two KV blocks."""
        return ROW if self.piece is None else 2 * self.piece


_ATTENTION = [_Attention(size, piece) for piece in (None, *RING_PIECES) for size in HEAD_SIZES]


def _list_attention(axes: Sequence[str]) -> list[_Attention]:
    """Return the attention kernels to measure. axes: axes of parallelism; ring attention is left out without "cp"."""
    return [one for one in _ATTENTION if one.piece is None or "cp" in axes]


def list_layer_points(effort: Effort) -> list[Point]:
    """Return the kernels of a layer to be timed, in order: forward and backward of norm, rotary, activation, loss and
    attention in every precision and size of the plan `effort`.
    """
    found = []
    for precision in effort.precisions:
        dtype = DTYPES[precision]
        for elements in effort.pieces:
            for back in (False, True):
                suffix = BACKWARD if back else ""
                for name, (width, there) in _OF.items():
                    passes, tokens = there[back], elements // width
                    moved = passes.bytes(dtype.itemsize) * tokens * width / passes.kernels
                    make = partial(_make_call, partial(_make_elementwise, name, tokens, dtype), back)
                    found.append(Point("piece", name + suffix, precision, (elements,), make, passes.kernels, moved))
                loss_bytes = ENGINES["meshwright"].loss_bytes / 2 * elements
                make = partial(_make_loss_call, elements // VOCABULARY, dtype, back)
                found.append(Point("piece", "loss" + suffix, precision, (elements,), make, 1.0, loss_bytes))
                for one in _list_attention(effort.axes):
                    rows = elements // (one.row * HEADS * one.size)
                    if rows:
                        scores = attention_scores(rows * one.row * HEADS, (one.row + 1) / 2, one.piece or one.row)
                        make = partial(_make_call, partial(_make_attention, one, rows, dtype), back)
                        found.append(
                            Point("piece", one.name + suffix, precision, (elements,), make, 1.0, SCORE_BYTES * scores)
                        )
    return found


ForwardCall = tuple[list[torch.Tensor], Callable[[], torch.Tensor]]
"""Inputs that gradients are formed for, and the forward call."""


def _make_call(made: Callable[[torch.device], ForwardCall], back: bool, device: torch.device) -> Callable[[], Any]:
    """Return the call to time: the forward pass with saved activations, or the backward pass if `back`. made:
    creates, on a device, the inputs that need gradients and the forward call.
    """
    with torch.enable_grad():
        inputs, forward = made(device)
        if not back:
            return partial(_run_forward, forward)
        out = forward()
    return partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)


def _run_forward(forward: Callable[[], Any]) -> None:
    """Call `forward` with autograd on, so that it saves activations for backward."""
    with torch.enable_grad():
        forward()


def _make_elementwise(name: str, tokens: int, dtype: torch.dtype, device: torch.device) -> ForwardCall:
    """Create the inputs and the forward call of the elementwise kernel `name` ("norm", "rotary" or "activation") for
    `tokens` tokens.
    """
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
    """Return the call to time: the cross-entropy over the logits of `tokens` tokens, or if `back` its gradient, which
    overwrites the logits.
    """
    logits_CV = torch.randn(tokens, VOCABULARY, device=device).to(dtype)
    targets_C = torch.randint(VOCABULARY, (tokens,), device=device)
    forward = partial(loss_chunk_from_logits, logits_CV, targets_C)
    return forward().differentiate if back else forward


def _make_attention(one: _Attention, rows: int, dtype: torch.dtype, device: torch.device) -> ForwardCall:
    """Create the inputs and the forward call of the attention kernel `one` for `rows` sequences."""
    leaves = [_make_leaf(dtype, device, rows, one.row, heads, one.size) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (each.transpose(1, 2) for each in leaves)  # as products leave them: a token's heads side by side
    if one.piece is None:
        return leaves, partial(tiled_attention, q, k, v, None)
    return leaves, partial(ring_attention, q, k, v, None, Mesh.single().cp)


def _make_leaf(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
    """Create a random tensor of this shape that requires a gradient."""
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _apply_swiglu(up: torch.Tensor) -> torch.Tensor:
    """Apply the SwiGLU activation to fused gate and up projections, [..., 2 * WIDTH]."""
    gate, value = up.chunk(2, dim=-1)
    return activate(gate, "silu") * value
