"""Variable-length causal attention on GPUs: packed documents and sliding windows without an attention mask in memory,
by PyTorch's FlashAttention-2 kernels (Dao 2023, arXiv:2307.08691).

The sequences of a batch are concatenated to one row of T = B S tokens. `cu_seqlens` gives the index at which each
document begins, so that the kernel skips all pairs of tokens of different documents.

Shapes: B sequences, S tokens of a sequence, T = B S, N query heads, K key-value heads, D head size, L documents.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from meshwright.comm.custom_operator import custom_operator
from meshwright.model.tiled_attention import empty_bsnd

_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


class VarlenMask(NamedTuple):
    """Causal attention within documents and a sliding window. cu_seqlens: int32 [L + 1] on the device, index in the
    concatenated batch at which each document begins, then T; trailing documents may be empty. None: each sequence is
    one document. max_seqlen: tokens of the longest document, an int64 scalar on the CPU: the host does not wait for it,
    and no compiled graph depends on it. window: a token attends to itself and the `window` - 1 tokens before it; 0: no
    window."""

    cu_seqlens: torch.Tensor | None
    max_seqlen: torch.Tensor | None
    window: int = 0


def supports_flash_attention(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return True if PyTorch's flash kernels take queries of this dtype and head size on `device`: on CUDA, in 16-bit
    dtypes, for head sizes that are multiples of 8 up to 256."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and narrow and head_size % 8 == 0 and head_size <= 256


def varlen_attention(
    q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, mask: VarlenMask, scale: float | None = None
) -> torch.Tensor:
    """Return the causal attention softmax(scale q kᵀ) v, [B, N, S, D], stored in memory as [B, S, N, D], of tokens that
    see only their document and window; query head n reads key-value head n // (N / K). `scale`: None: 1 / √D."""
    return torch.ops.meshwright.varlen_attention(q_BNSD, k_BKSD, v_BKSD, *mask, scale)[0]  # type: ignore[no-any-return]


def _compute_attention(
    q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, cu_seqlens: torch.Tensor | None,
    max_seqlen: torch.Tensor | None, window: int, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute variable-length attention without autograd; return the output [B, N, S, D] and each query's log-sum-exp,
    float32 [N, T]. The last four arguments are the fields of `VarlenMask` and the scale of the scores."""
    bounds = _kernel_arguments(q_BNSD, cu_seqlens, max_seqlen)
    heads = (_concatenate(each) for each in (q_BNSD, k_BKSD, v_BKSD))
    out_TND, log_sum_NT = _flash_forward(*heads, *bounds, 0.0, True, False, scale=scale, **_window_sizes(window))[:2]
    return _split(out_TND, q_BNSD), log_sum_NT


_forward = custom_operator("meshwright::varlen_attention")(_compute_attention)


@custom_operator("meshwright::varlen_attention_backward")
def _backward(
    d_out_BNSD: torch.Tensor, saved: list[torch.Tensor], cu_seqlens: torch.Tensor | None,
    max_seqlen: torch.Tensor | None, window: int, scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values, in their shapes. `d_out_BNSD`: gradient of the output;
    `saved`: queries, keys, values, output and log-sum-exps. The last four arguments are those of the forward."""
    bounds = _kernel_arguments(saved[0], cu_seqlens, max_seqlen)
    state = torch.empty(2, dtype=torch.uint64, device=d_out_BNSD.device)  # of random numbers: not read without dropout
    heads = (_concatenate(each) for each in (d_out_BNSD, *saved[:4]))
    of_all = _flash_backward(*heads, saved[4], *bounds, 0.0, True, state, state, scale=scale, **_window_sizes(window))
    dq, dk, dv = (_split(gradient, of) for gradient, of in zip(of_all, saved[:3], strict=True))
    return dq, dk, dv


def _kernel_arguments(
    q_BNSD: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Return the kernels' arguments (cu_seqlens of queries, of keys, tokens of the longest document of queries, of
    keys)."""
    rows, _, tokens, _ = q_BNSD.shape
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=q_BNSD.device)
    return (cu_seqlens,) * 2 + (tokens if max_seqlen is None else int(max_seqlen),) * 2


def _window_sizes(window: int) -> dict[str, int | None]:
    """Return the kernels' arguments for a sliding window (0: none): how many keys before its own and after its own a
    query sees. Without a window both are None, and the causal mask alone decides."""
    return {"window_size_left": window - 1 if window else None, "window_size_right": 0 if window else None}


def _concatenate(x_BNSD: torch.Tensor) -> torch.Tensor:
    """Return the heads of each token of the concatenated batch, [T, N, D]; a copy only if `x_BNSD` is not stored as
    [B, S, N, D]."""
    return x_BNSD.transpose(1, 2).flatten(0, 1)


def _split(x_TND: torch.Tensor, like_BNSD: torch.Tensor) -> torch.Tensor:
    """Return `x_TND`, heads of the concatenated batch, as [B, N, S, D] of the shape of `like_BNSD`."""
    return x_TND.unflatten(0, (like_BNSD.shape[0], like_BNSD.shape[2])).transpose(1, 2)


_forward.register_fake(
    lambda q, *_: (empty_bsnd(q), q.new_empty((q.shape[1], q.shape[0] * q.shape[2]), dtype=torch.float32))
)
_backward.register_fake(lambda d_out, saved, *_: tuple(empty_bsnd(each) for each in saved[:3]))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Save the inputs and outputs for backward (`setup_context` of torch.library.register_autograd)."""
    *heads, ctx.cu_seqlens, ctx.max_seqlen, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(*heads, *output)
    ctx.set_materialize_grads(False)


def _backward_formula(ctx: Any, d_out_BNSD: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the inputs (`backward` of torch.library.register_autograd)."""
    operator = torch.ops.meshwright.varlen_attention_backward
    gradients = operator(d_out_BNSD, list(ctx.saved_tensors), ctx.cu_seqlens, ctx.max_seqlen, ctx.window, ctx.scale)
    return (*gradients, None, None, None, None)


_forward.register_autograd(_backward_formula, setup_context=_save_for_backward)
