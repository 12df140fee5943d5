"""Registration of attention kernels as differentiable custom operators, and the memory layouts that they share.

Shapes: B sequences, S tokens of a sequence, N query heads, K key-value heads, G = N / K, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm.custom_operator import custom_operator


def attention_operator(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], result: Callable[..., Any]
) -> None:
    """Register `forward` as the custom operator meshwright::`name`, differentiable by the operator of `backward`.

    `forward` takes queries, keys, values [B, N or K, S, D] and further arguments (the mask) and returns the output, or
    a tuple of the output and what `backward` needs of it. `backward` takes the output's gradient, the list of saved
    tensors (queries, keys, values and, if `forward` returns a tuple, its results) and the further arguments; it returns
    the gradients of queries, keys and values. `result`: function of the arguments of `forward` that returns what it
    does, uninitialised, for tracing."""
    registered = custom_operator(f"meshwright::{name}")(forward)
    of_gradients = custom_operator(f"meshwright::{name}_backward")(backward)
    registered.register_fake(result)
    of_gradients.register_fake(lambda d_out, saved, *_: tuple(empty_bsnd(each) for each in saved[:3]))

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save queries, keys, values and mask (`inputs`), and `output` if `forward` returns a tuple, for backward:
        `setup_context` of torch.library.register_autograd."""
        ctx.mask = inputs[3:]
        ctx.save_for_backward(*inputs[:3], *(output if isinstance(output, tuple) else ()))
        ctx.set_materialize_grads(False)

    def formula(ctx: Any, d_out_BNSD: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of queries, keys and values, and None for the mask, given the output gradient:
        `backward` of torch.library.register_autograd."""
        return *of_gradients(d_out_BNSD, list(ctx.saved_tensors), *ctx.mask), *(None for _ in ctx.mask)

    registered.register_autograd(formula, setup_context=save)


def by_kv_head(x_BNSD: torch.Tensor, k_BKSD: torch.Tensor) -> torch.Tensor:
    """View `x_BNSD` [B, N, S, D], a tensor of N query heads, as [B, K, G, S, D]: query heads grouped by the key-value
    head that they read, G for each of K. `k_BKSD`: tensor from whose shape K is taken."""
    return x_BNSD.unflatten(1, (k_BKSD.shape[1], -1))


def empty_bsnd(x_BNSD: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor of the shape [B, N, S, D] and dtype of `x_BNSD`, stored in memory as [B, S, N, D]:
    the order in which the projections before and after attention use it."""
    rows, heads, sequence, size = x_BNSD.shape
    return x_BNSD.new_empty(rows, sequence, heads, size).transpose(1, 2)
