"""Registration of attention kernels as differentiable custom operators, and the memory layouts that they share.

Shapes: B sequences, S tokens of a sequence, N query heads, K key-value heads, G = N / K, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright.comm.custom_operator import custom_operator


def register_attention(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], result: Callable[..., Any]
) -> None:
    """Register an attention kernel as the differentiable custom operator meshwright::`name`.

    `forward`: takes queries, keys, values [B, N or K, S, D], further arguments (the mask) and last the heads' sinks [N]
    (or None); returns the output, or a tuple of the output and other tensors that `backward` needs.

    `backward`: takes the output's gradient, the list of saved tensors (queries, keys, values and, if `forward` returns
    a tuple, its results), the further arguments and the sinks; returns the gradients of queries, keys, values and sinks
    (an empty tensor without sinks).

    `result`: takes the arguments of `forward`; returns uninitialised tensors of the shapes of its result, for
    torch.compile.
    """
    registered = custom_operator(f"meshwright::{name}")(forward)
    of_gradients = custom_operator(f"meshwright::{name}_backward")(backward)
    registered.register_fake(result)
    of_gradients.register_fake(
        lambda d_out, saved, *rest: (*(empty_bsnd(each) for each in saved[:3]), empty_gradient(d_out, rest[-1]))
    )

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the operator's tensors and mask for backward (`setup_context` of torch.library.register_autograd). ctx:
        autograd context; `inputs`, `output`: those of the operator."""
        ctx.mask = inputs[3:-1]
        ctx.save_for_backward(*inputs[:3], inputs[-1], *(output if isinstance(output, tuple) else ()))
        ctx.set_materialize_grads(False)

    def formula(ctx: Any, d_out_BNSD: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of all of the operator's inputs, given that of its output (`backward` of
        torch.library.register_autograd). ctx: autograd context."""
        q, k, v, sinks, *results = ctx.saved_tensors
        *found, d_sinks = of_gradients(d_out_BNSD, [q, k, v, *results], *ctx.mask, sinks)
        nothing = ([None] * len(each) if _holds_tensors(each) else None for each in ctx.mask)
        return *found, *nothing, None if sinks is None else d_sinks

    registered.register_autograd(formula, setup_context=save)


def _holds_tensors(argument: Any) -> bool:
    """Return True if `argument`, an argument of a custom operator, is a list of tensors, for which autograd expects a
    list of gradients.
    """
    return isinstance(argument, list) and all(isinstance(each, torch.Tensor) for each in argument)


def add_sinks(out: torch.Tensor, log_sum: torch.Tensor, sinks: torch.Tensor) -> None:
    """Add attention sinks, in place, to an attention output that was computed without them: the denominator of each
    softmax gets the further term exp(sink).

    out: attention outputs [..., D]; log_sum: their log-sum-exps [...], which then include the sinks; sinks: sink score
    of each query, broadcast to [...].

    With the new `log_sum`, the usual backward of attention gives the correct gradients of queries, keys and values.
    """
    with_sinks = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
    out.mul_((log_sum - with_sinks).exp_()[..., None])
    log_sum.copy_(with_sinks)


def compute_sink_gradients(sinks_N: torch.Tensor, log_sum_BNS: torch.Tensor, inner_BNS: torch.Tensor) -> torch.Tensor:
    """Return the gradient [N] of the attention-sink scores `sinks_N`: minus the sum, over sequences and queries, of the
    sink's probability times `inner_BNS`.

    `log_sum_BNS`: log-sum-exps of the scores, sinks included; `inner_BNS`: sum over the head dimension of the attention
    output times its gradient."""
    p_BNS = (sinks_N.to(log_sum_BNS.dtype)[:, None] - log_sum_BNS).exp_()
    return -(p_BNS * inner_BNS).sum(dim=(0, 2)).to(sinks_N.dtype)


def empty_gradient(like: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return an uninitialised tensor for the gradient of `sinks`; without sinks (None) a tensor without elements, of
    the dtype and device of `like`.
    """
    return like.new_empty(0) if sinks is None else torch.empty_like(sinks)


def group_by_kv_head(x_BNSD: torch.Tensor, k_BKSD: torch.Tensor) -> torch.Tensor:
    """View a tensor of N query heads, `x_BNSD` [B, N, S, D], as [B, K, G, S, D]: its heads grouped by the key-value
    head to which they attend, with G = N / K query heads for each of K key-value heads.

    `k_BKSD`: tensor from whose shape K is taken."""
    return x_BNSD.unflatten(1, (k_BKSD.shape[1], -1))


def empty_bsnd(x_BNSD: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
    """Return an uninitialised tensor of the shape [B, N, S, D] and dtype of `x_BNSD`, stored in memory as [B, S, N, D]:
    the order in which the projections before and after attention use it.

    `values`: tensor whose last dim replaces D; None: D as in `x_BNSD`."""
    rows, heads, sequence, _ = x_BNSD.shape
    return x_BNSD.new_empty(rows, sequence, heads, (x_BNSD if values is None else values).shape[-1]).transpose(1, 2)
