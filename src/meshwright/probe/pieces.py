"""The work of a layer beside its products, as training does it on processors: what the probe times, forward and back.

Each is counted as `plan` counts it: in kernels, and in the bytes that one of them reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.model.layers import RMSNorm, activate
from meshwright.model.rope import rotate
from meshwright.model.tiled_attention import tiled_attention
from meshwright.plan import elementwise
from meshwright.plan.elementwise import Passes
from meshwright.plan.measured_rates import BACKWARD, HEAD_SIZES, SCORE_BYTES, attention_name, attention_scores

HIDDEN, WIDTH, HEAD_SIZE = 256, 512, 64
HEADS, KV_HEADS, ROW = 2, 1, 256  # of attention: heads that share keys, tokens of a row
_OF = {
    "norm": elementwise.norm("rmsnorm", "eager"),
    "rotary": elementwise.rotary("eager"),
    "activation": elementwise.activation(True, "eager"),
}
_ATTENTION = {attention_name(size): size for size in HEAD_SIZES}
PIECES = tuple(f"{name}{way}" for name in (*_OF, *_ATTENTION) for way in ("", BACKWARD))
"""Their names: as those of the operations of `plan/operations.py`, on the way back with `BACKWARD`."""


class Counted(NamedTuple):
    """Kernels of a piece, and bytes that each of them reads and writes."""

    kernels: float
    bytes: float


def counted(name: str, elements: int, itemsize: int) -> Counted:
    """Of so many elements: of what is normed or turned, of what the second product of an MLP reads, of the queries of
    attention."""
    plain = name.removesuffix(BACKWARD)
    if plain in _ATTENTION:
        return Counted(1, SCORE_BYTES * attention_scores(elements / _ATTENTION[plain], (ROW + 1) / 2, ROW))
    found: Passes = _OF[plain][plain != name]
    return Counted(found.kernels, found.bytes(itemsize) * elements / found.kernels)


def smallest(name: str) -> int:
    """Elements of one token, of attention those of one row."""
    plain = name.removesuffix(BACKWARD)
    if plain in _ATTENTION:
        return ROW * HEADS * _ATTENTION[plain]
    return {"norm": HIDDEN, "activation": WIDTH, "rotary": HEAD_SIZE}[plain]


def call_of_piece(name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    """The call that is timed, on tensors of its own: forward with what the way back needs, or the way back."""
    plain = name.removesuffix(BACKWARD)
    with torch.enable_grad():
        inputs, forward = _made(plain, elements, dtype, device)
        if plain == name:
            return partial(_with_gradients, forward)
        out = forward()
        along = torch.randn_like(out)
    return partial(torch.autograd.grad, out, inputs, along, retain_graph=True)


def _with_gradients(forward: Callable[[], Any]) -> None:
    with torch.enable_grad():
        forward()


def _made(
    plain: str, elements: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], Callable[[], torch.Tensor]]:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype).requires_grad_()

    units = elements // smallest(plain)
    if plain == "norm":
        module = RMSNorm(HIDDEN, 1e-5, device=device, dtype=dtype)
        nn.init.ones_(module.weight)
        x = leaf(units, HIDDEN)
        return [x, module.weight], partial(module, x)
    if plain == "activation":
        up = leaf(units, 2 * WIDTH)
        return [up], partial(_gated, up)
    if plain == "rotary":  # as products leave them: a token's heads side by side
        x = leaf(1, units, 1, HEAD_SIZE)
        angles = torch.rand(units, HEAD_SIZE // 2, device=device)
        return [x], partial(rotate, x.transpose(1, 2), angles.cos()[None, None], angles.sin()[None, None])
    size = _ATTENTION[plain]
    q, k, v = (leaf(units, ROW, heads, size) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return [q, k, v], partial(tiled_attention, *(each.transpose(1, 2) for each in (q, k, v)), None)


def _gated(up: torch.Tensor) -> torch.Tensor:
    gate, value = up.chunk(2, dim=-1)
    return activate(gate, "silu") * value
