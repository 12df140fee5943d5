"""Registration of attention kernels as differentiable custom operators, and the memory layouts that they share.

Shapes: B sequences, S tokens of a sequence, N query heads, K key-value heads, G = N / K, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.comm.custom_operator import custom_operator


def register_attention(
    name: str, forward: Callable[..., Any], backward: Callable[..., Any], result: Callable[..., Any]
) -> None:
    """Register an attention kernel as the differentiable custom operator meshwright::`name`.

    `forward`: function whose arguments are queries, keys and values [B, N or K, S, D] for N query heads and K key-value
    heads, further arguments such as the mask, and the heads' sinks [N] or None. `forward` returns the output, or a
    tuple of the output and of other tensors that `backward` needs. `backward`: function of the output's gradient, the
    list of saved tensors, the further arguments and the sinks. The saved tensors are queries, keys and values, followed
    by the results of `forward` if it returns a tuple. `backward` returns the gradients of queries, keys, values and
    sinks (an empty tensor without sinks). `result`: function of the arguments of `forward` that returns uninitialised
    tensors of the shapes of its result, for torch.compile.
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

    def formula(ctx: Any, d_out_BNSD: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of all of the operator's inputs, given that of its output (`backward` of
        torch.library.register_autograd). ctx: autograd context."""
        q, k, v, sinks, *results = ctx.saved_tensors
        *found, d_sinks = of_gradients(d_out_BNSD, [q, k, v, *results], *ctx.mask, sinks)
        nothing = ([None] * len(each) if _holds_tensors(each) else None for each in ctx.mask)
        return *found, *nothing, None if sinks is None else d_sinks

    registered.register_autograd(formula, setup_context=save)


def _holds_tensors(argument: Any) -> bool:
    """Return True if `argument`, an argument of a custom operator, is a list of tensors. For such an argument autograd
    expects a list of gradients.
    """
    return isinstance(argument, list) and all(isinstance(each, Tensor) for each in argument)


def add_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor) -> None:
    """Add attention sinks to an attention output that was computed without them, in place. A sink adds the term
    exp(sink) to the denominator of each softmax.

    out: attention outputs [..., D] of queries with head size D, overwritten. log_sum: log-sum-exp of each query's
    scores [...], overwritten with the value that includes the sink. sinks: sink score of each query, broadcast to
    [...]. With the new `log_sum`, the usual backward of attention gives the correct gradients of queries, keys and
    values.
    """
    with_sinks = torch.logaddexp(log_sum, sinks.to(log_sum.dtype))
    out.mul_((log_sum - with_sinks).exp_()[..., None])
    log_sum.copy_(with_sinks)


def compute_sink_gradients(sinks_N: Tensor, log_sum_BNS: Tensor, inner_BNS: Tensor) -> Tensor:
    """Return the gradient [N] of the attention-sink scores `sinks_N` of N query heads: minus the sum, over B sequences
    and S queries, of the sink's probability times `inner_BNS`.

    `log_sum_BNS`: log-sum-exp of each query's scores, sink included; `inner_BNS`: dot product of each query's attention
    output and its gradient.
    """
    p_BNS = (sinks_N.to(log_sum_BNS.dtype)[:, None] - log_sum_BNS).exp_()
    return -(p_BNS * inner_BNS).sum(dim=(0, 2)).to(sinks_N.dtype)


def empty_gradient(like: Tensor, sinks: Tensor | None) -> Tensor:
    """Return an uninitialised tensor of the shape of `sinks` for their gradient; if `sinks` is None, an empty tensor
    with the dtype and device of `like`.
    """
    return like.new_empty(0) if sinks is None else torch.empty_like(sinks)


def group_by_kv_head(x_BNSD: Tensor, k_BKSD: Tensor) -> Tensor:
    """View a tensor of N query heads, `x_BNSD` [B, N, S, D], as [B, K, G, S, D]: its heads grouped by the key-value
    head to which they attend, with G = N / K query heads for each of K key-value heads.

    `k_BKSD`: tensor from whose shape K is taken."""
    return x_BNSD.unflatten(1, (k_BKSD.shape[1], -1))


def empty_bsnd(x_BNSD: Tensor, values: Tensor | None = None) -> Tensor:
    """Return an uninitialised tensor [B, N, S, D] of the dtype and the first three dims of `x_BNSD`. The tensor is
    stored in memory as [B, S, N, D], the order in which the projections before and after attention use it. `values`:
    tensor whose last dim replaces D; None: D as in `x_BNSD`."""
    rows, heads, sequence, _ = x_BNSD.shape
    return x_BNSD.new_empty(rows, sequence, heads, (x_BNSD if values is None else values).shape[-1]).transpose(1, 2)
