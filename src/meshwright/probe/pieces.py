"""The work of a layer beside its products, as training does it on processors: what `probe` times, forward and back.

Each is counted as `plan` counts it: in kernels, and in the bytes that one of them reads and writes; attention in the
bytes of its scores.
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
HEADS, KV_HEADS, ROW = 2, 1, 256  # of attention: heads that share keys, tokens of a row
_OF = {
    "norm": (HIDDEN, elementwise.norm("rmsnorm", "eager")),
    "rotary": (HEAD_SIZE, elementwise.rotary("eager")),
    "activation": (WIDTH, elementwise.activation(True, "eager")),
}
"""By name of the operation in `planner/operations.py`: elements of a token (of what is normed or turned, of what the
second product of an MLP reads), and kernels."""


class _Attention(NamedTuple):
    """Attention with heads of a size; in a ring, with pieces of so many tokens."""

    size: int
    piece: int | None = None

    @property
    def name(self) -> str:
        return attention_name(self.size, self.piece)

    @property
    def row(self) -> int:
        """A ring of one rank has both pieces of a row."""
        return ROW if self.piece is None else 2 * self.piece


_ATTENTION = [_Attention(size, piece) for piece in (None, *RING_PIECES) for size in HEAD_SIZES]


def _attention_of(axes: Sequence[str]) -> list[_Attention]:
    """What is measured: rings only where ranks share rows."""
    return [one for one in _ATTENTION if one.piece is None or "cp" in axes]


def pieces_of(effort: Effort) -> list[Point]:
    """All pieces, in the order in which they are timed."""
    found = []
    for precision in effort.precisions:
        dtype = DTYPES[precision]
        for elements in effort.pieces:
            for back in (False, True):
                way = BACKWARD if back else ""
                for name, (width, there) in _OF.items():
                    passes, tokens = there[back], elements // width
                    moved = passes.bytes(dtype.itemsize) * tokens * width / passes.kernels
                    make = partial(_call, partial(_made, name, tokens, dtype), back)
                    found.append(Point("piece", name + way, precision, (elements,), make, passes.kernels, moved))
                loss_bytes = ENGINES["meshwright"].loss_bytes / 2 * elements
                make = partial(_loss, elements // VOCABULARY, dtype, back)
                found.append(Point("piece", "loss" + way, precision, (elements,), make, 1.0, loss_bytes))
                for one in _attention_of(effort.axes):
                    rows = elements // (one.row * HEADS * one.size)
                    if rows:
                        scores = attention_scores(rows * one.row * HEADS, (one.row + 1) / 2, one.piece or one.row)
                        make = partial(_call, partial(_attention, one, rows, dtype), back)
                        found.append(
                            Point("piece", one.name + way, precision, (elements,), make, 1.0, SCORE_BYTES * scores)
                        )
    return found


Made = tuple[list[torch.Tensor], Callable[[], torch.Tensor]]
"""What gradients are formed of, and the way there."""


def _call(made: Callable[[torch.device], Made], back: bool, device: torch.device) -> Callable[[], Any]:
    """The call that is timed: forward with what the way back needs, or the way back."""
    with torch.enable_grad():
        inputs, forward = made(device)
        if not back:
            return partial(_with_gradients, forward)
        out = forward()
    return partial(torch.autograd.grad, out, inputs, torch.randn_like(out), retain_graph=True)


def _with_gradients(forward: Callable[[], Any]) -> None:
    with torch.enable_grad():
        forward()


def _made(name: str, tokens: int, dtype: torch.dtype, device: torch.device) -> Made:
    if name == "norm":
        module = RMSNorm(HIDDEN, 1e-5, device=device, dtype=dtype)
        nn.init.ones_(module.weight)
        x = _leaf(dtype, device, tokens, HIDDEN)
        return [x, module.weight], partial(module, x)
    if name == "activation":
        up = _leaf(dtype, device, tokens, 2 * WIDTH)
        return [up], partial(_gated, up)
    assert name == "rotary", name
    x = _leaf(dtype, device, 1, 1, tokens, HEAD_SIZE)
    angles = torch.rand(tokens, HEAD_SIZE // 2, device=device)
    return [x], partial(rotate, x, angles.cos()[None, None], angles.sin()[None, None])


def _loss(tokens: int, dtype: torch.dtype, back: bool, device: torch.device) -> Callable[[], Any]:
    """The loss of some tokens' logits, or its gradient in the logits' place."""
    logits_CV = torch.randn(tokens, VOCABULARY, device=device).to(dtype)
    targets_C = torch.randint(VOCABULARY, (tokens,), device=device)
    forward = partial(loss_chunk_from_logits, logits_CV, targets_C)
    return forward().differentiate if back else forward


def _attention(one: _Attention, rows: int, dtype: torch.dtype, device: torch.device) -> Made:
    leaves = [_leaf(dtype, device, rows, one.row, heads, one.size) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    q, k, v = (each.transpose(1, 2) for each in leaves)  # as products leave them: a token's heads side by side
    if one.piece is None:
        return leaves, partial(tiled_attention, q, k, v, None)
    return leaves, partial(ring_attention, q, k, v, None, Mesh.single().cp)


def _leaf(dtype: torch.dtype, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype).requires_grad_()


def _gated(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, dim=-1)
    return activate(gate, "silu") * value
