"""Attention of queries over some of their keys, merged with the results over other keys: the mathematics of ring
attention.

Partial results are merged by their log-sum-exps; backward recomputes probabilities from the log-sum-exp over all keys
(Dao 2023, arXiv:2307.08691, algorithms 1 and 2).

Shapes: B sequences, C tokens of a sequence on this rank, K key-value heads, G query heads of each, D head size. In a
tile: P pairs of a sequence and a key-value head, X = G x queries of the tile, L keys that the tile sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from meshwright.model.precision import at_least_float32
from meshwright.model.tiled_attention import Scores, Span, by_kv_head, compute_scores, cut_tiles, flatten_heads
from meshwright.model.varlen_attention import supports_flash_attention

aten = torch.ops.aten


class PartialAttention(NamedTuple):
    """Attention of this rank's queries over some of the keys. `q_BKGCD`: queries; `out_BKGCD`, `log_sum_BKGC`: output
    and log-sum-exp of each query over the keys seen so far, in at least float32; `first_BC`: index of the first key
    that each query attends to (None: 0); `how`: scale and softcap of the scores."""

    q_BKGCD: torch.Tensor
    out_BKGCD: torch.Tensor
    log_sum_BKGC: torch.Tensor
    first_BC: torch.Tensor | None
    how: Scores

    @classmethod
    def empty(cls, q_BKGCD: torch.Tensor, first_BC: torch.Tensor | None, how: Scores) -> PartialAttention:
        """Return the attention of the queries `q_BKGCD` over no keys."""
        wide = at_least_float32(q_BKGCD.dtype)
        log_sum_BKGC = q_BKGCD.new_full(q_BKGCD.shape[:-1], float("-inf"), dtype=wide)
        return cls(q_BKGCD, q_BKGCD.new_zeros(q_BKGCD.shape, dtype=wide), log_sum_BKGC, first_BC, how)


def add_span(so_far: PartialAttention, k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, span: Span) -> None:
    """Compute the attention of `span` (a slice of queries over a slice of keys) and merge it, in place, into the result
    over the keys of earlier spans (`so_far`). Without masks and softcap, PyTorch's flash attention computes it where it
    supports the queries."""
    q_BKGCD, out_BKGCD, log_sum_BKGC, first_BC, how = so_far
    if uses_flash_attention(q_BKGCD, first_BC, how):
        _add_span_fused(so_far, k_BKCD, v_BKCD, span)
        return
    for rows, heads, tiles in cut_tiles(q_BKGCD, span, first_BC):
        k_PCD, v_PCD = flatten_heads(k_BKCD[rows, heads]), flatten_heads(v_BKCD[rows, heads])
        wide_k_PCD = k_PCD.to(out_BKGCD.dtype)
        for tile in tiles:
            at = (rows, heads, slice(None), tile.queries)
            part = q_BKGCD[at]
            scores_PXL, _ = compute_scores(flatten_heads(part), wide_k_PCD, tile, part.shape, how)
            p_PXL = torch.softmax(scores_PXL, dim=-1)
            # The greatest probability is exp(greatest score - log sum).
            here = (scores_PXL.amax(dim=-1) - p_PXL.amax(dim=-1).log()).view(part.shape[:-1])
            o_PXD = torch.bmm(p_PXL.to(q_BKGCD.dtype), v_PCD[:, tile.keys])
            _merge(out_BKGCD[at], log_sum_BKGC[at], o_PXD.view(part.shape), here)


def _add_span_fused(so_far: PartialAttention, k_BKCD: torch.Tensor, v_BKCD: torch.Tensor, span: Span) -> None:
    """Compute the attention of `span` with PyTorch's flash attention and merge it, in place, into the result over
    earlier spans (`so_far`): the counterpart of `add_span` for plain causal attention."""
    part = so_far.q_BKGCD[..., span.queries, :]
    q, k, v = part.flatten(1, 2), k_BKCD[:, :, span.keys], v_BKCD[:, :, span.keys]
    causal = span.query_start == span.key_start
    o, here = _flash_operator(q.device)(q, k, v, 0.0, causal, scale=so_far.how.scale)[:2]
    into = so_far.out_BKGCD[..., span.queries, :], so_far.log_sum_BKGC[..., span.queries]
    _merge(*into, o.view(part.shape), here.view(part.shape[:-1]))


def _merge(out: torch.Tensor, log_sum: torch.Tensor, more: torch.Tensor, log_sum_more: torch.Tensor) -> None:
    """Merge two attention results of the same queries over different keys, in place into the first: `out`, `log_sum`
    (output and log-sum-exp). `more`, `log_sum_more`: the second result. The merged output is the mean of both outputs,
    weighted by the exponentials of their log-sum-exps."""
    both = torch.logaddexp(log_sum, log_sum_more)
    out.mul_((log_sum - both).exp_()[..., None])
    out.addcmul_(more.to(out.dtype), (log_sum_more - both).exp_()[..., None])
    log_sum.copy_(both)


class SavedQueries(NamedTuple):
    """Tensors of this rank's queries that ring attention's backward reads. `q`, `out`, `d_out`: queries, output and its
    gradient, each [B, K, G, C, D] (K key-value heads, G query heads of each, C tokens); `log_sum_BKGC`: log-sum-exps
    over all keys; `inner_BKGC`: sum over D of `out` times `d_out`; `first_BC`: index of the first key that each query
    attends to (None: 0); `how`: scale and softcap of the scores."""

    q: torch.Tensor
    out: torch.Tensor
    d_out: torch.Tensor
    log_sum_BKGC: torch.Tensor
    inner_BKGC: torch.Tensor
    first_BC: torch.Tensor | None
    how: Scores


def add_span_gradients(
    dq_BKGCD: torch.Tensor,
    d_keys_values: torch.Tensor,
    saved: SavedQueries,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    span: Span,
) -> None:
    """Compute the gradients of the attention of `span` (a slice of queries over a slice of keys) and add them in place:
    those of the queries to `dq_BKGCD`, those of the keys and values to `d_keys_values` [2, B, K, C, D]. `saved`: this
    rank's queries, outputs and output gradients."""
    if uses_flash_attention(saved.q, saved.first_BC, saved.how):
        _add_span_gradients_fused(dq_BKGCD, d_keys_values, saved, k_BKCD, v_BKCD, span)
        return
    dtype, scale = saved.q.dtype, saved.how.scale
    for rows, heads, tiles in cut_tiles(saved.q, span, saved.first_BC):
        k_PCD, v_PCD = flatten_heads(k_BKCD[rows, heads]), flatten_heads(v_BKCD[rows, heads])
        dk_PCD, dv_PCD = (each[rows, heads].view(k_PCD.shape) for each in d_keys_values)
        wide_k_PCD = k_PCD.to(dq_BKGCD.dtype)
        for tile in tiles:
            at = (rows, heads, slice(None), tile.queries)
            part = saved.q[at]
            q_PXD, d_out_PXD = flatten_heads(part), flatten_heads(saved.d_out[at])
            log_sum_PX1 = _to_column(saved.log_sum_BKGC[at])
            scores_PXL, slope_PXL = compute_scores(q_PXD, wide_k_PCD, tile, part.shape, saved.how, log_sum_PX1)
            p_PXL = scores_PXL.exp_()
            dv_PCD[:, tile.keys] += torch.bmm(p_PXL.to(dtype).mT, d_out_PXD)
            less_PX1, v_PDL = _to_column(saved.inner_BKGC[at]), v_PCD[:, tile.keys].mT
            if dtype == less_PX1.dtype:
                dp_PXL = torch.baddbmm(less_PX1, d_out_PXD, v_PDL, beta=-1)
            else:
                dp_PXL = torch.bmm(d_out_PXD, v_PDL) - less_PX1
            ds_PXL = p_PXL.mul_(dp_PXL).mul_(1 if slope_PXL is None else slope_PXL).to(dtype)
            dq_PXD = torch.bmm(ds_PXL, k_PCD[:, tile.keys])
            dq_BKGCD[at].add_(dq_PXD.view(part.shape), alpha=scale)
            dk_PCD[:, tile.keys].add_(torch.bmm(ds_PXL.mT, q_PXD), alpha=scale)


def _add_span_gradients_fused(
    dq_BKGCD: torch.Tensor,
    d_keys_values: torch.Tensor,
    saved: SavedQueries,
    k_BKCD: torch.Tensor,
    v_BKCD: torch.Tensor,
    span: Span,
) -> None:
    """Compute the gradients of the attention of `span` with PyTorch's flash attention and add them in place to
    `dq_BKGCD` and `d_keys_values` [2, B, K, C, D]: the counterpart of `add_span_gradients` for plain causal attention.
    `span`: a slice of queries over a slice of keys; `saved`: this rank's queries, outputs and output gradients."""
    q, out, d_out = (x[..., span.queries, :].flatten(1, 2) for x in (saved.q, saved.out, saved.d_out))
    log_sum = saved.log_sum_BKGC[..., span.queries].flatten(1, 2).contiguous()
    k, v = k_BKCD[:, :, span.keys], v_BKCD[:, :, span.keys]
    tokens, causal = q.shape[2], span.query_start == span.key_start
    if q.is_cuda:
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # unused: no dropout
        between = None, None, tokens, tokens, 0.0, causal, seed, seed
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, log_sum, *between, scale=saved.how.scale
        )
    else:
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(d_out, q, k, v, out, log_sum, 0.0, causal, scale=saved.how.scale)
    dq_BKGCD[..., span.queries, :] += by_kv_head(dq, k_BKCD)
    d_keys_values[0, :, :, span.keys] += dk
    d_keys_values[1, :, :, span.keys] += dv


def uses_flash_attention(q: torch.Tensor, first_BC: torch.Tensor | None, how: Scores) -> bool:
    """Return True if PyTorch's flash attention computes the spans: it supports the queries, nothing is masked, and the
    scores have no softcap."""
    return first_BC is None and not how.softcap and supports_flash_attention(q.device, q.dtype, q.shape[-1])


def _flash_operator(device: torch.device) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return PyTorch's operator of the flash-attention forward for `device` (CUDA or CPU)."""
    on_cuda = device.type == "cuda"
    return aten._scaled_dot_product_flash_attention if on_cuda else aten._scaled_dot_product_flash_attention_for_cpu


def _to_column(x: torch.Tensor) -> torch.Tensor:
    """Reshape a per-query tensor [sequences, heads, G, X] to [sequences x heads, G x X, 1], the order of
    `flatten_heads`. G: query heads per key-value head; X: queries."""
    return flatten_heads(x[..., None])
