"""Flash attention on GPUs with packed documents and sliding windows, without an attention mask in memory, by PyTorch's
FlashAttention-2 kernels (Dao 2023, arXiv:2307.08691).

For variable lengths, the sequences of a batch are concatenated to one row of T = B S tokens. `cu_seqlens` gives the
index at which each document begins, so that the kernel skips all pairs of tokens of different documents.

Shapes: B sequences, S queries of a sequence, C keys, T = B S, N query heads, K key-value heads, D head size, L
documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.model import attention_operator as attention_op
from meshwright.model.documents import Documents, move
from meshwright.spec.chunks import pad_document_count

_flash_forward = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


class VarlenMask(NamedTuple):
    """Attention mask in the format of flash kernels: causal, within documents, with a sliding window. It covers this
    rank's chunks of each sequence: two chunks with ring attention, else one chunk, the whole sequence. A chunk boundary
    inside a document cuts it into pieces.

    cu_seqlens: int32 [chunks, L + 1] on the device, for at most L pieces. Row c is about the concatenation of chunk
    number c of all sequences: the start index of each piece, then the number of tokens. Trailing pieces may be empty.
    None: each sequence is one document.

    lengths: int64 [1 + 2 B chunks] on the CPU. It begins with the length of the longest piece in tokens. Then come two
    numbers for each sequence and chunk, about the document of the chunk's first token: the index in the sequence at
    which this document begins, and the number of the chunk's tokens that belong to it.

    window: a token attends to itself and the `window` - 1 tokens before it; 0: no window.
    """

    cu_seqlens: Tensor | None
    lengths: Tensor | None
    window: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors `cu_seqlens` and `lengths` as a list; an empty list where each sequence is one document."""
        return [] if self.cu_seqlens is None or self.lengths is None else [self.cu_seqlens, self.lengths]

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], window: int) -> VarlenMask:
        """Return the mask with these `tensors` (see the property) and this `window`."""
        return cls(tensors[0], tensors[1], window) if tensors else cls(None, None, window)


class FlashCall(NamedTuple):
    """Arguments of a call of the flash kernels, besides queries, keys and values.

    cu_seqlens: start indices of the variable-length pieces of the concatenated sequences, equal for queries and keys;
    None: each sequence is one piece. longest: largest length of a piece in tokens. causal: True for a causal mask
    aligned to the bottom right: the last query attends to all keys. left: sliding window, also aligned to the bottom
    right: the last query attends to at most the last `left` + 1 keys; None: no window. scale: factor of the scores;
    None: 1 / √D.
    """

    cu_seqlens: Tensor | None = None
    longest: int = 0
    causal: bool = False
    left: int | None = None
    scale: float | None = None


def make_varlen_mask(
    documents: Documents, window: int | None, device: torch.device, held: tuple[int, ...] = (0,), chunks: int = 1
) -> VarlenMask:
    """Build the attention mask of a batch for flash kernels, on the host; the mask's `cu_seqlens` is then copied to
    `device`.

    `documents`: boundaries in packed sequences; `window`: sliding window in tokens (None: none); `chunks`: number of
    chunks into which each sequence is cut for ring attention; `held`: indices of the chunks that this rank holds."""
    starts_BS = documents.on_host().starts_BS
    if starts_BS is None or documents.bounds:
        return VarlenMask.from_tensors(documents.bounds, window or 0)
    cu_seqlens, lengths = find_lengths(starts_BS.unflatten(1, (chunks, -1)), held)
    return VarlenMask(move(cu_seqlens, device), lengths, window or 0)


def find_lengths(starts_BXC: Tensor, held: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Compute the fields `cu_seqlens` (here on the CPU) and `lengths` of a `VarlenMask`; return both.

    `starts_BXC`: index in the sequence at which each token's document begins, for B sequences cut into X chunks of C
    tokens; `held`: indices of the chunks that this rank holds.
    """
    starts_BHC = starts_BXC[:, held]
    first_BH1 = starts_BHC[..., :1]
    is_first_BHC = starts_BHC == torch.arange(starts_BXC[0].numel()).view(starts_BXC.shape[1:])[held, :]
    is_first_BHC[..., 0] = True
    begins = [row.nonzero().flatten() for row in is_first_BHC.transpose(0, 1).flatten(1)]
    padded = pad_document_count(max(map(len, begins)))  # so that batches share compiled graphs
    cu_seqlens = torch.full((len(held), padded + 1), starts_BHC[:, 0].numel(), dtype=torch.int32)
    for row, places in zip(cu_seqlens, begins, strict=True):
        row[: len(places)] = places
    leading_BH2 = torch.cat([first_BH1, (starts_BHC == first_BH1).sum(dim=-1, keepdim=True)], dim=-1)
    return cu_seqlens, torch.cat([cu_seqlens.diff().max().long()[None], leading_BH2.flatten()])


def supports_flash_attention(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Return True if PyTorch's flash kernels take queries of `dtype` and `head_size` on `device`: on CUDA, in 16-bit
    dtypes, for head sizes that are multiples of 8 up to 256."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and narrow and head_size % 8 == 0 and head_size <= 256


def varlen_attention(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, mask: VarlenMask, scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the causal attention softmax(scale q kᵀ) v, [B, N, S, D], computed by flash kernels, of queries `q_BNSD`
    to keys `k_BKSD` and values `v_BKSD`. The output is stored in memory as [B, S, N, D]; query head n reads key-value
    head n // (N / K).

    `mask`: documents and sliding window within which tokens attend; `scale`: factor of the scores (None: 1 / √D).
    `sinks`: attention-sink score of each query head [N]; None: none.
    """
    found = torch.ops.meshwright.varlen_attention(q_BNSD, k_BKSD, v_BKSD, mask.tensors, mask.window, scale, sinks)
    return found[0]


def flash_forward(q_BNSD: Tensor, k_BKCD: Tensor, v_BKCD: Tensor, call: FlashCall) -> tuple[Tensor, Tensor]:
    """Run PyTorch's flash kernel once on queries `q_BNSD`, keys `k_BKCD` and values `v_BKCD`. Return the attention
    output [B, N, S, D] and each query's log-sum-exp, float32 [B, N, S].

    `call`: causality, window and variable lengths."""
    arguments = _make_kernel_arguments((q_BNSD, k_BKCD, v_BKCD), call)
    options = {"scale": call.scale, "window_size_left": call.left}
    out, log_sum = _flash_forward(*arguments, 0.0, call.causal, False, **options)[:2]
    if call.cu_seqlens is not None:  # [N, T]
        log_sum = log_sum.unflatten(1, (len(q_BNSD), -1)).transpose(0, 1)
    return _from_kernel(out, q_BNSD), log_sum


def flash_backward(d_out_BNSD: Tensor, saved: Sequence[Tensor], call: FlashCall) -> tuple[Tensor, Tensor, Tensor]:
    """Run PyTorch's flash backward kernel once; return the gradients of queries, keys and values, in their shapes.

    `d_out_BNSD`: output gradient; `saved`: queries, keys, values, output and log-sum-exps. In ring attention the keys
    and values are one rank's KV block, while output and log-sum-exps belong to attention over all keys. `call`:
    arguments of the forward.
    """
    *heads, log_sum = saved
    q, k, v, out, d_out, *bounds = _make_kernel_arguments((*heads, d_out_BNSD), call)
    if call.cu_seqlens is not None:
        log_sum = log_sum.transpose(0, 1).flatten(1)
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of random numbers: not read without dropout
    rest = *bounds, 0.0, call.causal, state, state
    options = {"scale": call.scale, "window_size_left": call.left}
    of_all = _flash_backward(d_out, q, k, v, out, log_sum.contiguous(), *rest, **options)
    dq, dk, dv = map(_from_kernel, of_all, heads)
    return dq, dk, dv


def _make_kernel_arguments(heads: Sequence[Tensor], call: FlashCall) -> tuple[Any, ...]:
    """Return positional arguments of the flash kernels: the tensors `heads` (queries, keys ...) as [B, S, N, D] or,
    with variable lengths, [T, N, D] (copied only where the memory layout requires it); cu_seqlens of queries and of
    keys; the longest lengths of queries and of keys.

    `call`: variable lengths, causality and window."""
    by_token = [each.transpose(1, 2) for each in heads]
    if call.cu_seqlens is None:
        return *by_token, None, None, by_token[0].shape[1], by_token[1].shape[1]
    longest = max(2, call.longest)  # for one query the kernels assume one token in each document
    return *(each.flatten(0, 1) for each in by_token), call.cu_seqlens, call.cu_seqlens, longest, longest


def _from_kernel(x: Tensor, like_BNSD: Tensor) -> Tensor:
    """View a kernel's result `x`, [B, S, N, D] or [T, N, D], as [B, N, S, D], the shape of `like_BNSD`."""
    return x.view(like_BNSD.transpose(1, 2).shape).transpose(1, 2)


def _compute_attention(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, tensors: list[Tensor], window: int,
    scale: float | None, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute variable-length attention of queries `q_BNSD` to keys `k_BKSD` and values `v_BKSD`, without autograd;
    return the output [B, N, S, D] and each query's log-sum-exp, float32 [B, N, S].

    `tensors`, `window`: fields of a `VarlenMask`; `scale`: factor of the scores (None: 1 / √D); `sinks`: attention-sink
    score of each query head (None: none).
    """
    found = flash_forward(q_BNSD, k_BKSD, v_BKSD, _make_causal_call(q_BNSD, tensors, window, scale))
    if sinks is not None:
        attention_op.add_sinks(*found, sinks[:, None])
    return found


def _compute_gradients(
    d_out_BNSD: Tensor, saved: list[Tensor], tensors: list[Tensor], window: int,
    scale: float | None, sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of queries, keys and values, in their shapes, and of the sinks.

    `d_out_BNSD`: gradient of the output; `saved`: queries, keys, values, output and log-sum-exps; `tensors`, `window`:
    fields of a `VarlenMask`; `scale`: factor of the scores (None: 1 / √D); `sinks`: attention-sink score of each query
    head (None: none).
    """
    found = flash_backward(d_out_BNSD, saved, _make_causal_call(d_out_BNSD, tensors, window, scale))
    if sinks is None:
        return *found, attention_op.empty_gradient(d_out_BNSD, None)
    out, log_sum = saved[3:]
    return *found, attention_op.compute_sink_gradients(sinks, log_sum, (d_out_BNSD.float() * out).sum(dim=-1))


def _make_causal_call(q_BNSD: Tensor, tensors: list[Tensor], window: int, scale: float | None) -> FlashCall:
    """Return the kernel arguments of causal attention of the queries `q_BNSD`. `tensors`, `window`: fields of a
    `VarlenMask` with one chunk per sequence; `scale`: factor of the scores; None: 1 / √D.
    """
    left = window - 1 if window else None
    if tensors:
        cu_seqlens, lengths = tensors
        return FlashCall(cu_seqlens[0], int(lengths[0]), True, left, scale)
    tokens = q_BNSD.shape[2]
    ends = torch.arange(0, len(q_BNSD) * tokens + 1, tokens, dtype=torch.int32, device=q_BNSD.device)
    return FlashCall(ends, tokens, True, left, scale)


def _empty_results(q_BNSD: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return an uninitialised output [B, N, S, D] and log-sum-exp [B, N, S] for queries `q_BNSD`: fake implementation
    of the operator, for torch.compile. `rest`: ignored."""
    rows, heads, tokens, _ = q_BNSD.shape
    return attention_op.empty_bsnd(q_BNSD), q_BNSD.new_empty(heads, rows, tokens, dtype=torch.float32).transpose(0, 1)


attention_op.register_attention("varlen_attention", _compute_attention, _compute_gradients, _empty_results)
